"""Readers of plain text and Markdown, a fact per paragraph, and of JSON lines and CSV, a fact per row."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kp_cli.sources.drafts import Draft, Headings, below, cut, lines_of, title_of, wrong
from kp_cli.sources.tables import are_names, markdown_rows, named, row_texts
from kp_core.errors import SourceError

__all__ = ["markdown_drafts", "read_csv", "read_json_lines", "read_markdown", "read_text"]

_HEADING = re.compile(r"(#{1,6})\s+(.*)$")
_FENCE = re.compile(r"(`{3,}|~{3,})")


def read_text(path: Path, max_chars: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield the paragraphs between blank lines."""
    yield from _paragraphs(lines_of(path, encoding), max_chars, markdown=False)


def read_markdown(path: Path, max_chars: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield paragraphs and fenced blocks, under the headings above them."""
    yield from markdown_drafts(lines_of(path, encoding), max_chars)


def markdown_drafts(lines: Iterable[tuple[int, str | SourceError]], max_chars: int) -> Iterator[Draft]:
    """Yield paragraphs, fenced blocks and table rows of numbered lines, under the headings above them.

    A heading with nothing below it, not even another heading, is a paragraph itself.
    """
    yield from _paragraphs(lines, max_chars, markdown=True)


def _paragraphs(  # noqa: C901 - one pass over the lines
    source: Iterable[tuple[int, str | SourceError]], max_chars: int, *, markdown: bool
) -> Iterator[Draft]:
    lines: list[str] = []
    headings: Headings = ()
    begun, fence, bare = 1, "", 0  # `bare` is the line of the last heading while nothing is below it.

    def flush() -> Iterator[Draft]:
        nonlocal bare
        for number, text in _with_rows(lines, begun) if markdown else [(begun, "\n".join(lines))]:
            for piece in cut(text, max_chars):
                bare = 0
                yield f"line {number}", {"text": piece, "title": title_of(headings), "line": number}
        lines.clear()

    def childless() -> Iterator[Draft]:
        if bare and headings[-1][1]:
            for piece in cut(headings[-1][1], max_chars):
                yield f"line {bare}", {"text": piece, "title": title_of(headings[:-1]), "line": bare}

    for number, line in source:
        if isinstance(line, SourceError):
            yield f"line {number}", line
            continue
        mark = _FENCE.match(line.strip()) if markdown else None
        heading = _HEADING.match(line) if markdown and not fence else None
        if (not line.strip() and not fence) or heading:
            yield from flush()
            if heading:
                if bare and len(heading[1]) <= headings[-1][0]:
                    yield from childless()
                headings = below(headings, len(heading[1]), heading[2].rstrip("#").rstrip())
                bare = number
            continue
        if not lines:
            begun = number
        lines.append(line)
        if mark and (not fence or (line.strip() == mark[1] and mark[1].startswith(fence))):
            fence = "" if fence else mark[1]
    yield from flush()
    yield from childless()


def _with_rows(lines: Sequence[str], begun: int) -> Iterator[tuple[int, str]]:
    """Yield the texts of a paragraph that begins at the line `begun`: the whole, or each row of a table in it.

    A single line above the table is its caption.
    """
    found = None if lines and _FENCE.match(lines[0].strip()) else markdown_rows(lines)
    if found is None:
        yield begun, "\n".join(lines)
        return
    at, rows = found
    if at > 1:
        yield begun, "\n".join(lines[:at])
    caption = lines[0].strip() if at == 1 else ""
    if any(rows[0]):
        texts = row_texts(rows, caption, is_marked=True) or ()
    else:  # markitdown puts an empty header above a table without one.
        texts = ["", *(row_texts(rows[1:], caption) or (" ".join(filter(None, row)) for row in rows[1:]))]
    yield from ((begun + at + number + 1, text) for number, text in enumerate(texts) if text)


def read_json_lines(path: Path, _: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield one object per line."""
    for number, line in lines_of(path, encoding):
        if isinstance(line, SourceError):
            yield f"line {number}", line
            continue
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield wrong(path, f"line {number}", f"is not JSON ({error})")
            continue
        if isinstance(row, dict):
            yield f"line {number}", row
        else:
            yield wrong(path, f"line {number}", f"got {type(row).__name__}; expected an object with `text`")


def read_csv(path: Path, _: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield one record per row; the first line has the names. Without a column `text`, the whole row is the text."""
    bad: list[Draft] = []

    def good() -> Iterator[str]:
        for number, line in lines_of(path, encoding):
            if isinstance(line, SourceError):
                bad.append((f"line {number}", line))
            else:
                yield line + "\n"

    rows = csv.reader(good(), strict=True)
    names: list[str] | None = None
    for row in _parsed(path, rows):
        if isinstance(row, tuple):
            yield row
        elif names is None:
            names = row
            if "text" not in names and not are_names(names):
                yield wrong(
                    path, "line 1", f"got the columns {names}; expected one called `text`, or two names and more"
                )
                return
        elif len(row) == len(names):
            fields = {name: cell for name, cell in zip(names, row, strict=True) if cell}
            draft = fields if "text" in names else {"text": named(names, row), "metadata": fields}
            yield f"line {rows.line_num}", draft
        elif row:
            yield wrong(path, f"line {rows.line_num}", f"got {len(row)} cells; expected {len(names)}")
    yield from bad


def _parsed(path: Path, rows: Any) -> Iterator[list[str] | Draft]:  # noqa: ANN401 - the csv module's own type
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield wrong(path, f"line {rows.line_num}", f"is not CSV ({error})")
