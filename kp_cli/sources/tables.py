"""Rows of tables as texts that stand alone: each value with the name of its column, behind the table's caption."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["are_names", "has_header", "markdown_rows", "named", "row_texts"]

_NUMBER = re.compile(r"[-+(]?[$€£]?\s?\d[\d.,' ]*\s?[%$€£)]?")
_LONGEST_NAME = 60
_RULE = frozenset("|-: \t")
_PIPE = re.compile(r"(?<!\\)\|")


def named(names: Sequence[str], values: Sequence[str], caption: str = "") -> str:
    """Return a row as text, e.g. `Staff in May. Team: billing; People: 8`; values without a name stand alone."""
    pairs = [(names[at] if at < len(names) else "", value) for at, value in enumerate(values) if value]
    text = "; ".join(f"{name}: {value}" if name else value for name, value in pairs)
    return f"{caption.rstrip('.: ')}. {text}" if caption and text else text


def are_names(row: Sequence[str]) -> bool:
    """Whether a row can hold the names of columns: none is empty, long, a number, or there twice."""
    names = [cell for cell in row if 0 < len(cell) <= _LONGEST_NAME and not _NUMBER.fullmatch(cell)]
    return 1 < len(row) == len(set(names))


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row of an unmarked table names the columns.

    It does if a column below it has numbers alone, or if there are at least three columns and three rows.
    """
    first, rest = rows[0], [row for row in rows[1:] if any(row)]
    if not rest or not are_names(first):
        return False
    columns = [[row[at] for row in rest if at < len(row) and row[at]] for at in range(len(first))]
    return len(first) > 2 < len(rows) or any(column and all(map(_NUMBER.fullmatch, column)) for column in columns)


def row_texts(rows: Sequence[Sequence[str]], caption: str = "", *, is_marked: bool = False) -> list[str] | None:
    """Return the text of each row, empty for the header; `None` for a table without one.

    `is_marked` says that the first row is the header, else `has_header` decides.
    """
    if not rows or not (is_marked or has_header(rows)):
        return None
    return ["", *(named(rows[0] if len(list(filter(None, row))) > 1 else (), row, caption) for row in rows[1:])]


def markdown_rows(lines: Sequence[str]) -> tuple[int, list[list[str]]] | None:
    """Return where a table with a header begins in the lines of a paragraph, and its rows; `None` if there is none."""
    for at, (line, rule) in enumerate(pairwise(lines)):
        if "|" in line and "|" in rule and "-" in rule and _RULE.issuperset(rule):
            rows = [line, *lines[at + 2 :]]
            cells = [[cell.strip().replace("\\|", "|") for cell in _PIPE.split(row.strip())] for row in rows]
            return at, [row[not row[0] : len(row) - (not row[-1] and len(row) > 1)] for row in cells]
    return None
