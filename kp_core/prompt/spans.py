"""Marks that show, in a rendered prompt, where packs and messages begin and end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from kp_core.packs.view import PackRef, Segment
from kp_core.prompt.conversation import Turn
from kp_core.prompt.encoding import PromptEncoder, insert

__all__ = ["Marks"]


class Marks:
    """The marks of one conversation.

    A mark is inside the outermost blanks of what it marks, so that templates which trim see the same blanks.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        # Letters of both cases show a template that changes case.
        self._sign = f"<{secrets.token_hex(8)}Mm:"
        self._references: list[PackRef] = []

    @property
    def references(self) -> Sequence[PackRef]:
        """The packs that were marked."""
        return self._references

    def plain(self, turn: Turn) -> dict[str, Any]:
        """The message of `turn`, packs as their text."""
        return self._message(turn, _content(turn), ())

    def marked(self, turn: Turn, index: int) -> dict[str, Any]:
        """The same message with its marks; `index` is its position in the conversation."""
        marks, at, content = [], 0, _content(turn)
        if (index or turn.role != "system") and content.strip():
            marks.append((_leading(content), "m"))
        for segment in turn.segments:
            text = _text(segment)
            if isinstance(segment, PackRef):
                number = len(self._references)
                marks += [(at + _leading(text), f"b{number}"), (at + len(text.rstrip()), f"e{number}")]
                self._references.append(segment)
            at += len(text)
        return self._message(turn, content, marks)

    def find(self, marked: str) -> tuple[str, list[tuple[str, int]]]:
        """The text without marks, and each mark with its position in that text."""
        text, *pieces = marked.split(self._sign)
        found = []
        for piece in pieces:
            kind, _, plain = piece.partition(">")
            found.append((kind, len(text)))
            text += plain
        return text, found

    def positions(self, text: str, found: list[tuple[str, int]]) -> tuple[list[tuple[int, int, PackRef]], list[int]]:
        """Where packs are, as `(start, stop, pack)` in characters of `text`, and where messages begin."""
        begins = {int(kind[1:]): at for kind, at in found if kind[0] == "b"}
        ends = {int(kind[1:]): at for kind, at in found if kind[0] == "e"}
        packs = []
        for number, reference in enumerate(self._references):
            if number in begins and number in ends:
                own = reference.text
                lead, trail = own[: _leading(own)], own[len(own.rstrip()) :]
                start, stop = begins[number], ends[number]
                # The pack's own outer blanks count when the template left them.
                start -= len(lead) if text[:start].endswith(lead) else 0
                stop += len(trail) if text.startswith(trail, stop) else 0
                packs.append((start, stop, reference))
        return packs, [at for kind, at in found if kind == "m"]

    def _message(self, turn: Turn, content: str, marks: Iterable[tuple[int, str]]) -> dict[str, Any]:
        """The message of `turn`; what was joined is escaped, as segments may make a special token together."""
        # Guards come before marks, so that a pack's own blanks are found right behind its last mark.
        guards = [(at, self._encoder.guard) for at in self._encoder.guards(content, own=turn.role == "assistant")]
        signs = [(at, f"{self._sign}{kind}>") for at, kind in marks]
        return turn.to_message(insert(content, guards + signs), self._encoder.escape)


def _text(segment: Segment) -> str:
    return segment.text if isinstance(segment, PackRef) else segment


def _content(turn: Turn) -> str:
    return "".join(map(_text, turn.segments))


def _leading(text: str) -> int:
    """How many blanks `text` begins with."""
    return len(text) - len(text.lstrip())
