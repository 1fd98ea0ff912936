"""The benchmarks of agents and grammars, small, with a thin model; nightly with the bundled one."""

import json
from functools import partial

import pytest

from benchmarks import agent, chains, common, grammar

pytestmark = pytest.mark.slow


@pytest.fixture
def run(thin_or_bundled, tmp_path):
    return partial(_run, thin_or_bundled, tmp_path)


def _run(model, tmp_path, benchmark, *arguments):
    out = tmp_path / "figures.json"
    figures = benchmark.main([*arguments, "--dtype", "float32", "--model", model, "--json", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(figures))
    return figures


def test_agent(run, capsys):
    data = common.data_folder() / "wiki_passages.jsonl"
    if not data.exists():
        pytest.skip(f"{data} is absent; set KP_DATA to the folder that holds it")
    steps = run(agent, "--data", str(data), "--steps", "3")["steps"]
    sent = {name: [step["prompt_tokens"] for step in found] for name, found in steps.items()}
    assert sent["text"] == sent["none"] == sorted(set(sent["text"]))
    assert all(packs < text for packs, text in zip(sent["packs"][1:], sent["text"][1:], strict=True))
    computed = {name: [step["computed_tokens"] for step in found] for name, found in steps.items()}
    assert computed["none"] == sent["none"]
    assert all(packs <= text for packs, text in zip(computed["packs"], computed["text"], strict=True))
    assert "LangChain agents, 3 steps, float32" in capsys.readouterr().out


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
