"""The benchmarks of LlamaIndex on a few rows and checks, with a thin model; nightly with the bundled one."""

import pytest

from benchmarks import conformance, llamaindex
from kp_core import bundled_model
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
    assert list(agent) == ["packs", "handles", "text", "text, no cache"]
    sent = {name: [step["prompt_tokens"] for step in steps] for name, steps in agent.items()}
    # The latest call is in the prompt, and a random model's words for it differ by some tokens.
    assert sent["packs"][2] - sent["packs"][1] <= (0 if thin_or_bundled == str(bundled_model()) else 10)
    assert sent["handles"][1] < sent["handles"][2] < sent["text"][2]
    assert sent["text"] == sent["text, no cache"]
    assert [step["computed_tokens"] for step in agent["text, no cache"]] == sent["text"]
    assert agent["packs"][2]["computed_tokens"] < sent["packs"][2] + agent["packs"][2]["pack_tokens"]
    assert "Packs, longest over shortest prompt from step 2 on: 1.0" in capsys.readouterr().out


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
