"""Recognition: finds the exact texts of packs in messages, so that their KV is used as if the handles stood there."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from threading import Lock, Thread
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import PackError
from kp_core.packs.handle import Handle
from kp_core.progress import bar_of
from kp_core.threads import make_anew

if TYPE_CHECKING:
    from kp_core.packs.view import Packs

__all__ = ["Recogniser"]

logger = logging.getLogger(__name__)

_MIN_CHARS = 64
_PATIENCE_S = 1.0  # How long a message waits for texts from object storage.
# Budget of a search, in compared characters per character of text; each step counts as a thousand.
_EFFORT, _STEP, _SPARE = 32, 1_000, 65_536
_INSIDE = re.compile(r"(?<=\w)\w")  # A word character that does not begin its word.
_BITS, _FACTOR = 20, np.uint32(2_654_435_761)


class Recogniser:
    """Finds the texts of packs in other texts.

    It compares exactly, without the pack's leading and trailing blanks, and only from the start of a word. It ignores
    packs shorter than `min_chars`. Search time is proportional to the text: a search that gets too slow (thousands of
    packs with a common long beginning, which the text repeats) stops. `find_packs` and `discard` are thread-safe.
    """

    def __init__(self, min_chars: int = _MIN_CHARS) -> None:
        self._min = min_chars
        self.forked()
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: begin with nothing. Another thread may have been reading texts."""
        self._texts: dict[Handle, str] = {}
        self._handles: dict[str, set[Handle]] = {}
        # By first `min_chars` characters: the sorted texts, and the largest length so far.
        self._sorted: dict[str, list[str]] = {}
        self._reach: dict[str, int] = {}
        # Hashes of the beginnings: a search examines one position in fifty instead of every word.
        self._noted = np.zeros(2**_BITS, bool)
        # By namespace: `changes` of the store when its texts were last read.
        self._changes: dict[str, object] = {}
        self._lock = Lock()
        self._reading: dict[str, Lock] = {}  # By namespace: whoever reads its texts now.

    def add(self, handle: Handle, text: str) -> None:
        """Find `text` from now on. A handle has one text, so adding it again does nothing."""
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
        """Stop finding its text, unless another handle has the same text."""
        with self._lock:
            text = self._texts.pop(handle, "")
            if text:
                self._handles[text].discard(handle)
                if not self._handles[text]:
                    del self._handles[text]
                    texts = self._sorted[text[: self._min]]
                    del texts[bisect_left(texts, text)]

    def find_packs(self, store: Packs, text: str, namespaces: Collection[str]) -> list[tuple[int, int, Handle]]:
        """Read new packs of these namespaces of `store`, then return where their texts are in `text`, as `find` does.

        Whoever may read other namespaces does not wait meanwhile. What takes more than a second to read from object
        storage is found by a later search, and stays text until then.
        """
        if len(text) < self._min:
            return []
        changes = store.changes
        for namespace in namespaces:
            if self._changes.get(namespace, self) == changes:
                continue
            if store.blobs is None or not store.blobs.is_far:
                self._read(store, namespace)
            elif not self._reading.setdefault(namespace, Lock()).locked():
                reader = Thread(target=self._read_far, args=(store, namespace), daemon=True)
                reader.start()
                reader.join(_PATIENCE_S)
        with self._lock:
            return self.find(text, namespaces) if self._handles else []

    def _read_far(self, store: Packs, namespace: str) -> None:
        try:
            self._read(store, namespace)
        except (OSError, PackError) as error:
            logger.warning("Texts of packs in %s cannot be read; the next message tries again: %s", namespace, error)

    def _read(self, store: Packs, namespace: str) -> None:
        with self._reading.setdefault(namespace, Lock()):
            # Read `changes` before the texts, so that packs added in between are read next time.
            changes = store.changes
            if self._changes.get(namespace, self) == changes:  # Another thread has just read them.
                return
            with self._lock:
                known = {handle for handle in self._texts if handle.namespace == namespace}
            unread = store.texts([namespace], known)
            for handle, text in bar_of("Reading the texts of packs", None, "pack", unread):
                with self._lock:
                    self.add(handle, text)
            self._changes[namespace] = changes

    def find(self, text: str, namespaces: Collection[str] | None = None) -> list[tuple[int, int, Handle]]:
        """Return texts found in `text`, as `(start, stop, handle)`: the leftmost, the longest there, then on behind it.

        With `namespaces`, finds only their handles. If several handles have the same text, returns the smallest.
        """
        matches: list[tuple[int, int, Handle]] = []
        end = 0
        effort = _EFFORT * (len(text) + _SPARE)
        for start in np.flatnonzero(self._noted[self._slots(text)]).tolist():
            key = text[start : start + self._min]
            if start < end or key not in self._sorted or _INSIDE.match(text, start):
                continue
            texts, window = self._sorted[key], text[start : start + self._reach[key]]
            # `bisect_right` gives the last text up to `part` in sort order. It begins with every text that `part`
            # begins with.
            while (at := bisect_right(texts, window)) and len(window) >= self._min:
                effort -= len(window) + _STEP
                if effort < 0:
                    return matches
                shared = _common(texts[at - 1], window)
                if shared == len(texts[at - 1]):
                    handles = self._handles[texts[at - 1]]
                    readable = [handle for handle in handles if namespaces is None or handle.namespace in namespaces]
                    if readable:
                        end = start + shared
                        matches.append((start, end, min(readable)))
                        break
                    shared -= 1
                window = window[:shared]
        return matches

    def _slots(self, text: str) -> NDArray[np.uint32]:
        """Return a hash for each position of `text`, over as many characters as every known text has."""
        mixed, step = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32), 1
        while 2 * step <= self._min:
            mixed, step = mixed[:-step] * _FACTOR + mixed[step:], 2 * step
        return mixed * _FACTOR >> np.uint32(32 - _BITS)


def _common(left: str, right: str) -> int:
    return bisect_left(range(min(len(left), len(right))), 1, key=lambda at: left[: at + 1] != right[: at + 1])
