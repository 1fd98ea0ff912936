"""The benchmarks of agents and grammars, small, with a thin model; nightly with the bundled one."""

import json
from functools import partial

import pytest

from benchmarks import agent, chains, grammar

pytestmark = pytest.mark.slow


@pytest.fixture
def run(thin_or_bundled, tmp_path):
    return partial(_run, thin_or_bundled, tmp_path)


def _run(model, tmp_path, benchmark, *arguments):
    out = tmp_path / "figures.json"
    figures = benchmark.main([*arguments, "--dtype", "float32", "--model", model, "--json", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(figures))
    return figures


def test_agent(run, tmp_path, capsys):
    """With packs the calls, words and computed tokens are those of text; what is selected has fewer tokens."""
    sizes = ("--steps", "3", "--packs", "2", "--tokens", "40", "--asked", "1", "--agents", "text", "packs", "select")
    figures = run(agent, *sizes)
    [found] = figures["conversations"]
    text, packs, select = ([*found[name]["steps"], found[name]["again"]] for name in ("text", "packs", "select"))
    for mine, theirs, chosen in zip(packs, text, select, strict=True):
        assert (mine["said"], mine["calls"], mine["read"]) == (theirs["said"], theirs["calls"], theirs["sent"])
        assert mine["sent"] < theirs["sent"]
        assert mine["computed"] <= theirs["computed"]
        assert chosen["read"] < mine["read"]
    assert [step["sent"] for step in text] == sorted(step["sent"] for step in text)
    assert all(step["valid"] and not step["repeats"] for step in (*text[:-1], *packs[:-1], *select[:-1]))
    assert [len(found["packs"][which]) for which in ("old", "new")] == [1, 1]
    assert "LangChain agents, 3 steps, 2 passages of 40 tokens a step, float32" in capsys.readouterr().out
    # What is done is read from the file, and what it lacks is made.
    log = tmp_path / "figures.jsonl"
    *lines, last = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines))
    assert run(agent, *sizes) == figures
    assert log.read_text() == "".join((*lines, last))


def test_grammar(run):
    figures = run(grammar, "--limit", "2", "--tokens", "48", "--repeats", "1")
    assert (figures["n"], figures["failed"], figures["failures"]) == (2, 0, [])
    assert set(figures["seconds_per_token"]) == {"grammar", "free"}


def test_chains(run):
    rows = run(chains, "--limit", "2", "--dtype", "float32")["rows"]
    found = {row["way"]: row for row in rows}
    assert [row["asked"] for row in rows] == [2, 2, 2, 1, 1]
    for unit, asked in (("3 facts", 2), ("one bank", 1)):
        text, packs = found[f"text, {unit}"], found[f"packs, {unit}"]
        assert packs["same"] == asked
        assert packs["right"] == text["right"]
        assert packs["prompt_tokens"] + packs["pack_tokens"] == text["prompt_tokens"]
    assert found["packs, one bank"]["computed_tokens"] < found["text, one bank"]["computed_tokens"]
