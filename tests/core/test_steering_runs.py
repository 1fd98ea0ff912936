"""The benchmark and the cookbook of steering, from beginning to end on a tiny model."""

import json

import pytest

from benchmarks import common
from cookbooks.steering.__main__ import main as cookbook
from tests.conftest import tiny_engine


def test_the_benchmark_runs_every_section(tmp_path, capsys, monkeypatch):
    pytest.importorskip("textstat")
    from benchmarks import steering

    monkeypatch.setattr(common, "load_engine", lambda _: tiny_engine())
    data = tmp_path / "questions.jsonl"
    facts = [{"title": "Veyl", "text": "It lies on Orrelay."}]
    data.write_text(json.dumps({"question": "Where is Veyl?", "answer": "Orrelay", "gold_facts": facts}))
    arguments = "--questions 2 --tokens 6 --alphas 1 --alpha 1 --dual-alphas 0 1 --repeats 1"
    out = tmp_path / "figures.json"
    figures = steering.main(
        ["--data", str(data), "--json", str(out), "--plot", str(tmp_path / "sweep"), *arguments.split()]
    )
    assert json.loads(out.read_text()) == figures
    assert set(steering.SECTIONS) <= set(figures)
    assert figures["speed"]["tokens_added"] == 0
    assert [row["alpha"] for row in figures["alpha"]["rows"]] == [0, 1]
    assert set(figures["layers"]) == {"first", "middle", "last", "all"}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".jsonl", ".png", ".svg"}
    assert "Tokens added by steering: 0" in capsys.readouterr().out


def test_formality_and_brevity_order_texts():
    pytest.importorskip("textstat")
    from benchmarks.steering import brevity, formality

    casual = "hey dude I'm like gonna go, ok? it's cool!"
    plain = "The sun is a star. It gives light to the planets."
    formal = (
        "In accordance with the provisions of the constitution, the assembly shall convene a deliberative committee."
    )
    assert 0 == formality("") < formality(casual) < formality(plain) < formality(formal) <= 1
    assert brevity("one") == 0 > brevity("one two") > brevity(plain)


def test_the_cookbook_tells_its_story(capsys, monkeypatch):
    monkeypatch.setattr("kp_core.load_engine", lambda **_: tiny_engine())
    cookbook(["--tokens", "6"])
    said = capsys.readouterr().out
    assert [line[2] for line in said.splitlines() if line.startswith("# ")] == list("12345")
    assert "comes back the same: True" in said
    answers = dict(line.split(": ", 1) for line in said.splitlines() if line.startswith(("plain", "steered there")))
    assert answers["plain"] == answers["steered there and back"]
    assert "Got scope='pack' for a prompt without packs." in said
    assert "Got alpha=nan" in said
