"""Finds statements in texts, and the sentence around them."""

from __future__ import annotations

import difflib
import re

from kp_core.errors import PackError
from kp_core.packs.pack import common_length

__all__ = ["difference", "find", "replaced", "sentence_around"]

_END = re.compile(r"(?<=[.!?])\s+|\n+")
_SHOWN = 30
"""Characters of context that error messages show on each side of a match."""
_LONGEST = 240
"""Most characters of the sentence that an erratum repeats on each side of the correction."""


def find(text: str, statement: str, replacement: str) -> tuple[int, int]:
    """Start and stop of `statement` in `text`, in characters; it must match whole words.

    Raises `PackError` unless it occurs exactly once, for a blank statement or `replacement`, and if both are equal.
    """
    if not statement.strip() or not replacement.strip():
        name, value = ("old", statement) if not statement.strip() else ("new", replacement)
        raise PackError(
            f"Got {name}={value!r}; expected words. To take a statement out, `rebuild` the pack from a text without it."
        )
    if statement == replacement:
        raise PackError(f"Got {statement!r} as what is said and as what shall be; expected another text.")
    before, behind = (r"\b" if edge.isalnum() else "" for edge in (statement[0], statement[-1]))
    places = [match.span() for match in re.finditer(f"{before}{re.escape(statement)}{behind}", text)]
    if len(places) == 1:
        return places[0]
    if not places:
        closest = difflib.get_close_matches(statement, [*_END.split(text), *text.split()], n=1, cutoff=0.4)
        hint = f"Nearest to it is {closest[0]!r}." if closest else f"It begins {text[: 2 * _SHOWN]!r}."
        raise PackError(f"The pack does not say {statement!r}; expected a part of its text, letter by letter. {hint}")
    excerpts = " and ".join(repr(text[max(start - _SHOWN, 0) : stop + _SHOWN]) for start, stop in places[:2])
    raise PackError(
        f"The pack says {statement!r} {len(places)} times: in {excerpts}. Give more of the text around the "
        "one you mean."
    )


def replaced(text: str, old: str, new: str) -> str:
    """`text` with its only `old` replaced by `new`; raises as `find`."""
    start, stop = find(text, old, new)
    return text[:start] + new + text[stop:]


def difference(text: str, other: str) -> tuple[str, str]:
    """The differing part of each text, from the first to the last word that differs."""
    words, other_words = re.split(r"(\s+)", text), re.split(r"(\s+)", other)
    head = common_length(words, other_words)
    tail = common_length(words[head:][::-1], other_words[head:][::-1])
    return "".join(words[head : len(words) - tail]), "".join(other_words[head : len(other_words) - tail])


def sentence_around(before: str, behind: str) -> tuple[str, str]:
    """The end of `before` and the start of `behind` that belong to the sentence around the place between them."""
    head = _END.split(before[-_LONGEST:])[-1] if before else ""
    end = _END.search(behind)
    return head, behind[: end.start() if end else None][:_LONGEST].rstrip()
