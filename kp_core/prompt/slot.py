"""Messages with a place for a pack in them."""

from __future__ import annotations

from collections.abc import Sequence

from kp_core.errors import PromptError
from kp_core.packs.view import PackRef, Segment
from kp_core.prompt.conversation import Turn, to_turns
from kp_core.prompt.resolve import Message

__all__ = ["SLOT", "filled"]

SLOT = "{pack}"
"""What stands where the pack will be."""


def filled(messages: Sequence[Message], reference: PackRef) -> tuple[Turn, ...]:
    """`messages` with `reference` where they say `{pack}`."""
    turns = []
    for turn in to_turns(messages, None):
        segments: list[Segment] = []
        for segment in turn.segments:
            before, slot, after = str(segment).partition(SLOT)
            segments += [before, reference, after] if slot else [before]
        turns.append(turn.with_segments(segments))
    if sum(segment is reference for turn in turns for segment in turn.segments) != 1:
        raise PromptError("Expected messages that hold '{pack}' exactly once, where the pack will be.")
    return tuple(turns)
