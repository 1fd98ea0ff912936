"""When packs were last used: the order in which a bounded store drops KV."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from contextlib import suppress
from typing import ClassVar
from weakref import WeakSet

from kp_core.errors import KnowledgePackError, PackCorruptError
from kp_core.packs.blobs import Blobs
from kp_core.packs.envelope import from_json, mapping, to_json
from kp_core.packs.secret import is_made

__all__ = ["LastUse"]

_FLUSH_SECONDS = 60
_MOST_NAMES = 100_000


class LastUse:
    """When each name was last used: in memory, and merged into the blob `used` at most once a minute and at the end.

    File access times are no substitute: mounts may disable them, and object storage has none. The times are only good
    for an order. If two processes write at once, the later write wins until the other writes again. A killed process
    loses the last minute.
    """

    _dropped: ClassVar[deque[LastUse]] = deque()
    """Those whose store is gone. The garbage collector may drop a store in any thread, also in one that the write would
    wait for, so they are written when a store is opened next, and when the process ends."""
    _all: ClassVar[WeakSet[LastUse]] = WeakSet()

    def __init__(self, blobs: Blobs) -> None:
        self._write(self._dropped)
        self._all.add(self)
        self._blobs, self._lock = blobs, threading.Lock()
        self._times, self._noted, self._flushed = dict[str, float](), False, time.monotonic()

    def note(self, name: str) -> None:
        """Record that `name` is used now."""
        with self._lock:
            self._times[name], self._noted = time.time(), True
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self.flush()

    def times(self) -> dict[str, float]:
        """Return the last use of each name by any process, as far as written, in seconds since 1970."""
        with self._lock:
            for name, used_at in self._written().items():
                if isinstance(used_at, float):
                    self._times[name] = max(used_at, self._times.get(name, used_at))
            if len(self._times) > _MOST_NAMES:
                self._times = dict(sorted(self._times.items(), key=lambda item: item[1])[-_MOST_NAMES:])
            return dict(self._times)

    def _written(self) -> dict[str, object]:
        with suppress(FileNotFoundError, PackCorruptError):
            return mapping(from_json(bytes(self._blobs.read("used"))), "used")
        return {}

    def drop(self) -> None:
        """Record that the store is gone. Does nothing that could wait."""
        self._dropped.append(self)

    @classmethod
    def write_all(cls) -> None:
        """Write what all stores of this process recorded."""
        cls._write(deque(cls._all))

    @staticmethod
    def _write(uses: deque[LastUse]) -> None:
        while uses:
            with suppress(IndexError, KnowledgePackError):  # Another thread may take the last one.
                uses.popleft().flush()

    def flush(self) -> None:
        """Write the recorded times, unless the store is read-only or gone."""
        self._flushed = time.monotonic()
        with suppress(OSError):
            if self._noted and is_made(self._blobs):
                self._noted = False
                self._blobs.write("used", [to_json(self.times()).encode()])


atexit.register(LastUse.write_all)
