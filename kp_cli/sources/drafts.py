"""Shared by the file readers: drafts of facts with their place in the file, and errors that name the place."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeAlias

from kp_core.errors import SourceError

__all__ = ["STDIN", "Draft", "Headings", "below", "cut", "error_at", "lines_of", "title_of", "wrong"]

STDIN = "-"
"""The file name for standard input."""

Draft: TypeAlias = tuple[str, Mapping[str, object] | SourceError]
"""A place in a file ("line 3"), with the fields of the fact there or the error."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_BOM = "\ufeff"


def error_at(path: object, place: str, reason: str) -> SourceError:
    """Return an error that names file and place."""
    return SourceError(f"{path}, {place}: {reason}")


def wrong(path: object, place: str, reason: str) -> Draft:
    """Return a draft that is an error at this place."""
    return place, error_at(path, place, reason)


def lines_of(path: Path, encoding: str | None = None) -> Iterator[tuple[int, str | SourceError]]:
    """Yield the lines of a text file with their numbers from 1; text not in `encoding` (UTF-8) is an error.

    Lines end with LF, CR LF, or, as on old Macs, CR.
    """
    encoding = encoding or "UTF-8"
    with _opened(path, encoding) as file:
        number = 0
        while True:
            number += 1
            place = f"line {number}"
            try:
                line = file.readline()
                if not line:
                    return
                # Invalid bytes become lone surrogates, which cannot be encoded.
                line.encode()
            except UnicodeEncodeError as error:
                yield number, error_at(path, place, f"is not {encoding} (at character {error.start + 1})")
                continue
            except UnicodeError as error:  # UTF-16 without a byte order mark raises a plain UnicodeError.
                yield number, error_at(path, place, f"is not {encoding} ({getattr(error, 'reason', error)})")
                return
            yield number, (line.removeprefix(_BOM) if number == 1 else line).rstrip("\n")


@contextmanager
def _opened(path: Path, encoding: str) -> Iterator[TextIO]:
    if str(path) != STDIN:
        with path.open(encoding=encoding, errors="surrogateescape") as file:
            yield file
        return
    text = io.TextIOWrapper(sys.stdin.buffer, encoding, "surrogateescape")
    try:
        yield text
    finally:
        text.detach()


Headings: TypeAlias = tuple[tuple[int, str], ...]
"""The headings above a place in a document: level and name of each."""


def below(headings: Headings, level: int, name: str) -> Headings:
    """Return the headings behind a heading, which ends all of the same or a deeper level."""
    return (*(heading for heading in headings if heading[0] < level), (level, name))


def title_of(headings: Headings) -> str:
    """Return the title of a fact under these headings, e.g. `Guide > Install`."""
    return " > ".join(name for _, name in headings)


def cut(text: str, max_chars: int) -> Iterator[str]:
    """Cut `text` into parts of at most `max_chars`, at sentence ends if possible, else between words."""
    chunk = ""
    for sentence in _SENTENCE_END.split(text) if len(text) > max_chars else [text]:
        for piece in [sentence] if len(sentence) <= max_chars else _words(sentence, max_chars):
            if chunk and len(chunk) + 1 + len(piece) > max_chars:
                yield chunk
                chunk = ""
            chunk = f"{chunk} {piece}" if chunk else piece
    if chunk.strip():
        yield chunk


def _words(text: str, max_chars: int) -> Iterator[str]:
    while len(text) > max_chars:
        at = text.rfind(" ", 1, max_chars + 1)
        at = at if at > 0 else max_chars
        yield text[:at]
        text = text[at:].lstrip()
    yield text
