"""`kp packet`, as a new user would try it, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kp_methods import PacketComposer
from tests.cli.conftest import as_json
from tests.methods.test_packet_training import DOCUMENTS

Kp = Callable[..., tuple[int, str, str]]
TINY = ("--engine", "tests.cli.engines:tiny")
SMALL = ("--soft", "2", "--steps", "4", "--batch", "1", "--documents", "1", "3", "--tokens", "8", "64", "--every", "2")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "isles.jsonl"
    path.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in DOCUMENTS))
    return path


def test_train_goes_on_and_eval_takes_what_was_held_out(kp: Kp, documents: Path, tmp_path: Path) -> None:
    train = ("packet", "train", str(documents), "--out", "isles.wrapper", *SMALL, *TINY)
    code, out, _ = kp(*train, "--minutes", "0")
    assert code == 0
    assert "isles.wrapper.training stays: the same command goes on." in out
    made = as_json(kp(*train, "--json"))
    assert (made["steps"], made["bytes"]) == (4, (tmp_path / "isles.wrapper").stat().st_size)
    assert made["id"] == PacketComposer.load(tmp_path / "isles.wrapper").id
    assert not (tmp_path / "isles.wrapper.training").exists()
    asked = ("--documents", "2", "--documents", "3", "--limit", "1", "--wrapper", "isles.wrapper", *TINY)
    rows = as_json(kp("packet", "eval", str(documents), *asked, "--json"))["rows"]
    assert [row["documents"] for row in rows] == [2, 3]
    assert all(row["kl"] > 0 and row["without_soft_tokens_kl"] > 0 for row in rows)
    assert "without soft tokens" in kp("packet", "eval", str(documents), *asked)[1]
    code, _, error = kp("packet", "eval", str(documents), *asked, "--documents", "4")
    assert (code, "Got 3 documents that are held out; expected at least 4" in error) == (1, True)


def test_a_collection_is_read(kp: Kp, bank: Path) -> None:
    code, _, error = kp("packet", "train", str(bank), "--out", "w", *SMALL, *TINY)
    assert (code, "Got 4 different documents" in error) == (1, True)


def test_bad_input_is_one_line(kp: Kp, documents: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "One document alone is not enough to train on."}\n')
    for arguments, said in (
        (("train", "one.jsonl", "-o", "w", *SMALL), "Got 1 different documents of at least 8 tokens"),
        (("train", "none.jsonl", "-o", "w", *SMALL), "none.jsonl"),
        (("train", str(documents), "-o", "w", "--steps", "0"), "Got steps=0"),
        (("eval", str(documents), "--wrapper", "none"), "There is no none"),
        (("eval", str(documents)), "was not made by this model"),
    ):
        code, _, error = kp("packet", *arguments, *TINY)
        assert (code, said in error) == (1, True), error
        assert not (tmp_path / "w").exists()
    assert kp("packet", "train", str(documents), "-o", "w", "--tokens", "8", "many", *TINY)[0] == 2
    assert "'.' is a directory" in kp("packet", "train", str(documents), "-o", ".", *SMALL, *TINY)[2]


def test_documents_are_read_before_a_model_is_loaded(kp: Kp) -> None:
    for command in (("train", "none.jsonl", "-o", "w"), ("eval", "none.jsonl")):
        assert "There is no file none.jsonl" in kp("packet", *command, "--engine", "no_such_module:engine")[2]
