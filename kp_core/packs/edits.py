"""What was edited in a pack: the corrections that stand behind its text, and what was changed before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from hashlib import blake2b

from kp_core.errors import PackError

__all__ = ["Correction", "Edit", "Edits", "root_of"]

_KEY = "kp:edits"  # In the provenance of a pack, which files of every version hold.


@dataclass(frozen=True)
class Edit:
    """One edit: `how` ("amend", "overwrite", "rebuild" or "squash"), and what stood there and what stands there now."""

    how: str
    old: str
    new: str


@dataclass(frozen=True)
class Correction:
    """The characters `start:stop` of the corrected text are to be read as `new`; `line` is the erratum that says so."""

    start: int
    stop: int
    new: str
    line: str


@dataclass(frozen=True)
class Edits:
    """The edits of one pack, oldest first.

    The first `base` characters of its text are what `corrections` are about; their lines stand behind it, in order.
    `starts` are the tokens of the pack, ascending, at which errata begin. `said` are errata that have since become part
    of the text. `root` is the digest of the first text of all (`root_of`); it is blank where no version before this one
    counts.
    """

    root: str = ""
    said: tuple[str, ...] = ()
    base: int = 0
    corrections: tuple[Correction, ...] = ()
    starts: tuple[int, ...] = ()
    history: tuple[Edit, ...] = ()

    @cached_property
    def errata(self) -> tuple[str, ...]:
        """All errata since the first text that still count."""
        return (*self.said, *(each.line for each in self.corrections))

    @classmethod
    def of(cls, provenance: Mapping[str, str]) -> Edits:
        """Those that a provenance tells; raises `PackError` for what `written` would not have written."""
        text = provenance.get(_KEY)
        if text is None:
            return _NONE
        try:
            root, said, base, corrections, starts, history = json.loads(text)
            found = cls(
                root,
                tuple(said),
                base,
                tuple(Correction(*each) for each in corrections),
                tuple(starts),
                tuple(Edit(*each) for each in history),
            )
        except (ValueError, TypeError) as error:
            raise PackError(f"Got {text[:60]!r} as the edits of a pack; expected what an edit wrote.") from error
        strings = [root, *said, *(text for each in found.corrections for text in (each.new, each.line))]
        strings += [text for each in found.history for text in astuple(each)]
        numbers = [0, base, *starts, *(at for each in found.corrections for at in (each.start, each.stop))]
        wrong = [each for each in strings if not isinstance(each, str)]
        wrong += [each for each in numbers if type(each) is not int or each < 0]
        if wrong or list(starts) != sorted(set(starts)):
            raise PackError(f"Got {wrong or starts} in the edits of a pack; expected strings, and positions in order.")
        return found

    def written(self, provenance: Mapping[str, str]) -> dict[str, str]:
        """`provenance` with these edits in it."""
        return {**provenance, _KEY: json.dumps(astuple(self), ensure_ascii=False, separators=(",", ":"))}


def root_of(text: str) -> str:
    """What names a text in the edits of its later versions."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


_NONE = Edits()
