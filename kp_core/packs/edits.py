"""The edit history of a pack: the corrections appended to its text, and earlier changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from hashlib import blake2b

from kp_core.errors import PackError

__all__ = ["Correction", "Edit", "Edits", "root_of"]

_KEY = "kp:edits"  # Key in the provenance of a pack, which every file version stores.


@dataclass(frozen=True)
class Edit:
    """One edit: `how` it was done ("amend", "overwrite", "rebuild" or "squash"), the old text and the new text."""

    how: str
    old: str
    new: str


@dataclass(frozen=True)
class Correction:
    """Read the characters `start:stop` of the corrected text as `new`; `line` is the erratum that tells the model."""

    start: int
    stop: int
    new: str
    line: str


@dataclass(frozen=True)
class Edits:
    """The edits of one pack, oldest first.

    `corrections` refer to the first `base` characters of the pack's text. Their lines (errata) follow the text, in
    order. `starts` are the tokens of the pack at which errata begin, ascending. `said` are earlier errata that are now
    part of the text. `root` is the digest of the very first text (`root_of`); it is empty if no earlier version counts.
    """

    root: str = ""
    said: tuple[str, ...] = ()
    base: int = 0
    corrections: tuple[Correction, ...] = ()
    starts: tuple[int, ...] = ()
    history: tuple[Edit, ...] = ()

    @cached_property
    def errata(self) -> tuple[str, ...]:
        """All errata since the first text that still apply."""
        return (*self.said, *(correction.line for correction in self.corrections))

    @classmethod
    def of(cls, provenance: Mapping[str, str]) -> Edits:
        """Read the edits from `provenance`; raises `PackError` if `written` did not write them."""
        text = provenance.get(_KEY)
        if text is None:
            return _NONE
        try:
            root, said, base, corrections, starts, history = json.loads(text)
            edits = cls(
                root,
                tuple(said),
                base,
                tuple(Correction(*row) for row in corrections),
                tuple(starts),
                tuple(Edit(*row) for row in history),
            )
        except (ValueError, TypeError) as error:
            raise PackError(f"Got {text[:60]!r} as the edits of a pack; expected what an edit wrote.") from error
        strings = [
            root,
            *said,
            *(text for correction in edits.corrections for text in (correction.new, correction.line)),
        ]
        strings += [text for edit in edits.history for text in astuple(edit)]
        numbers = [
            0,
            base,
            *starts,
            *(at for correction in edits.corrections for at in (correction.start, correction.stop)),
        ]
        wrong = [value for value in strings if not isinstance(value, str)]
        wrong += [value for value in numbers if type(value) is not int or value < 0]
        if wrong or list(starts) != sorted(set(starts)):
            raise PackError(f"Got {wrong or starts} in the edits of a pack; expected strings, and positions in order.")
        return edits

    def written(self, provenance: Mapping[str, str]) -> dict[str, str]:
        """Return `provenance` with these edits added."""
        return {**provenance, _KEY: json.dumps(astuple(self), ensure_ascii=False, separators=(",", ":"))}


def root_of(text: str) -> str:
    """Return the digest that names a text in the edits of its later versions."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


_NONE = Edits()
