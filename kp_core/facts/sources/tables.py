"""JSON lines and CSV: a fact per row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kp_core.errors import SourceError
from kp_core.facts.sources.drafts import Draft, error_at, lines_of

__all__ = ["read_csv", "read_json_lines"]


def read_json_lines(path: Path, _: int, encoding: str | None = None) -> Iterator[Draft]:
    """An object per line."""
    for number, line in lines_of(path, encoding):
        if isinstance(line, SourceError):
            yield f"line {number}", line
            continue
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield _wrong(path, number, f"is not JSON ({error})")
            continue
        if isinstance(row, dict):
            yield f"line {number}", row
        else:
            yield _wrong(path, number, f"got {type(row).__name__}; expected an object with `text`")


def read_csv(path: Path, _: int, encoding: str | None = None) -> Iterator[Draft]:
    """A row per record, named by the first line."""
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
        if isinstance(row, SourceError):
            yield f"line {rows.line_num}", row
        elif names is None:
            names = row
            if "text" not in names:
                yield _wrong(path, 1, f"got the columns {names}; expected one called `text`")
                return
        elif len(row) == len(names):
            yield f"line {rows.line_num}", {name: cell for name, cell in zip(names, row, strict=True) if cell}
        elif row:
            yield _wrong(path, rows.line_num, f"got {len(row)} cells; expected {len(names)}")
    yield from bad


def _parsed(path: Path, rows: Any) -> Iterator[list[str] | SourceError]:  # noqa: ANN401 - the csv module's own type
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield error_at(path, f"line {rows.line_num}", f"is not CSV ({error})")


def _wrong(path: Path, number: int, reason: str) -> Draft:
    return f"line {number}", error_at(path, f"line {number}", reason)
