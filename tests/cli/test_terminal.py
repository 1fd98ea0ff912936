"""What facts, titles, file names and models say does not steer the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Kp, as_json

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31mred\x7f\r\x08"
TINY = ("--engine", "tests.cli.engines:tiny", "--max-tokens", "2")
CONTROLS = {chr(code) for code in (*range(32), *range(0x7F, 0xA0))} - {"\n", "\t"}


def text(number: int) -> str:
    return f"The bird {number} is a crane.{EVIL}!"


@pytest.fixture
def hostile(kp: Kp, tmp_path: Path) -> str:
    """A collection whose facts carry escape sequences wherever text can stand."""
    facts = [
        {
            "text": f"The bird {number} is a crane.{EVIL}",
            "title": f"Birds{EVIL}",
            "source": f"b{EVIL}.md",
            "id": f"a{number}",
        }
        for number in range(2)
    ]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    code, out, err = kp("build", "bank", "facts.jsonl")
    assert code == 0, out + err
    return "bank"


@pytest.mark.parametrize(
    "command",
    [
        ("search", "bank", "Which bird?"),
        ("ask", "bank", "Which bird?", *TINY),
        ("ask", "bank", f"Which{EVIL} bird?", "--explain", *TINY),
        ("status", "bank"),
        ("verify", "bank"),
        ("remove", "bank", "a0", "--dry-run"),
        ("remove", "bank", f"nothing{EVIL}"),
        ("search", f"away{EVIL}", "Which bird?"),
        ("build", "bank", "--fact", f"Another.{EVIL}", "--id", f"b{EVIL}"),
    ],
    ids=lambda command: " ".join(command[:1]),
)
def test_no_control_character_reaches_the_terminal(kp: Kp, hostile: str, command: tuple[str, ...]) -> None:
    del hostile
    _, out, err = kp(*command)
    # Of a library that was imported before `kp` could switch its bars off.
    said = out + "".join(line for line in err.split("\n") if "Loading weights" not in line)
    assert said
    assert not CONTROLS & set(said), said


def test_json_keeps_them_escaped(kp: Kp, hostile: str) -> None:
    found = kp("search", hostile, "Which bird?", "--json")
    assert not CONTROLS & set(found[1])
    assert {hit["text"] for hit in as_json(found)["hits"]} == {
        f"The bird {number} is a crane.{EVIL}" for number in range(2)
    }
