"""What a newcomer meets: the guide, the demo, sizes, an interrupt, and what a second question saves."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kp_cli import INTERRUPTED, demo, waiting
from kp_cli.app import _COMMANDS, _GONE, load_command
from kp_core import PackStore
from tests.cli.conftest import ENVIRONMENT, Kp, as_json
from tests.cli.engines import tiny
from tests.conftest import until

TINY = ("--engine", "tests.cli.engines:tiny")
OWN = ("--engine", "tests.cli.engines:own")


def small(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    monkeypatch.setattr(demo, "_TOKENS", sizes)
    monkeypatch.setattr(demo, "_PASSAGES", 3)
    monkeypatch.setattr(demo, "_LENGTH", 40)


def test_kp_alone_says_what_to_do_and_which_collections_are_here(kp: Kp, bank: Path) -> None:
    code, out, err = kp()
    assert (code, err) == (0, "")
    assert "kp demo" in out
    assert out.splitlines()[-1] == f"Collections here: {bank.name}"


def test_the_version_is_that_of_the_installed_package(kp: Kp) -> None:
    assert kp("--version") == (0, importlib.metadata.version("knowledge-packs") + "\n", "")


def test_every_command_is_where_the_table_says() -> None:
    for name in _COMMANDS:
        assert load_command(name).name == name
        assert load_command(name).help


@pytest.mark.parametrize("name", sorted(_GONE))
def test_a_command_that_left_is_refused_with_what_to_use(kp: Kp, name: str) -> None:
    code, _, said = kp(*name.split(), "notes")
    assert code == 2
    assert f"`kp {name}` is gone in 0.3; {_GONE[name]}." in " ".join(said.replace("│", " ").split())


def test_a_search_loads_neither_torch_nor_what_stands_on_it(bank: Path) -> None:
    script = (
        "import sys; from kp_cli.app import run; run(['search', sys.argv[1], 'Which bird?', '-k', '1']);"
        "print({'torch', 'transformers', 'sklearn'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, str(bank)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)  # noqa: S603
    assert "heron" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_page_is_named_beside_its_source(kp: Kp, bank: Path) -> None:
    (bank.parent / "more.jsonl").write_text('{"text": "The weir opens in May.", "source": "weir.pdf", "page": 3}')
    assert kp("build", "bank", "more.jsonl")[0] == 0
    _, out, _ = kp("search", "bank", "When does the weir open?", "-k", "1")
    assert out.count("weir.pdf, page 3") == 2, "as what names it, for want of a title, and where it is from"


def check_demo(out: str, packs: int) -> None:
    said = " ".join(out.split())
    timed = re.findall(r"([\d,]+) tokens text [\d.]+ s packs [\d.]+ s [\d.]+ x sooner", said)
    sizes = [int(size.replace(",", "")) for size in timed]
    assert len(sizes) == 3, out
    assert sizes[1] > sizes[0] > 0
    assert len(re.findall(r"The same [1-9]\d* tokens answer both: ", said)) == 2, "Not the same"
    left = re.search(rf"(\d+) of {packs} packs were left out", said)
    assert left, out
    assert int(left[1]) < packs
    assert len(set(re.findall(r"\((\d+) tokens sent\)", said))) == 1
    assert "every figure above was counted in this run" in said


def test_the_demo_makes_its_points(kp: Kp, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 60, 480)
    code, out, err = kp("demo", *OWN)
    assert code == 0, err
    check_demo(out, demo._PASSAGES)


@pytest.mark.parametrize(
    "sizes", [pytest.param((60, 600), marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.nightly)]
)
def test_the_demo_on_the_bundled_model(kp: Kp, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] | None) -> None:
    if sizes is not None:
        small(monkeypatch, *sizes)
    code, out, err = kp("demo")
    assert code == 0, err
    check_demo(out, demo._PASSAGES)
    assert out.count("Mount Sarrow") > 1, "also in an answer"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="A terminal of its own needs a Unix.")
def test_the_demo_on_a_narrow_terminal_without_colours_and_signs() -> None:
    import pty

    ours, theirs = pty.openpty()
    script = (
        "import sys; from kp_cli import app, demo; demo._TOKENS = (60, 480); demo._PASSAGES = 3; demo._LENGTH = 40;"
        f"sys.exit(app.run(['demo', *{TINY!r}]))"
    )
    plain = ENVIRONMENT | {"NO_COLOR": "1", "PYTHONIOENCODING": "ascii", "COLUMNS": "60", "TERM": "xterm"}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=plain) as process:  # noqa: S603
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:  # On Linux that is how a terminal ends.
            pass
        assert process.wait(60) == 0, said
    os.close(ours)
    assert said.isascii()
    assert not re.search(rb"\x1b\[[\d;]*3[1-7]m", said)
    shown = re.sub(rb"\x1b\[[^A-Za-z]*[A-Za-z]", b"", said).decode().splitlines()
    assert max(len(line.strip()) for each in shown for line in each.split("\r")) <= 60


@pytest.mark.parametrize(
    "library", ["torch", *(pytest.param(each, marks=pytest.mark.slow) for each in ("typer", "transformers"))]
)
def test_an_interrupt_while_libraries_load_is_one_line(bank: Path, library: str) -> None:
    script = (
        "import sys, kp_cli; kp_cli._FIRST_S = 0; seen = [];"
        f"hook = lambda event, given: event == 'import' and given[0] == {library!r} and not seen "
        "and (seen.append(1), print('up', flush=True));"
        "sys.addaudithook(hook); kp_cli.main()"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = [sys.executable, "-c", script, "ask", str(bank), "Which bird?"]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    said = err.decode().splitlines(keepends=True)
    assert (process.returncode, said[-1]) == (130, INTERRUPTED)
    # The first sign came before the library, whose import takes seconds.
    assert said[0] == "Starting ...\n"
    assert library == "typer" or said[1] == "Loading libraries ...\n"


def test_an_interrupt_of_a_command_says_what_is_stored(kp: Kp) -> None:
    said = kp("build", "new", "--fact", "A mill.", "--compile", "--engine", "tests.cli.engines:interrupted")
    assert said == (130, "", INTERRUPTED)


def test_what_takes_long_is_said_and_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kp_cli._FIRST_S", 0.0)
    monkeypatch.setattr("kp_cli._EVERY_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", io.StringIO())
        err = sys.stderr
        with waiting("Loading the model"):
            until(lambda: err.getvalue().count("\n") > 2)
        said = err.getvalue().splitlines()
    assert said[0] == "Loading the model ..."
    assert set(said[1:]) == {"Loading the model ... 0 s"}


def test_what_a_newcomer_meets_fits_80_columns_and_says_what_to_do_next(
    kp: Kp, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (bank.parent / "docs").mkdir()
    (bank.parent / "docs" / "a.txt").write_text("The mill of Aldburgh has four sails.")

    def wide(text: str) -> list[str]:
        return [line for line in text.splitlines() if len(line) > 80]

    screens = [(), *((name, "--help") for name in _COMMANDS), ("steer", "make", "--help"), ("packet", "eval", "--help")]
    asked = ("ask", "bank", "Which bird is on the flag?", *TINY, "--max-tokens", "2")
    screens += [
        ("status", "bank"),
        asked,
        (*asked, "--explain"),
    ]
    screens += [("doctor", *TINY), ("search", "bank", "Which bird?"), ("verify", "bank")]
    for screen in screens:
        code, out, _ = kp(*screen)
        assert (code, wide(out)) == (0, []), screen
    # In a pipe an error stays one line.
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    for command, next_step in {
        ("build", "docs"): "`kp build NAME docs`",
        ("build", "new"): "give one",
        ("ask", "docs", "x"): "`kp build NAME docs` makes one",
        ("ask", "nothing", "x"): "`kp build COLLECTION FILE...` makes one",
        ("ask", "bnk", "x"): "Did you mean bank?",
        ("status", "nothing"): "`kp build",
        ("status", "docs"): "`kp build COLLECTION",
        ("aks", "bank", "x"): "Did you mean 'ask'?",
        ("search", "bank"): "kp search -h",
        ("ask", "bank", "x", "--engine", "nothing"): "expected 'package.module:function'",
        ("serve", "bundled", "--store", "p", "--host", "0.0.0.0"): "KP_API_KEYS",  # noqa: S104 - refused
        ("search", "http://127.0.0.1:9", "x"): "Start it with",
    }.items():
        code, out, err = kp(*command)
        assert (code in (1, 2), out, wide(err)) == (True, "", []), command
        assert next_step in " ".join(err.replace("│", " ").split()), command


def test_a_status_says_what_is_compiled_from_where_and_when_it_was_used(kp: Kp, bank: Path) -> None:
    assert "`kp build bank --compile`" in kp("status", "bank")[1]
    assert kp("build", "bank", "--compile", *TINY)[0] == 0
    told = as_json(kp("status", "bank", "--json"))["packs"]
    [row] = told["sources"]
    assert (row["source"], row["packs"], row["with_kv"]) == ("facts.jsonl", 4, 4)
    assert (row["tokens"], 0 < row["bytes"] < told["bytes"]) == (told["tokens"], True)
    limit = PackStore(bank / "packs").quota.for_kept
    assert told["kept"] == {"entries": 0, "bytes": 0, "max_bytes": limit}
    store = PackStore(bank / "packs")
    store.put(tiny().build_pack("The weir opens in May.", lazy=True))
    store._uses.flush()
    told = as_json(kp("status", str(bank / "packs"), "--json"))
    assert [(row["source"], row["packs"], row["with_kv"]) for row in told["sources"]] == [
        ("(not recorded)", 1, 0),
        ("facts.jsonl", 4, 4),
    ]
    assert told["sources"][0]["used"] == pytest.approx(time.time(), abs=60)
    out = kp("status", "bank")[1]
    assert re.search(r"│ \(not recorded\) │ +1 │ +0 │ +\d+ │ +0.0 │ +now │", out)
    assert re.search(r"│ all +│ +5 │ +4 │", out)


def test_the_second_question_computes_less(kp: Kp, bank: Path) -> None:
    asked = ("ask", "bank", "Which bird is on the flag?", "-k", "2", "--max-tokens", "4", *TINY)
    counts = []
    for _ in range(2):
        tiny().clear_cache()
        said = kp(*asked)[1]
        told = re.search(r"; (\d+) reused, (\d+) computed; ", said)
        waited = re.search(
            r"first token ([\d.]+) s after the question, ([\d.]+) s of them for facts and packs\n$", said
        )
        assert waited
        assert float(waited[1]) >= float(waited[2]) > 0
        assert told
        counts.append([int(count) for count in told.groups()])
    assert counts[1][0] > counts[0][0]
    assert counts[1][1] < counts[0][1]
    code, _, err = kp(*asked, "--kv", "auto")
    assert code == 2
    assert "'auto' is not one of 'stored', 'lazy'" in " ".join(err.replace("│", " ").split())
