"""The benchmarks of LlamaIndex on a few rows and checks, with a thin model; nightly with the bundled one."""

import pytest

from benchmarks import conformance, llamaindex
from tests.core.test_benchmarks import data, run

pytestmark = pytest.mark.slow


def test_llamaindex(thin_or_bundled, tmp_path, capsys):
    arguments = ("--limit", "2", "--tokens", "3", "--steps", "3", "--dtype", "float32", "--model", thin_or_bundled)
    figures = run(llamaindex, tmp_path, "--data", data("hotpotqa_gold.jsonl"), *arguments)
    assert list(figures) == ["dtype", "questions", "agent"]
    questions = figures["questions"]
    assert (questions["n"], questions["differ"]) == (2, 0)
    assert questions["sent"]["packs"] < questions["sent"]["text"]
    agent = figures["agent"]
    assert list(agent) == ["packs", "text", "text, no cache"]
    sent, computed = (
        {name: [step[key] for step in steps] for name, steps in agent.items()}
        for key in ("prompt_tokens", "computed_tokens")
    )
    assert all(packs < text for packs, text in zip(sent["packs"][1:], sent["text"][1:], strict=True))
    assert sent["text"] == sent["text, no cache"] == computed["text, no cache"]
    assert all(packs <= text for packs, text in zip(computed["packs"], computed["text"], strict=True))
    assert "FunctionAgent, float32" in capsys.readouterr().out


def test_conformance(thin_or_bundled, tmp_path, capsys):
    arguments = ("--llm", "KnowledgePackLLM", "--tokens", "8", "--dtype", "float32", "--only", "chat answers")
    arguments += ("--model", thin_or_bundled)
    figures = run(conformance, tmp_path, *arguments)
    assert figures == {"dtype": "float32", "checks": 4, "problems": {"KnowledgePackLLM": {}}}
    assert "│ answers │      4 │" in capsys.readouterr().out


def test_conformance_of_the_baseline(thin_or_bundled, tmp_path, capsys):
    pytest.importorskip("llama_index.llms.huggingface", reason="llama-index-llms-huggingface is not installed")
    arguments = ("--llm", "HuggingFaceLLM", "--tokens", "8", "--dtype", "float32", "--only", " stops at")
    arguments += ("--model", thin_or_bundled)
    problems = run(conformance, tmp_path, *arguments)["problems"]["HuggingFaceLLM"]
    assert "chat stops at stop strings" in problems
    assert "HuggingFaceLLM: chat stops at stop strings: " in capsys.readouterr().out
