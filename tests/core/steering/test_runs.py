"""The benchmarks of steering, from beginning to end on a tiny model."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import common
from kp_core.steering import preset
from tests.conftest import tiny_engine


@pytest.mark.slow
def test_the_benchmark_runs_every_section(tmp_path, capsys, monkeypatch):
    pytest.importorskip("textstat")
    from benchmarks import steering

    monkeypatch.setattr(common, "load_engine", lambda _: tiny_engine())
    arguments = "--questions 2 --tokens 6 --alphas 1 --alpha 1 --repeats 1"
    out, plots, answers = tmp_path / "figures.json", tmp_path / "plots", tmp_path / "answers.jsonl"
    told = ["--json", str(out), "--plots", str(plots), "--answers", str(answers), *arguments.split()]
    figures = steering.main(told)
    assert json.loads(out.read_text()) == figures
    assert set(steering.SECTIONS) <= set(figures)
    assert figures["speed"]["tokens_added"] == 0
    assert [row["alpha"] for row in figures["alpha"]["rows"]] == [0, 1]
    assert set(figures["layers"]) == {"alpha", "first", "middle", "last", "all"}
    sums = {f"{style} + {length}" for style in ("formal", "casual") for length in ("concise", "detailed")}
    assert set(figures["composition"]["kept"]) == sums | {"formal + concise, apart", "instructed: both"}
    names = ("alpha", "layers", "composition", "pairs", "cache")
    assert {path.name for path in plots.iterdir()} == {
        f"steering-{name}{suffix}.svg" for name in names for suffix in ("", "-dark")
    }
    assert "Tokens added by steering: 0" in capsys.readouterr().out
    # What was answered is not asked again.
    held = answers.read_text()
    monkeypatch.setattr(type(tiny_engine()), "generate", None)
    again = steering.main([*told, "--only", "alpha", "layers", "composition", "pairs", "cache"])
    assert all(again[name] == figures[name] for name in names)
    assert answers.read_text() == held


@pytest.mark.slow
def test_the_benchmark_of_both_channels_counts_what_was_said(tmp_path, monkeypatch):
    pytest.importorskip("textstat")
    from benchmarks import dual

    monkeypatch.setattr(common, "load_engine", lambda _: tiny_engine())
    data, out, answers = (tmp_path / name for name in ("questions.jsonl", "figures.json", "answers.jsonl"))
    facts = [{"title": "Veyl", "text": "It lies on Orrelay."}]
    rows = [{"question": f"Where is Veyl {n}?", "answer": "Orrelay", "gold_facts": facts} for n in range(2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = ["--data", str(data), "--json", str(out), "--answers", str(answers), "--tokens", "4", "--others"]
    told += ["--steered", "system:0.7", "pack:0", "--batch", "1"]
    assert dual.main([*told, "--skip", "1"])["questions"] == 1
    assert dual.main(told)["questions"] == 2
    names = {"pack", "system:0.7", "pack:0", "nothing", "steering", "instruction", "pack and instruction"}
    said = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted((row["question"], row["condition"]) for row in said) == sorted(
        (n, name) for n in (0, 1) for name in names
    )
    for row in said:
        if row["question"] == 1:
            row["text"] = "Orrelay it is" if row["condition"] == "system:0.7" else "No idea"
    answers.write_text("".join(json.dumps(row) + "\n" for row in said if row["question"] == 1))
    figures = dual.main([*told, "--skip", "1"])
    assert json.loads(out.read_text()) == figures
    assert figures["questions"] == 1
    assert (figures["pack"]["em"]["mean"], figures["system:0.7"]["em"]["mean"]) == (0, 1)
    assert figures["system:0.7"]["words"]["difference"] == 1
    assert (figures["pack:0"]["changed"], figures["system:0.7"]["changed"]) == (0, 1)


@pytest.mark.slow
def test_both_channels_are_answered_in_batches_as_one_by_one(tmp_path, monkeypatch):
    pytest.importorskip("textstat")
    from benchmarks import dual

    monkeypatch.setattr(common, "load_engine", lambda _: tiny_engine())
    data = tmp_path / "questions.jsonl"
    rows = [
        {
            "question": f"Where is Veyl {n}?",
            "answer": "Orrelay",
            "gold_facts": [{"title": "Veyl", "text": "It is. " * n}],
        }
        for n in (3, 1, 2)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {}
    for batch in ("1", "2"):
        answers = tmp_path / f"{batch}.jsonl"
        told = ["--data", str(data), "--answers", str(answers), "--tokens", "4", "--others", "--batch", batch]
        dual.main([*told, "--steered", "system:2", "pack:2"])
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        said[batch] = {(row["question"], row["condition"]): row["text"] for row in lines}
    assert said["1"] == said["2"]
    assert len(said["1"]) == 3 * 7


@pytest.mark.parametrize("scope", ["system", "pack", "last_token"])
def test_many_at_a_time_are_answered_as_one_by_one(scope):
    engine = tiny_engine()
    method = "last_token" if scope == "last_token" else "mean"
    pairs = preset("formal")[:2]
    steering = engine.make_steering(pairs, method=method, layers=(0.0, 1.0), progress=False).at_strength(8)
    asked = ["Who?", "Who is the 7th er of the 42 words?", "an, the"]
    packs = [engine.build_pack("A fact of the an. " * length, compiled_for="system") for length in (3, 1, 2)]
    requests = {
        (name, at): {"messages": text, "packs": [pack], "steering": made}
        for name, made in {"plain": None, "steered": steering, "other way": -steering}.items()
        for at, (text, pack) in enumerate(zip(asked, packs, strict=True))
    }
    found = engine.generate_many(requests, at_once=5, scope=scope, max_tokens=6, progress=False)
    found = {key: answer.token_ids for key, answer in found}
    assert len({tuple(found[name, at] for at in range(3)) for name, _ in requests}) == 3
    for key, request in requests.items():
        assert engine.generate(**request, scope=scope, max_tokens=6).token_ids == found[key], key


def test_formality_and_brevity_order_texts():
    pytest.importorskip("textstat")
    from benchmarks.scores import brevity, formality

    casual = "hey dude I'm like gonna go, ok? it's cool!"
    plain = "The sun is a star. It gives light to the planets."
    formal = (
        "In accordance with the provisions of the constitution, the assembly shall convene a deliberative committee."
    )
    assert 0 == formality("") < formality(casual) < formality(plain) < formality(formal) <= 1
    assert brevity("one") == 0 > brevity("one two") > brevity(plain)


def test_programs_are_read_out_of_answers():
    pytest.importorskip("textstat")
    from benchmarks.scores import defensive, documented, program

    bare = "def f(x):\n    return 1 / x"
    assert program(f"Sure!\n```python\n{bare}\n```\nThis divides.") == program(bare) == bare
    assert program(f"```\n{bare}\n\ndef g(y):\n    if y ==") == f"{bare}\n"
    assert program("It divides.") is program("x = 1") is program("") is None
    told = 'def f(x):\n    """One over x.\n\n    Twice."""\n    # Divides.\n    return 1 / x'
    assert (documented(bare), documented(told), documented("It divides.")) == (0, 3 / 5, 0)
    guarded = "def f(x):\n    assert isinstance(x, float)\n    if not x:\n        raise ValueError\n    return 1 / x"
    assert (defensive(bare), defensive(guarded), defensive(f"{guarded}\n{bare}"), defensive("no")) == (0, 3, 1.5, 0)


@pytest.mark.slow
def test_the_benchmark_of_code_compares_both_with_each(tmp_path, monkeypatch):
    pytest.importorskip("textstat")
    from benchmarks import programs

    monkeypatch.setattr(common, "load_engine", lambda _: tiny_engine())
    out = tmp_path / "figures.json"
    told = ["--json", str(out), "--plots", str(tmp_path), "--questions", "2", "--tokens", "6", "--strengths", "0.1"]
    figures = programs.main(told)
    assert json.loads(out.read_text()) == figures
    assert set(figures["rows"]) == {
        *("unsteered", "both", "both, in words"),
        *(f"{name}, {way}" for name in ("documented", "defensive") for way in ("0.1", "0.24", "in words")),
    }
    assert (tmp_path / "steering-code.svg").exists()


def test_the_code_of_the_page_runs(monkeypatch):
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")
    monkeypatch.setattr("kp_core.load_engine", lambda **_: tiny_engine())
    page = (Path(__file__).parents[3] / "docs" / "steering.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(compile(block, "steering.md", "exec"), names)  # noqa: S102 - our own page
    assert names["chat"].steering == names["llm"].steering == (names["formal"], None)
    assert names["engine"].build_pack("The sun is a star.").steer(names["formal"]).steering == 0.7 * names["formal"]
