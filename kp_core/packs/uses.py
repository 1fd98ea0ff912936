"""When packs were last used, without access times: mounts may keep none, and object storage has none."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from kp_core.errors import PackCorruptError
from kp_core.packs.blobs import Blobs
from kp_core.packs.envelope import from_json, mapping, to_json
from kp_core.packs.secret import is_made

__all__ = ["LastUse"]

_FLUSH_SECONDS = 60
_MOST_NAMES = 100_000


class LastUse:
    """When each name was last used: in memory, and merged into the blob `used` at most once a minute and at the end.

    Good for an order: of two processes that write at one moment the second wins until the first writes again, and what
    was used in the last minute before a kill is forgotten.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs, self._lock = blobs, threading.Lock()
        self._times, self._noted, self._flushed = dict[str, float](), False, time.monotonic()

    def note(self, name: str) -> None:
        """`name` is used now."""
        with self._lock:
            self._times[name], self._noted = time.time(), True
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self.flush()

    def times(self) -> dict[str, float]:
        """The last use of each name by anyone, as far as it was written, in seconds since 1970."""
        with self._lock:
            for name, when in self._written().items():
                if isinstance(when, float):
                    self._times[name] = max(when, self._times.get(name, when))
            if len(self._times) > _MOST_NAMES:
                self._times = dict(sorted(self._times.items(), key=lambda item: item[1])[-_MOST_NAMES:])
            return dict(self._times)

    def _written(self) -> dict[str, object]:
        with suppress(FileNotFoundError, PackCorruptError):
            return mapping(from_json(bytes(self._blobs.read("used"))), "used")
        return {}

    def flush(self) -> None:
        """Write what was noted; nothing where nobody can write, or where the store is gone."""
        self._flushed = time.monotonic()
        with suppress(OSError):
            if self._noted and is_made(self._blobs):
                self._noted = False
                self._blobs.write("used", [to_json(self.times()).encode()])
