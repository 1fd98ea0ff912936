"""Readers of plain text and Markdown: a fact per paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kp_core.errors import SourceError
from kp_core.facts.sources.drafts import Draft, Headings, cut, lines_of

__all__ = ["read_markdown", "read_text"]

_HEADING = re.compile(r"(#{1,6})\s+(.*)$")
_FENCE = re.compile(r"(`{3,}|~{3,})")


def read_text(path: Path, max_chars: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield the paragraphs between blank lines."""
    yield from _paragraphs(path, max_chars, encoding, markdown=False)


def read_markdown(path: Path, max_chars: int, encoding: str | None = None) -> Iterator[Draft]:
    """Yield paragraphs and fenced blocks, under the headings above them."""
    yield from _paragraphs(path, max_chars, encoding, markdown=True)


def _paragraphs(path: Path, max_chars: int, encoding: str | None, *, markdown: bool) -> Iterator[Draft]:
    lines: list[str] = []
    headings = Headings()
    begun, fence = 1, ""

    def flush() -> Iterator[Draft]:
        for piece in cut("\n".join(lines), max_chars):
            yield f"line {begun}", {"text": piece, "title": str(headings), "line": begun}
        lines.clear()

    for number, line in lines_of(path, encoding):
        if isinstance(line, SourceError):
            yield f"line {number}", line
            continue
        mark = _FENCE.match(line.strip()) if markdown else None
        heading = _HEADING.match(line) if markdown and not fence else None
        if (not line.strip() and not fence) or heading:
            yield from flush()
            if heading:
                headings.add(len(heading[1]), heading[2].rstrip("#").rstrip())
            continue
        if not lines:
            begun = number
        lines.append(line)
        if mark and (not fence or (line.strip() == mark[1] and mark[1].startswith(fence))):
            fence = "" if fence else mark[1]
    yield from flush()
