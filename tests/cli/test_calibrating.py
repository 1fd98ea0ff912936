"""`kp calibrate`, as a new user would try it, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import as_json

Kp = Callable[..., tuple[int, str, str]]
TINY = ("--engine", "tests.cli.engines:tiny")


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_auto_chooses_by_what_was_measured(kp: Kp, bank: Path, tmp_path: Path) -> None:
    asked = [{"question": f"Which island is number {at}?"} for at in range(19)]
    given = {"question": "Which is green?", "answer": "Iru", "passages": ["Iru is green.", "Red."], "kind": "own"}
    questions = write(tmp_path / "questions.jsonl", [*asked, given])
    command = ("calibrate", str(bank), str(questions), "-k", "3", "--composers", "splice", *TINY)
    found = as_json(kp(*command, "--json"))
    rows = {(row["kind"], row["packs"]): row for row in found["rows"]}
    assert rows.keys() == {("", 3), ("own", 2)}
    assert (rows["", 3]["questions"], rows["own", 2]["questions"]) == (19, 1)
    # A random model says nothing right; without answers, what it says from the text is right.
    assert (rows["", 3]["text_right"], rows["own", 2]["text_right"]) == (19, 0)
    # Over three packs, not every kind of question was measured.
    reasons = ("exact, because no other keeps 95%", "exact, because nothing was measured over 3 packs")
    assert all(said.startswith(reasons) for said in found["auto"].values())
    assert rows["", 3]["composer"] == "splice"
    code, out, _ = kp(*command)
    assert code == 0
    assert "auto, up to 3 packs: exact, because" in out
    assert "exact, because nothing was measured" in kp("ask", str(bank), "Which?", "--composer", "auto", *TINY)[1]
    answer = as_json(kp("ask", str(bank), "Which?", "--composer", "auto", "--json", *TINY))
    assert answer["answers"]["packs"]["usage"]["choice"].startswith(reasons)


def test_bad_questions_are_named(kp: Kp, bank: Path, tmp_path: Path) -> None:
    good = {"question": "Which?"}
    for rows, said in (
        ([good, {"answer": "Iru"}], "line 2: got {'answer': 'Iru'}; expected an object with the string 'question'"),
        ([good, {"question": "Which?", "passages": "Iru"}], "line 2"),
        ([good, {"question": "Which?", "answer": 3}], "line 2"),
        ([good], "Got 1 questions with at least two passages; expected 20 or more"),
    ):
        questions = write(tmp_path / "questions.jsonl", rows)
        code, _, error = kp("calibrate", str(bank), str(questions), *TINY)
        assert (code, said in error) == (1, True), error
    # Before a model is loaded, which may take minutes.
    code, _, error = kp("calibrate", str(bank), str(questions), "--model", "./nowhere")
    assert (code, "Got 1 questions" in error) == (1, True), error
    code, _, error = kp("calibrate", str(bank), str(questions), "--composers", "glue", *TINY)
    assert code == 1
    assert "glue" in error or "Got 1 questions" in error
    (tmp_path / "broken.jsonl").write_text("{")
    code, _, error = kp("calibrate", str(bank), "broken.jsonl", *TINY)
    assert (code, "is not JSON" in error) == (1, True), error
