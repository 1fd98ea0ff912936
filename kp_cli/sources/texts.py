"""Readers of plain text and Markdown, a fact per paragraph, and of JSON lines and CSV, a fact per row."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from kp_core.errors import FactError

STDIN = "-"
"""The file name for standard input."""

Draft: TypeAlias = tuple[str, Mapping[str, object] | FactError]
"""A place in a file ("line 3"), with the fields of the fact there, or what is wrong there."""
_Line: TypeAlias = tuple[int, str, FactError | None]
"""A line with its number from 1, and why it cannot be read."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_HEADING = re.compile(r"(#{1,6})\s+(.*)$")
_FENCE = re.compile(r"(`{3,}|~{3,})")
_NUMBER = re.compile(r"[-+(]?[$€£]?\s?\d[\d.,' ]*\s?[%$€£)]?")
_PIPE = re.compile(r"(?<!\\)\|")
_RULE = re.compile(r"(?=.*-)(?=.*\|)[|: \t-]+")
_LONGEST_NAME = 60
_UNREADABLE = "?\r?"  # In place of a line that cannot be read. What was read as lines has no carriage return.


def read_text(path: Path, max_chars: int, encoding: str | None = None, *, markdown: bool = False) -> Iterator[Draft]:
    """Yield the paragraphs of a file; see `paragraphs`."""
    yield from paragraphs(_lines_of(path, encoding), max_chars, markdown=markdown)


def _lines_of(path: Path, encoding: str | None) -> Iterator[_Line]:
    """Yield the lines of a text file; those not in `encoding` (UTF-8) with the error, and what can be read of them."""
    encoding, is_stdin = encoding or "UTF-8", str(path) == STDIN
    file = io.TextIOWrapper(sys.stdin.buffer if is_stdin else path.open("rb"), encoding, "surrogateescape")
    try:
        for number in itertools.count(1):
            fault = None
            try:
                line = file.readline()
                # Invalid bytes become lone surrogates, which cannot be encoded.
                line.encode()
            except UnicodeEncodeError as error:
                fault = FactError(f"is not {encoding} (at character {error.start + 1}); give its --encoding")
            except UnicodeError as error:  # UTF-16 without a byte order mark raises a plain UnicodeError.
                reason = getattr(error, "reason", error)
                yield number, _UNREADABLE, FactError(f"is not {encoding} ({reason}); give its --encoding")
                return
            if not line:
                return
            yield number, (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\n"), fault
    finally:
        buffer = file.detach()
        if not is_stdin:
            buffer.close()


def paragraphs(  # noqa: C901 - one pass over the lines
    source: Iterable[_Line], max_chars: int, *, markdown: bool
) -> Iterator[Draft]:
    """Yield what stands between blank lines; of Markdown also fenced blocks and table rows, under the headings above.

    A heading with nothing below it is a paragraph itself. A line that cannot be read is an error, and its paragraph,
    block or row is left out.
    """
    lines: list[str] = []
    headings: list[tuple[int, str]] = []  # Levels and names of those above.
    begun, fence, bare = 1, "", 0  # `bare` is the line of the last heading while nothing is below it.

    def drafts(number: int, text: str, above: Sequence[tuple[int, str]]) -> Iterator[Draft]:
        title = " > ".join(name for _, name in above)
        for piece in _cut(text, max_chars):
            yield f"line {number}", {"text": piece, "title": title, "line": number}

    def flush() -> Iterator[Draft]:
        nonlocal bare
        for number, text in _with_rows(lines, begun) if markdown else [(begun, "\n".join(lines))]:
            for draft in drafts(number, text, headings) if _UNREADABLE not in text else ():
                bare = 0
                yield draft
        lines.clear()

    for number, line, fault in source:
        if fault is not None:
            yield f"line {number}", fault
        mark = _FENCE.match(line.strip()) if markdown else None
        heading = _HEADING.match(line) if markdown and not fence else None
        if (not line.strip() and not fence) or heading:
            yield from flush()
            if heading:
                if bare and len(heading[1]) <= headings[-1][0]:
                    yield from drafts(bare, headings[-1][1], headings[:-1])
                headings = [above for above in headings if above[0] < len(heading[1])]
                bare = 0
                if fault is None:  # Below one that cannot be read stand the titles above it.
                    headings.append((len(heading[1]), heading[2].rstrip("#").rstrip()))
                    bare = number
            continue
        if not lines:
            begun = number
        if fault is not None:
            bare = 0
        lines.append(line if fault is None else _UNREADABLE)
        if mark and (not fence or (line.strip() == mark[1] and mark[1].startswith(fence))):
            fence = "" if fence else mark[1]
    yield from flush()
    if bare:
        yield from drafts(bare, headings[-1][1], headings[:-1])


def _cut(text: str, max_chars: int) -> Iterator[str]:
    """Cut `text` into parts of at most `max_chars`, at sentence ends if possible, else between words."""
    chunk = ""
    wrapper = textwrap.TextWrapper(max_chars, expand_tabs=False, replace_whitespace=False, break_on_hyphens=False)
    for sentence in _SENTENCE_END.split(text) if len(text) > max_chars else [text]:
        for piece in [sentence] if len(sentence) <= max_chars else wrapper.wrap(sentence):
            if chunk and len(chunk) + 1 + len(piece) > max_chars:
                yield chunk
                chunk = ""
            chunk = f"{chunk} {piece}" if chunk else piece
    if chunk.strip():
        yield chunk


def _with_rows(lines: Sequence[str], begun: int) -> Iterator[tuple[int, str]]:
    """Yield the texts of a paragraph that begins at the line `begun`: the whole, or each row of a table in it.

    A single line above the table is its caption.
    """
    rules = (at for at, line in enumerate(lines) if at and "|" in lines[at - 1] and _RULE.fullmatch(line))
    rule = None if lines and _FENCE.match(lines[0].strip()) else next(rules, None)
    if rule is None:
        yield begun, "\n".join(lines)
        return
    if rule > 2:
        yield begun, "\n".join(lines[: rule - 1])
    names, rows = _cells(lines[rule - 1]), [_cells(line) for line in lines[rule + 1 :]]
    caption = lines[0].strip() if rule == 2 else ""
    if not any(names):  # markitdown puts an empty header above a table without one.
        names = rows.pop(0) if rows and _has_header(rows) else []
        begun += bool(names)
    for number, row in enumerate(rows, begun + rule + 1):
        if text := _named(names, row, caption) if names else " ".join(filter(None, row)):
            yield number, text


def _cells(line: str) -> list[str]:
    """The cells of a row in Markdown, without the borders."""
    row = [cell.strip().replace("\\|", "|") for cell in _PIPE.split(line.strip())]
    return row[not row[0] : len(row) - (not row[-1] and len(row) > 1)]


def _named(names: Sequence[str], values: Sequence[str], caption: str = "") -> str:
    """A row as text, e.g. `Staff in May. Team: billing; People: 8`; values without a name stand alone."""
    pairs = [pair for pair in itertools.zip_longest(names, values, fillvalue="") if pair[1]]
    text = "; ".join(f"{name}: {value}" if name and len(pairs) > 1 else value for name, value in pairs)
    return f"{caption.rstrip('.: ')}. {text}" if caption and text else text


def _are_names(row: Sequence[str]) -> bool:
    """Whether a row can hold the names of columns: none is empty, long, a number, or there twice."""
    names = [cell for cell in row if 0 < len(cell) <= _LONGEST_NAME and not _NUMBER.fullmatch(cell)]
    return 1 < len(row) == len(set(names))


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names the columns: one below has numbers alone, or there are three columns and rows."""
    first, rest = rows[0], [row for row in rows[1:] if any(row)]
    if not rest or not _are_names(first):
        return False
    columns = [list(filter(None, column)) for column in itertools.zip_longest(*rest)]
    return len(first) > 2 < len(rows) or any(column and all(map(_NUMBER.fullmatch, column)) for column in columns)


def read_json_lines(path: Path, _: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield one object per line."""
    for number, line, fault in _lines_of(path, encoding):
        row: Mapping[str, object] | FactError
        if fault is not None:
            row = fault
        elif not line.strip():
            continue
        else:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = FactError(f"is not JSON ({error})")
        if not isinstance(row, dict | FactError):
            row = FactError(f"got {type(row).__name__}; expected an object with `text`")
        yield f"line {number}", row


def read_csv(path: Path, _: int, encoding: str | None = None) -> Iterator[Draft]:  # noqa: C901 - one pass
    """Yield one record per row; the first line has the names. Without a column `text`, the whole row is the text."""
    faults: list[Draft] = []  # Of the lines of one row.

    def lines() -> Iterator[str]:
        for number, line, fault in _lines_of(path, encoding):
            if fault is not None:
                faults.append((f"line {number}", fault))
            yield line + "\n"

    rows = csv.reader(lines(), strict=True)
    names: list[str] = []
    while True:
        faults.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            row = []
            faults.append((f"line {rows.line_num}", FactError(f"is not CSV ({error})")))
        place = f"line {rows.line_num}"
        if faults:
            yield faults[0]
            if not names:
                return
        elif row is None:
            return
        elif not names:
            names = row
            if "text" not in names and not _are_names(names):
                reason = f"got the columns {names}; expected one called `text`, or two names and more"
                yield "line 1", FactError(reason)
                return
        elif len(row) == len(names):
            fields = {name: cell for name, cell in zip(names, row, strict=True) if cell}
            yield place, fields if "text" in names else {"text": _named(names, row), "metadata": fields}
        elif row:
            yield place, FactError(f"got {len(row)} cells; expected {len(names)}")
