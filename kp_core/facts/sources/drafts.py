"""What the readers of files share: drafts of facts, each with its place in the file, and what is wrong with a place."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeAlias

from kp_core.errors import SourceError

__all__ = ["STDIN", "Draft", "Headings", "cut", "error_at", "lines_of", "wrong"]

STDIN = "-"
"""What standard input is called among files."""

Draft: TypeAlias = tuple[str, Mapping[str, object] | SourceError]
"""A place in a file ("line 3") and the fields of the fact there, or why there is none."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_BOM = "\ufeff"


def error_at(path: object, place: str, reason: str) -> SourceError:
    """The error that names file and place."""
    return SourceError(f"{path}, {place}: {reason}")


def wrong(path: object, place: str, reason: str) -> Draft:
    """A place where there is no fact, and the error that says why."""
    return place, error_at(path, place, reason)


def lines_of(path: Path, encoding: str | None = None) -> Iterator[tuple[int, str | SourceError]]:
    """The lines of a text file and their numbers from 1 on; what is not in `encoding` (UTF-8) is an error."""
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
                # Bytes that are none of the encoding stand as lone surrogates, which nothing can encode.
                line.encode()
            except UnicodeEncodeError as error:
                yield number, error_at(path, place, f"is not {encoding} (at character {error.start + 1})")
                continue
            except UnicodeError as error:  # UTF-16 that lacks its mark is not even a UnicodeDecodeError.
                yield number, error_at(path, place, f"is not {encoding} ({getattr(error, 'reason', error)})")
                return
            yield number, (line.removeprefix(_BOM) if number == 1 else line).rstrip("\r\n")


@contextmanager
def _opened(path: Path, encoding: str) -> Iterator[TextIO]:
    if str(path) != STDIN:
        with path.open(encoding=encoding, errors="surrogateescape", newline="\n") as file:
            yield file
        return
    text = io.TextIOWrapper(sys.stdin.buffer, encoding, "surrogateescape", newline="\n")
    try:
        yield text
    finally:
        text.detach()


class Headings:
    """The headings above a place in a document."""

    def __init__(self) -> None:
        self._held: list[tuple[int, str]] = []

    def __str__(self) -> str:
        return " > ".join(name for _, name in self._held)

    def add(self, depth: int, name: str) -> None:
        """A heading, which ends all that are as deep or deeper."""
        self._held = [*(each for each in self._held if each[0] < depth), (depth, name)]


def cut(text: str, max_chars: int) -> Iterator[str]:
    """`text` in parts of at most `max_chars`, at ends of sentences where there are any, else between words."""
    part = ""
    for sentence in _SENTENCE_END.split(text) if len(text) > max_chars else [text]:
        for piece in [sentence] if len(sentence) <= max_chars else _words(sentence, max_chars):
            if part and len(part) + 1 + len(piece) > max_chars:
                yield part
                part = ""
            part = f"{part} {piece}" if part else piece
    if part.strip():
        yield part


def _words(text: str, max_chars: int) -> Iterator[str]:
    while len(text) > max_chars:
        at = text.rfind(" ", 1, max_chars + 1)
        at = at if at > 0 else max_chars
        yield text[:at]
        text = text[at:].lstrip()
    yield text
