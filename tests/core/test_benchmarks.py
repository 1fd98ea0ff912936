"""The benchmarks: their scores, and each of them on a few rows with the real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accumulation, common, equivalence, ttft


def data(name: str) -> str:
    path = common.data_folder() / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set KP_DATA to the folder that holds {name}")
    return str(path)


@pytest.mark.parametrize(
    ("answer", "normalised"),
    [
        ("The  Grey\tTide.", "grey tide"),
        ("an Apple, a pear", "apple pear"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("Jérôme's", "jérômes"),
        ("the", ""),
    ],
)
def test_answers_are_normalised_as_squad_does(answer: str, normalised: str) -> None:
    assert common.normalise(answer) == normalised


def test_exact_match_is_equality_after_normalisation() -> None:
    assert common.exact_match("The Grey Tide.", "grey tide")
    assert not common.exact_match("It is the Grey Tide", "Grey Tide")
    assert not common.exact_match("", "yes")


def test_containing_an_answer_takes_whole_words() -> None:
    assert common.contains("It is the Grey Tide, of 1987.", "The grey tide")
    assert not common.contains("Nothing is known", "no")


@pytest.mark.parametrize(
    ("said", "expected", "score"),
    [
        ("The Grey Tide", "grey tide", 1.0),
        ("the novel Grey Tide", "Grey Tide", 0.8),
        ("grey grey", "grey tide", 0.5),
        ("Low Water", "Grey Tide", 0.0),
        ("yes, both", "yes", 0.0),
        ("no", "yes", 0.0),
        ("yes.", "yes", 1.0),
        ("", "Grey Tide", 0.0),
    ],
)
def test_f1_counts_shared_words_and_takes_yes_and_no_whole(said: str, expected: str, score: float) -> None:
    assert common.f1(said, expected) == pytest.approx(score)


def test_the_answer_is_the_first_line_that_is_not_blank() -> None:
    assert common.first_line("\n \n 1871 \nbecause") == "1871"
    assert common.first_line("  \n") == ""


def test_both_forms_of_hotpotqa_are_read_and_others_refused(tmp_path: Path) -> None:
    gold = {"question": "q", "answer": "a", "gold_facts": [{"title": "T", "text": " one. "}]}
    distractor = {
        "question": "q",
        "answer": "a",
        "supporting_titles": ["S"],
        "paragraphs": [{"title": title, "sentences": ["one.", " two."]} for title in "DESF"],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(gold)}\n\n{json.dumps(distractor)}\n")
    first, second = common.read_examples(path)
    assert [str(paragraph) for paragraph in first.paragraphs] == ["T: one."]
    assert [paragraph.title for paragraph in accumulation.found_paragraphs(second)] == ["S", "D", "E", "F"]
    assert str(second.paragraphs[0]) == "D: one. two."
    assert len(common.read_examples(path, 1)) == 1
    path.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="gold_facts"):
        common.read_examples(path)


def run(module: Any, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    figures = module.main([*arguments, "--json", str(out)])
    assert json.loads(out.read_text()) == figures
    return dict(figures)


def test_equivalence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", data("hotpotqa_gold.jsonl"), "--limit", "2", "--dtype", "float32", "--tokens", "6")
    figures = run(equivalence, tmp_path, *arguments)
    assert list(figures) == ["n", "dtype", "em", "f1", "differ", "bit_identical"]
    assert (figures["n"], figures["dtype"], figures["bit_identical"]) == (2, "float32", 2)
    assert figures["differ"] == {"pack_text": 0, "pack_hf": 0}
    for scores in (figures["em"], figures["f1"]):
        assert list(scores) == ["none", "text", "pack", "raw", "split"]
        assert scores["text"] == scores["pack"]
        assert all(0 <= score <= 1 for score in scores.values())
    assert "bit-identical: 2 of 2" in capsys.readouterr().out


def test_ttft(tmp_path: Path) -> None:
    arguments = ("--data", data("wiki_passages.jsonl"), "--limit", "20", "--tokens", "64", "--repeats", "1")
    (row,) = run(ttft, tmp_path, *arguments)["rows"]
    expected = ["tokens", "text_s", "pack_memory_s", "pack_disk_s", "floor_s", "hf_text_s", "peak_bytes"]
    assert list(row) == expected
    assert row["tokens"] == 64
    assert all(row[name] > 0 for name in expected[1:-1])
    assert row["peak_bytes"] is None or row["peak_bytes"] > 0


def test_accumulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", data("hotpotqa_distractor.jsonl"), "--limit", "1", "--searches", "1", "3", "--tokens", "2")
    rows = run(accumulation, tmp_path, *arguments)["rows"]
    assert [row["searches"] for row in rows] == [1, 3]
    for row in rows:
        assert list(row) == ["searches", "em", "prompt_tokens", "pack_tokens", "computed_tokens", "seconds"]
        for name in ("em", "prompt_tokens", "computed_tokens", "seconds"):
            assert list(row[name]) == ["text", "pack"]
        assert row["computed_tokens"]["text"] == row["prompt_tokens"]["text"]
        assert row["prompt_tokens"]["text"] == row["prompt_tokens"]["pack"] + row["pack_tokens"]
    assert rows[0]["prompt_tokens"]["pack"] == rows[1]["prompt_tokens"]["pack"]
    assert rows[1]["computed_tokens"]["pack"] < rows[1]["pack_tokens"]
    assert "computed at most once: 1 of 1" in capsys.readouterr().out
