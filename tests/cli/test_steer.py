"""`kp steer`, as a new user would try it: on good and on broken input."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kp_cli.app import run
from kp_core.steering import load_steering, preset_names, save_steering
from tests.conftest import tiny_engine

Kp = Callable[..., tuple[int, str, str]]
TINY = ("--engine", "tests.cli.engines:tiny")
PAIRS = [["I should be obliged for a reply.", "write back ok"], ["It is most regrettable.", "that sucks"]]


@pytest.fixture
def kp(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Kp]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "pairs.json").write_text(json.dumps(PAIRS))
    engine = TINY if "tiny" in request.fixturenames else ()

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["steer", *arguments, *(engine if arguments[0] == "make" else ())])
        said = capfd.readouterr()
        return code, said.out, said.err

    yield call
    logging.getLogger("kp_core").setLevel(logging.NOTSET)


@pytest.fixture
def tiny() -> None:
    """`kp` loads a model of random weights in place of the bundled one: these tests are about the commands."""


def as_json(result: tuple[int, str, str]) -> dict[str, Any]:
    assert result[0] == 0, result
    found: dict[str, Any] = json.loads(result[1])
    return found


def test_list_names_every_preset(kp: Kp) -> None:
    code, out, _ = kp("list")
    assert code == 0
    assert all(name in out for name in preset_names())
    rows = as_json(kp("list", "--json"))["presets"]
    assert [row["name"] for row in rows] == list(preset_names())
    assert all(row["pairs"] >= 24 and row["about"] for row in rows)
    assert kp("--help")[0] == 0


def test_make_and_show(kp: Kp, tiny: None, tmp_path: Path) -> None:
    made = as_json(kp("make", "pairs.json", "-o", "new/formal.steering", "--layers", "0-1", "--json"))
    steering = load_steering(tmp_path / "new/formal.steering")
    assert made["id"] == steering.id
    assert made["layers"] == [0, 1]
    assert made["coherent"] is None
    assert made["recommended"] == {"alone": 1, "with_knowledge": 0.7, "calibrated": False}
    code, out, _ = kp("show", "new/formal.steering")
    assert code == 0
    assert all(words in out for words in ("alone: 1 ", "with knowledge: 0.7", "calibrated: no", "strength"))
    fit = replace(steering, coherent=(-1.0, 2.0), recommended=(2.0, 0.5))
    save_steering(fit, tmp_path / "fit.steering")
    shown = as_json(kp("show", "fit.steering", "--json"))
    assert shown["recommended"] == {"alone": 2, "with_knowledge": 0.5, "calibrated": True}
    assert shown["coherent"] == [-1, 2]


def test_a_steering_of_keys_says_so_and_steers_answers(kp: Kp, tiny: None) -> None:
    code, out, _ = kp("make", "pairs.json", "-o", "of keys", "--method", "last_token", "--layers", "0.0-1.0")
    assert (code, "`kp ask COLLECTION QUESTION --steering 'of keys'` answers with it." in out) == (0, True)
    code, out, _ = kp("show", "of keys")
    assert code == 0
    assert [line.split()[3] for line in out.splitlines() if " keys " in line][-1] == "yes"
    assert run(["build", "bank", "--fact", "The bird on the flag is a heron."]) == 0
    assert run(["ask", "bank", "Which bird?", "--steering", "of keys", "--max-tokens", "2", *TINY]) == 0


@pytest.mark.slow
def test_the_bundled_model_is_the_default(kp: Kp) -> None:
    about = as_json(kp("make", "pairs.json", "-o", "s", "--dtype", "float32", "--json"))
    assert about["layers"] == list(range(10, 20))
    assert about["dtype"] == "float32"


def test_ask_speaks_as_a_steering_says(
    kp: Kp,
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "facts.jsonl").write_text('{"text": "The bird on the flag is a heron."}')
    assert run(["build", "bank", "facts.jsonl"]) == 0
    assert kp("make", "pairs.json", "-o", "s", "--layers", "0-1")[0] == 0
    told, steering = (
        ["ask", "bank", "Which bird?", "-k", "1", "--max-tokens", "6", "--json", *TINY],
        load_steering(tmp_path / "s"),
    )
    asked: list[Any] = []
    stream = tiny_engine().stream

    def heard(messages: Any, **request: Any) -> Any:
        asked.append(request["steering"])
        return stream(messages, **request)

    monkeypatch.setattr(tiny_engine(), "stream", heard)
    for options in ([], ["--steering", "s"], ["--steering", "s", "--alpha", "-20"]):
        assert run([*told, *options]) == 0
        assert ("was not calibrated" in " ".join(capfd.readouterr().err.split())) == ("-20" in options)
    assert asked == [None, (steering, None), (steering, -20)]
    assert run([*told, "--steering", "s", "--dtype", "bfloat16"]) == 1
    assert "dtype" in capfd.readouterr().err
    assert run([*told, "--alpha", "1"]) == 2
    assert run([*told, "--steering", "facts.jsonl"]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["mak"], 2, "Did you mean 'make'?"),
        (["make", "pairs.json"], 2, "Missing option"),
        (["make", "fromal", "-o", "s"], 1, "Did you mean formal?"),
        (["make", "broken.json", "-o", "s"], 1, "broken.json is not JSON"),
        (["make", "number.json", "-o", "s"], 1, "holds no list of pairs"),
        (["make", "empty.json", "-o", "s"], 1, "expected pairs of (positive, negative)"),
        (["make", "onesided.json", "-o", "s"], 1, "Pair 0 has an empty side"),
        (["make", "three.json", "-o", "s"], 1, "for pair 0"),
        (["make", "same.json", "-o", "s"], 1, "Both sides of pair 0 are the same prompt"),
        (["make", "numbers.json", "-o", "s"], 1, "for pair 0"),
        (["make", "pairs.json", "-o", "s", "--layers", "0-99"], 1, "model of 2 layers"),
        (["make", "pairs.json", "-o", "s", "--layers", "top"], 2, "expected 0.33-0.67 or 10-19"),
        (["make", "pairs.json", "-o", "s", "--method", "median"], 2, "'median' is not one of 'mean', 'last_token'"),
        (["make", "pairs.json", "-o", "."], 2, "'.' is a directory"),
        (["show", "nothing"], 1, "nothing"),
        (["show", "pairs.json"], 1, "no intact steering"),
        (
            ["calibrate", "good"],
            2,
            "`kp steer calibrate` is gone in 0.3; use `python -m benchmarks.steering_range FILE`",
        ),
    ],
)
def test_errors_are_one_line_and_say_what_to_do(
    kp: Kp, tiny: None, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    for name, text in {
        "broken.json": "[",
        "number.json": '{"pairs": 7}',
        "empty.json": "[]",
        "onesided.json": '[["a", " "]]',
        "three.json": '[["a", "b", "c"]]',
        "same.json": '[["a", "a"]]',
        "numbers.json": "[[1, 2]]",
    }.items():
        (tmp_path / name).write_text(text)
    assert kp("make", "pairs.json", "-o", "good")[0] == 0
    got, out, err = kp(*arguments)
    assert got == code, err
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err + out
    if code == 1:
        assert len(err.strip().splitlines()) == 1
        assert json.loads(kp(*arguments, "--json")[1])["message"] in err
