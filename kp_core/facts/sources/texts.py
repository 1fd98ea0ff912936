"""Plain text and Markdown: a fact per paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kp_core.errors import SourceError
from kp_core.facts.sources.drafts import Draft, cut, lines_of

__all__ = ["read_markdown", "read_text"]

_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
_FENCE = re.compile(r"(`{3,}|~{3,})")


def read_text(path: Path, max_chars: int) -> Iterator[Draft]:
    """Paragraphs between blank lines."""
    yield from _paragraphs(path, max_chars, markdown=False)


def read_markdown(path: Path, max_chars: int) -> Iterator[Draft]:
    """Paragraphs and fenced blocks, under the headings above them."""
    yield from _paragraphs(path, max_chars, markdown=True)


def _paragraphs(path: Path, max_chars: int, *, markdown: bool) -> Iterator[Draft]:
    held: list[str] = []
    headings: list[tuple[int, str]] = []
    begun, fence = 1, ""

    def flush() -> Iterator[Draft]:
        title = " > ".join(name for _, name in headings)
        for part in cut("\n".join(held), max_chars):
            yield f"line {begun}", {"text": part, "title": title, "line": begun}
        held.clear()

    for number, line in lines_of(path):
        if isinstance(line, SourceError):
            yield f"line {number}", line
            continue
        mark = _FENCE.match(line.strip()) if markdown else None
        heading = _HEADING.match(line) if markdown and not fence else None
        if (not line.strip() and not fence) or heading:
            yield from flush()
            if heading:
                depth = len(heading[1])
                headings = [each for each in headings if each[0] < depth]
                headings.append((depth, heading[2]))
            continue
        if not held:
            begun = number
        held.append(line)
        if mark and (not fence or (line.strip() == mark[1] and mark[1].startswith(fence))):
            fence = "" if fence else mark[1]
    yield from flush()
