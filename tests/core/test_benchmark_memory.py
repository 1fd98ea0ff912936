"""The benchmark of memory over sessions, on two small conversations of our own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import memory

_SAID = {
    "a": [["Ann: I moved to Oslo in spring.", "Bo: How is the fjord?"], ["Ann: My dog is called Rex.", "Bo: Nice."]],
    "b": [["Cy: I bake bread on Sundays.", "Di: Rye?"], ["Cy: My boat is the Petrel.", "Di: A fine name."]],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with both sets, in the form of the public files."""

    def write(name: str, rows: list[dict[str, object]]) -> None:
        with gzip.open(tmp_path / f"{name}.json.gz", "wt", encoding="utf-8") as file:
            json.dump(rows, file)

    for stem in ("locomo", "personamem32k"):
        documents, queries = [], []
        for user, sessions in _SAID.items():
            for number, turns in enumerate(sessions):
                said = [dict(zip(("speaker", "text"), turn.split(": "), strict=True)) for turn in turns]
                content = json.dumps(said) if stem == "locomo" else "\n\n".join(turns)
                row = {"id": f"{user}{number}", "content": content, "user_id": user}
                documents.append(row | {"timestamp": "2023-05-08T13:56:00+00:00"})
            one = {"id": f"{user}-q", "user_id": user, "gold_ids": [f"{user}1"]}
            if stem == "locomo":
                asked = {"query": "What is its name?", "gold_answers": ["Rex"], "meta": {"category": "single"}}
            else:
                asked = {"query": "A pet?\n(a) Yes\n(b) No", "gold_answers": ["(a) Yes", "a"]}
                asked["meta"] = {"question_type": "recall"}
            queries.append(one | asked)
        write(f"{stem}_documents", documents)
        write(f"{stem}_queries", queries)
    return tmp_path


@pytest.mark.slow
def test_packs_answer_as_their_text_and_a_run_goes_on(data: Path, thin_or_bundled: str, tmp_path: Path) -> None:
    log, ways = tmp_path / "out" / "memory.json", ["none", "sessions 1 text", "sessions 1 exact", "whole text"]
    arguments = ["--data", str(data), "--model", thin_or_bundled, "--dtype", "float32", "--json", str(log)]
    arguments += ["--timed", "1", "--ways", *ways]
    figures = memory.main([*arguments, "--plots", str(tmp_path / "plots")])
    rows = {row["way"]: row for row in figures["rows"]}
    assert list(rows) == ways
    text, packs = rows["sessions 1 text"], rows["sessions 1 exact"]
    assert packs["differ"] == 0
    assert packs["delivered"] > 0 == text["delivered"]
    assert packs["computed"] < text["computed"]
    assert (rows["none"]["found"], rows["whole text"]["found"]) == (0, 1)
    assert (tmp_path / "plots" / "memory-locomo.svg").exists()
    kept = log.with_suffix(".jsonl").read_text()
    assert memory.main(arguments) == figures
    assert log.with_suffix(".jsonl").read_text() == kept


@pytest.mark.slow
def test_letters_are_chosen_by_their_likelihood(data: Path, thin_or_bundled: str) -> None:
    arguments = ["--set", "personamem", "--data", str(data), "--model", thin_or_bundled, "--dtype", "float32"]
    figures = memory.main(
        [*arguments, "--timed", "0", "--ways", "passages 5 text", "passages 5 exact", "passages 2 select:packs=1"]
    )
    text, packs, selected = figures["rows"]
    assert (packs["differ"], packs["n"]) == (0, 2)
    assert packs["delivered"] > 0 == text["delivered"]
    assert selected["way"] == "passages 2 select:packs=1"
    assert 0 < selected["delivered"] < packs["delivered"]


def test_passages_hold_every_word_once_and_keep_to_their_size() -> None:
    turns = ["On 8 May 2023:", "Ann: short.", "Bo: " + "word " * 900, "Ann: end."]

    def count(text: str) -> int:
        return len(text.split())

    passages = list(memory.passages(turns, count))
    assert all(count(passage) <= 300 for passage in passages)
    assert all(passage.startswith("On 8 May 2023:\n") for passage in passages)
    words = " ".join(passage.removeprefix("On 8 May 2023:\n") for passage in passages).split()
    assert words == " ".join(turns[1:]).split()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--ways", "none", "meals 7 text"], "got the ways ['meals 7 text']; expected of ['none'"),
        (["--limit", "0"], "got --limit 0; expected at least 1"),
        (["--data", "/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        memory.main(["--data", str(tmp_path), *options])
    assert error in capsys.readouterr().err
