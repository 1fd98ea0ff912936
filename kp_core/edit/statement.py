"""Statements in texts: where one stands, and the sentence around it."""

from __future__ import annotations

import difflib
import re

from kp_core.errors import PackError
from kp_core.packs.pack import common_length

__all__ = ["difference", "find", "replaced", "sentence_around"]

_END = re.compile(r"(?<=[.!?])\s+|\n+")
_SHOWN = 30
"""Characters shown on both sides of a place."""
_LONGEST = 240
"""Characters of a sentence that an erratum repeats, on each side of what it corrects."""


def find(text: str, statement: str, replacement: str) -> tuple[int, int]:
    """Where `statement` stands in `text`, as characters; raises `PackError` unless it does, and once.

    It is found as whole words. Raises as well for a blank statement or `replacement`, and where both are the same.
    """
    if not statement.strip() or not replacement.strip():
        what, said = ("old", statement) if not statement.strip() else ("new", replacement)
        raise PackError(
            f"Got {what}={said!r}; expected words. To take a statement out, `rebuild` the pack from a text without it."
        )
    if statement == replacement:
        raise PackError(f"Got {statement!r} as what is said and as what shall be; expected another text.")
    before, behind = (r"\b" if edge.isalnum() else "" for edge in (statement[0], statement[-1]))
    places = [match.span() for match in re.finditer(f"{before}{re.escape(statement)}{behind}", text)]
    if len(places) == 1:
        return places[0]
    if not places:
        near = difflib.get_close_matches(statement, [*_END.split(text), *text.split()], n=1, cutoff=0.4)
        hint = f"Nearest to it is {near[0]!r}." if near else f"It begins {text[: 2 * _SHOWN]!r}."
        raise PackError(f"The pack does not say {statement!r}; expected a part of its text, letter by letter. {hint}")
    shown = " and ".join(repr(text[max(start - _SHOWN, 0) : stop + _SHOWN]) for start, stop in places[:2])
    raise PackError(
        f"The pack says {statement!r} {len(places)} times: in {shown}. Give more of the text around the one you mean."
    )


def replaced(text: str, old: str, new: str) -> str:
    """`text` with the statement `old`, which it holds once, as `new`; raises as `find`."""
    start, stop = find(text, old, new)
    return text[:start] + new + text[stop:]


def difference(text: str, other: str) -> tuple[str, str]:
    """The words in which two texts differ: from the first one that does to the last."""
    mine, theirs = re.split(r"(\s+)", text), re.split(r"(\s+)", other)
    head = common_length(mine, theirs)
    tail = common_length(mine[head:][::-1], theirs[head:][::-1])
    return "".join(mine[head : len(mine) - tail]), "".join(theirs[head : len(theirs) - tail])


def sentence_around(before: str, behind: str) -> tuple[str, str]:
    """What of `before` and `behind` belongs to the sentence that a place between them stands in."""
    head = _END.split(before[-_LONGEST:])[-1] if before else ""
    end = _END.search(behind)
    return head, behind[: end.start() if end else None][:_LONGEST].rstrip()
