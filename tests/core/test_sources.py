"""Knowledge from files: what becomes a fact, and how what does not is reported."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kp_core.banks import Fact
from kp_core.errors import SourceError
from kp_core.sources import read_facts


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_json_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        '\ufeff{"text": "a", "title": "T", "year": 1999}\n\n'
        '{"text": "b", "id": "x", "source": "s", "metadata": {"p": 1}}',
    )
    assert list(read_facts(path, namespace="n")) == [
        Fact("a", title="T", source=str(path), metadata={"year": 1999}, namespace="n"),
        Fact("b", id="x", source="s", metadata={"p": 1}, namespace="n"),
    ]


def test_csv(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,title,lang\r\n"a, ""b""\nc",T,en\r\nd,,\r\n')
    assert list(read_facts(path)) == [
        Fact('a, "b"\nc', title="T", source=str(path), metadata={"lang": "en"}),
        Fact("d", source=str(path)),
    ]


def test_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "One.\nStill one.\n\n\n# Two.\n")
    assert [(fact.text, fact.metadata["line"]) for fact in read_facts(path)] == [("One.\nStill one.", 1), ("# Two.", 5)]


def test_markdown(tmp_path: Path) -> None:
    content = "Before.\n# Guide #\n## Install\nRun it.\n```sh\n# no heading\n\nkp\n```\n\n# Other\nLast."
    path = written(tmp_path / "a.md", content)
    assert [(fact.text, fact.title, fact.metadata["line"]) for fact in read_facts(path)] == [
        ("Before.", "", 1),
        ("Run it.\n```sh\n# no heading\n\nkp\n```", "Guide > Install", 4),
        ("Last.", "Other", 12),
    ]


@pytest.mark.parametrize("limit", [7, 20, 50])
def test_long_paragraphs_are_cut_and_nothing_is_lost(tmp_path: Path, limit: int) -> None:
    text = "A short one. Then a somewhat longer sentence, of many words! Andonewithoutanyspacesatall?"
    parts = [fact.text for fact in read_facts(written(tmp_path / "a.txt", text), max_chars=limit)]
    assert all(len(part) <= limit for part in parts)
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")
    assert limit < 50 or parts[0] == "A short one."


def test_folders_are_read_in_order_and_hidden_files_are_not(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/x.txt"):
        written(tmp_path / name, name)
    assert [fact.text for fact in read_facts(tmp_path)] == ["a/z.md", "b.txt"]


BAD = {
    "a.jsonl": ('{"text": "a"}\n{"text": \n', "line 2: is not JSON"),
    "b.jsonl": ("[1]\n", "line 1: got list; expected an object"),
    "c.jsonl": ('{"title": "a"}\n', "line 1: got the fields ['title'], and no `text`"),
    "d.jsonl": ('{"text": "a", "metadata": 3}\n', "line 1: got 3 as `metadata`"),
    "e.jsonl": ('{"text": "a", "list": [1]}\n', "line 1: Got [1] as metadata 'list'"),
    "e2.jsonl": ('{"text": ["a"]}\n', "line 1: Got ['a'] (list) as text"),
    "f.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: is not UTF-8"),
    "g.csv": ("text,title\na\n", "line 2: got 1 cells; expected 2"),
    "h.csv": ("body\na\n", "line 1: got the columns ['body']; expected one called `text`"),
    "i.csv": ('text\n"a" b\n', "line 2: is not CSV"),
    "j.csv": (b"text\na\n\xff\n", "line 3: is not UTF-8"),
    "k.txt": (b"a\n\n\xe9\n", "line 3: is not UTF-8"),
    "l.pdf": ("", "got a file of type '.pdf'; expected one of .jsonl, .csv, .txt, .md"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    path = written(tmp_path / name, content)
    with pytest.raises(SourceError) as raised:
        list(read_facts(path))
    assert str(raised.value).startswith(str(path))
    assert words in str(raised.value)
    skipped: list[SourceError] = []
    good = list(read_facts([path, written(tmp_path / "good.txt", "good")], on_error="skip", skipped=skipped.append))
    assert good[-1].text == "good"
    assert [str(error) for error in skipped] == [str(raised.value)]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        list(read_facts(tmp_path / "nothing.txt"))
    with pytest.raises(SourceError, match="on_error='ignore'"):
        list(read_facts(tmp_path, on_error="ignore"))  # type: ignore[arg-type]


def test_facts_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a"}\n' + "not json\n")
    assert [fact.text for fact in itertools.islice(read_facts(path), 1)] == ["a"]
