"""Messages with a place for a pack in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kp_core.errors import PromptError
from kp_core.packs.view import PackRef, Segment
from kp_core.prompt.conversation import Turn, to_turns
from kp_core.prompt.resolve import Message, text_of

__all__ = ["SLOT", "filled", "slotted"]

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


def slotted(messages: Sequence[Message], variable: str, marks: Mapping[str, str]) -> list[Message]:
    """`messages` made of a framework's prompt, with `{pack}` where `variable` first stands and `?` for other variables.

    `marks` are what stands there for each variable. Raises `PromptError` when `variable` stands nowhere, or when
    another one stands before it, as what precedes a pack then changes from call to call.
    """
    texts = [text_of(message) for message in messages]
    before, found, _ = "".join(texts).partition(marks[variable])
    if not found:
        others = ", ".join(name for name in marks if name != variable)
        raise PromptError(f"Got the variable {variable!r}; the variables of the prompt are: {others}.")
    moving = next((name for name, mark in marks.items() if mark in before), None)
    if moving is not None:
        raise PromptError(
            f"{moving!r} stands before {variable!r} in the prompt, so what precedes the packs changes from call to "
            f"call, and no KV computed beforehand can be exact there. Put {variable!r} first, e.g. in a system message."
        )
    first = next(at for at, text in enumerate(texts) if marks[variable] in text)
    texts[first] = texts[first].replace(marks[variable], SLOT, 1)
    for mark in marks.values():
        texts = [text.replace(mark, "?") for text in texts]
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
