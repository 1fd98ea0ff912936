"""`kp edit`, as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Kp, as_json

TINY = ("--engine", "tests.cli.engines:tiny")


def test_a_fact_is_corrected_and_found_so(kp: Kp, bank: Path, tmp_path: Path) -> None:
    long = "The mill of Harrow has four sails. " + "It stands on a hill, and the miller is asleep. " * 16
    assert kp("build", "bank", "--fact", long, "--id", "harrow")[0] == 0
    about = as_json(kp("edit", "bank", "harr", "--old", "four", "--new", "six", *TINY, "--json"))
    assert (about["how"], len(about["errata"])) == ("amend", 1)
    assert "The mill of Harrow has six sails." in about["errata"][0]
    [hit] = as_json(kp("search", "bank", "mill of Harrow", "-k", "1", "--json"))["hits"]
    assert (hit["id"], hit["handle"], hit["text"]) == ("harrow", about["handle"], about["text"])
    inspected = as_json(kp("status", "bank", "--json"))
    assert (inspected["updated"], inspected["packs"]["packs"]) == (1, 2)
    # The pack alone, where it lies.
    code, out, _ = kp("edit", "bank/packs", about["was"], "--old", "four", "--new", "nine", "--how", "rebuild", *TINY)
    assert code == 0
    assert "The mill of Harrow has nine sails." in out
    assert about["was"] in out
    assert "The facts of bank stay as they are; `kp edit bank ID` edits one." in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mill", "--old", "five", "--new", "six"), "does not say 'five'"),
        (("mill", "--old", "four", "--new", " "), "expected words"),
        (("nobody", "--old", "four", "--new", "six"), "none of the 4 facts has it"),
        (("", "--old", "four", "--new", "six"), "Got the id ''; expected an id"),
    ],
)
def test_what_cannot_be_edited_is_said(kp: Kp, bank: Path, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = kp("edit", "bank", *arguments, *TINY, "--json")
    assert code == 1
    assert said in err
    assert '"message"' in out


def test_knowledge_is_read_again_after_a_correction(kp: Kp, tmp_path: Path) -> None:
    source = tmp_path / "isles.txt"
    source.write_text("The mill of Harrow has four sails.\n\nThe bell of Lund is cracked.\n")
    assert kp("build", "isles", str(source))[0] == 0
    [hit] = as_json(kp("search", "isles", "mill of Harrow", "-k", "1", "--json"))["hits"]
    assert kp("edit", "isles", hit["id"], "--old", "four", "--new", "six", "--how", "rebuild", *TINY)[0] == 0
    code, out, _ = kp("build", "isles", str(source))
    assert code == 0
    assert "left as they are" in out
    assert "Nothing was found" not in out
    assert hit["id"] in out
    [now] = as_json(kp("search", "isles", "mill of Harrow", "-k", "1", "--json"))["hits"]
    assert now["text"] == "The mill of Harrow has six sails."
