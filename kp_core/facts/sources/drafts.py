"""What the readers of files share: drafts of facts, each with its place in the file, and what is wrong with a place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from kp_core.errors import SourceError

__all__ = ["Draft", "cut", "error_at", "lines_of"]

Draft: TypeAlias = tuple[str, Mapping[str, object] | SourceError]
"""A place in a file ("line 3") and the fields of the fact there, or why there is none."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_BOM = "\ufeff"


def error_at(path: object, place: str, reason: str) -> SourceError:
    """The error that names file and place."""
    return SourceError(f"{path}, {place}: {reason}")


def lines_of(path: Path) -> Iterator[tuple[int, str | SourceError]]:
    """The lines of a text file and their numbers from 1 on; what is not UTF-8 is an error."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                reason = f"is not UTF-8 ({error.reason} at byte {error.start + 1})"
                yield number, error_at(path, f"line {number}", reason)
                continue
            yield number, (text.removeprefix(_BOM) if number == 1 else text).rstrip("\r\n")


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
