"""The benchmark of decisions, on a few questions."""

import json

import pytest

from benchmarks import decide
from tests.conftest import DATA


@pytest.mark.slow
def test_times_are_told_of_each_way(thin_or_bundled, tmp_path):
    figures = decide.main(
        ["--tokens", "40", "--model", thin_or_bundled, "--dtype", "float32", "--json", str(tmp_path / "times.json")]
    )
    assert [row["questions"] for row in figures["rows"]] == [1, 8, 32]
    assert all(seconds > 0 for row in figures["rows"] for seconds in row.values())
    assert json.loads((tmp_path / "times.json").read_text()) == figures


@pytest.mark.slow
def test_lengths_are_told_by_rotations(thin_or_bundled):
    rows = decide.main(["--part", "lengths", "--tokens", "40", "--model", thin_or_bundled, "--dtype", "float32"])[
        "rows"
    ]
    assert [row["tokens"] for row in rows] == [16, 32, 64, 128]
    assert all(seconds > 0 for row in rows for seconds in row.values())


def test_right_answers_are_counted(thin_or_bundled, tmp_path):
    facts = [{"title": "Veyl (isle)", "text": "Veyl Major has 3 ferries."}, {"title": "Orre", "text": "Orre has none."}]
    # The first three are asked; no label answers the others.
    asked = [("Is Veyl older?", "no"), ("Which has ferries?", "Veyl"), ("Which is larger?", "Veyl Major")]
    asked += [("How many?", "3"), ("What are they?", "isle"), ("Were they both larger?", "Orre has none.")]
    rows = [
        {"type": "comparison", "question": question, "answer": answer, "gold_facts": facts}
        for question, answer in asked
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--part", "hotpotqa", "--data", str(data), "--model", thin_or_bundled, "--dtype", "float32"]
    ways = {row["way"]: row for row in decide.main(arguments)["rows"]}
    assert {way: row["n"] for way, row in ways.items()} == {"schema": 3, "decide": 3, "all rotations": 3}
    assert all(row["low"] <= row["right"] <= row["high"] and 0 <= row["p"] <= 1 for row in ways.values())


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "memory").exists(), reason="the data of PersonaMem is not here")
def test_options_are_decided_over_passages(thin_or_bundled):
    arguments = ["--part", "personamem", "--limit", "1", "--model", thin_or_bundled, "--dtype", "float32"]
    assert [row["n"] for row in decide.main(arguments)["rows"]] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "wiki_passages.jsonl").exists(), reason="the passages of Wikipedia are not here")
def test_documents_are_graded(thin_or_bundled):
    arguments = ["--part", "grade", "--limit", "2", "--model", thin_or_bundled, "--dtype", "float32"]
    rows = decide.main(arguments)["rows"]
    assert [(row["set"], row["questions"], row["with_answer"] + row["others"]) for row in rows] == [
        ("world", 2, 10),
        ("single", 2, 10),
    ]
    assert all(row["with_answer"] >= 2 and 0 <= row["kept"] <= 1 and 0 <= row["dropped"] <= 1 for row in rows)
    assert all(row["prompt_s"] > 0 for row in rows)
