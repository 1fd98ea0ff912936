"""Marks that show, in a rendered prompt, where packs and messages begin and end."""

from __future__ import annotations

import re
import secrets
from typing import Any

from kp_core.packs.view import PackRef, Segment
from kp_core.prompt.conversation import Turn
from kp_core.prompt.encoding import PromptEncoder

__all__ = ["Marks"]


class Marks:
    """The marks of one conversation.

    A mark stands inside the outermost blanks of what it marks, so that templates which trim see the same blanks.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._sign = f"<{secrets.token_hex(8)}:"
        self._references: list[PackRef] = []

    def plain(self, turn: Turn) -> dict[str, Any]:
        """The message of `turn`, packs as their text."""
        return turn.to_message("".join(self._escaped(segment) for segment in turn.segments), self._encoder.escape)

    def marked(self, turn: Turn, index: int) -> dict[str, Any]:
        """The same message with its marks; `index` is its place in the conversation."""
        parts = []
        for segment in turn.segments:
            text = self._escaped(segment)
            if isinstance(segment, PackRef):
                core = text.strip()
                lead, _, trail = text.partition(core)
                text = f"{lead}{self._mark('b')}{core}{self._mark('e')}{trail}"
                self._references.append(segment)
            parts.append(text)
        content = "".join(parts)
        if (index or turn.role != "system") and content.strip():
            blanks = len(content) - len(content.lstrip())
            content = content[:blanks] + f"{self._sign}m>" + content[blanks:]
        return turn.to_message(content, self._encoder.escape)

    def find(self, marked: str) -> tuple[str, list[tuple[str, int]]]:
        """The text without marks, and each mark with its place in that text."""
        pieces = re.split(re.escape(self._sign) + r"([a-z]\d*)>", marked)
        places, at = [], len(pieces[0])
        for kind, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            places.append((kind, at))
            at += len(piece)
        return "".join(pieces[::2]), places

    def places(self, text: str, places: list[tuple[str, int]]) -> tuple[list[tuple[int, int, PackRef]], list[int]]:
        """Where packs stand, as `(start, stop, pack)` in characters of `text`, and where messages begin."""
        begins = {int(kind[1:]): at for kind, at in places if kind[0] == "b"}
        ends = {int(kind[1:]): at for kind, at in places if kind[0] == "e"}
        packs = []
        for number, reference in enumerate(self._references):
            if number in begins and number in ends:
                escaped = self._escaped(reference)
                lead = escaped[: len(escaped) - len(escaped.lstrip())]
                trail = escaped[len(escaped.rstrip()) :]
                start, stop = begins[number], ends[number]
                # The pack's own outer blanks count when the template left them.
                start -= len(lead) if text[:start].endswith(lead) else 0
                stop += len(trail) if text.startswith(trail, stop) else 0
                packs.append((start, stop, reference))
        return packs, [at for kind, at in places if kind == "m"]

    def _escaped(self, segment: Segment) -> str:
        return self._encoder.escape(segment.text if isinstance(segment, PackRef) else segment)

    def _mark(self, kind: str) -> str:
        return f"{self._sign}{kind}{len(self._references)}>"
