"""Recognition: the exact texts of packs found in messages, so that their KV serves as if their handles were there."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from threading import Lock
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kp_core.packs.handle import Handle
from kp_core.progress import bar_of

if TYPE_CHECKING:
    from kp_core.packs.view import Packs

__all__ = ["Recogniser"]

_MIN_CHARS = 64
# What a search may cost, in compared characters per character of the text; a step counts as a thousand.
_EFFORT, _STEP, _SPARE = 32, 1_000, 65_536
_INSIDE = re.compile(r"(?<=\w)\w")  # A word, behind its first character.
_BITS, _FACTOR = 20, np.uint32(2_654_435_761)


class Recogniser:
    """Finds the texts of packs in other texts.

    A text is found where it is, outer blanks aside, character by character, from the start of a word on; texts of less
    than `min_chars` never are. A search takes time in proportion to the text, whatever texts were added: one that is
    made to be slow (thousands of packs that share a long beginning, which the text repeats) is given up where it gets
    too costly, and nothing is found behind that. `find_packs` and `discard` are safe for threads.
    """

    _known: ClassVar[WeakKeyDictionary[Packs, Recogniser]] = WeakKeyDictionary()
    _making: ClassVar = Lock()

    def __init__(self, min_chars: int = _MIN_CHARS) -> None:
        self._min = min_chars
        self._texts: dict[Handle, str] = {}
        self._handles: dict[str, set[Handle]] = {}
        # By first characters: the texts, sorted, and the length of the longest there was.
        self._sorted: dict[str, list[str]] = {}
        self._reach: dict[str, int] = {}
        # Which beginnings there are, by a hash: a search looks closer at one position in fifty, not at every word.
        self._noted = np.zeros(2**_BITS, bool)
        # What is known of the store that it belongs to.
        self._lock = Lock()
        self._namespaces: frozenset[str] = frozenset()
        self._changes: object = None

    @classmethod
    def of(cls, store: Packs) -> Recogniser:
        """The one that `find_packs` keeps up with `store`, as long as that lives; empty at first."""
        with cls._making:
            if store not in cls._known:
                cls._known[store] = cls()
            return cls._known[store]

    @property
    def handles(self) -> Collection[Handle]:
        """Every handle that was added, those of short texts included."""
        return self._texts.keys()

    def add(self, handle: Handle, text: str) -> None:
        """Find `text` from now on; a handle has one text, so adding it again does nothing."""
        text = text.strip()
        if handle in self._texts:
            return
        self._texts[handle] = text if len(text) >= self._min else ""
        if len(text) >= self._min:
            key = text[: self._min]
            if text not in self._handles:
                insort(self._sorted.setdefault(key, []), text)
                self._reach[key] = max(self._reach.get(key, 0), len(text))
                self._noted[self._slots(key)[0]] = True
            self._handles.setdefault(text, set()).add(handle)

    def discard(self, handle: Handle) -> None:
        """Find its text no more, unless another handle has the same."""
        with self._lock:
            text = self._texts.pop(handle, "")
            if text:
                self._handles[text].discard(handle)
                if not self._handles[text]:
                    del self._handles[text]
                    texts = self._sorted[text[: self._min]]
                    del texts[bisect_left(texts, text)]

    def find_packs(self, store: Packs, text: str, namespaces: Collection[str]) -> list[tuple[int, int, Handle]]:
        """Where texts of `store` are in `text`, as `find`; reads what the store has new before."""
        if len(text) < self._min:
            return []
        with self._lock:
            # Asked for before the texts are, so that what comes in between is read next time.
            changes, wanted = store.changes, self._namespaces.union(namespaces)
            if changes != self._changes or wanted != self._namespaces:
                new = store.texts(wanted, self.handles)
                for handle, known in bar_of("Reading the texts of packs", None, "pack", new):
                    self.add(handle, known)
                self._changes, self._namespaces = changes, wanted
            return self.find(text, namespaces) if self._handles else []

    def find(self, text: str, namespaces: Collection[str] | None = None) -> list[tuple[int, int, Handle]]:
        """Where texts are in `text`, as `(start, stop, handle)`: the first, there the longest, then on behind it.

        Only handles of `namespaces` are found, if given; of several with one text it is the least.
        """
        found: list[tuple[int, int, Handle]] = []
        done = 0
        effort = _EFFORT * (len(text) + _SPARE)
        for start in np.flatnonzero(self._noted[self._slots(text)]).tolist():
            key = text[start : start + self._min]
            if start < done or key not in self._sorted or _INSIDE.match(text, start):
                continue
            texts, part = self._sorted[key], text[start : start + self._reach[key]]
            # Every text that `part` begins with is a beginning of the last text up to `part` in the order, too.
            while (at := bisect_right(texts, part)) and len(part) >= self._min:
                effort -= len(part) + _STEP
                if effort < 0:
                    return found
                shared = _common(texts[at - 1], part)
                if shared == len(texts[at - 1]):
                    known = self._handles[texts[at - 1]]
                    readable = [handle for handle in known if namespaces is None or handle.namespace in namespaces]
                    if readable:
                        done = start + shared
                        found.append((start, done, min(readable)))
                        break
                    shared -= 1
                part = part[:shared]
        return found

    def _slots(self, text: str) -> NDArray[np.uint32]:
        """For each position of `text`, a hash of the characters from there on, as many as every known text has."""
        mixed, step = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32), 1
        while 2 * step <= self._min:
            mixed, step = mixed[:-step] * _FACTOR + mixed[step:], 2 * step
        return mixed * _FACTOR >> np.uint32(32 - _BITS)


def _common(left: str, right: str) -> int:
    """How many characters both begin with."""
    return bisect_left(range(min(len(left), len(right))), 1, key=lambda at: left[: at + 1] != right[: at + 1])
