"""When packs were last used: the order in which a bounded store drops KV."""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from math import isfinite

from kp_core.errors import KnowledgePackError, PackCorruptError
from kp_core.packs.blobs import Blobs
from kp_core.packs.envelope import from_json, mapping, to_json
from kp_core.packs.secret import is_made

_FLUSH_SECONDS = 60
_MOST_NAMES = 100_000


class LastUse:
    """When each name was last used: in memory, and merged into the blob `used` at most once a minute and at the end.

    Mounts may disable file access times, and object storage has none. The times are only good for an order: if two
    processes write at once, the later write wins until the other writes again.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._times, self._noted, self._flushed = dict[str, float](), False, time.monotonic()

    def note(self, name: str) -> None:
        """Record that `name` is used now."""
        self._times[name], self._noted = time.time(), True
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self.flush()

    def times(self) -> dict[str, float]:
        """Return the last use of each name by any process, as far as written, in seconds since 1970."""
        written: dict[str, object] = {}
        with suppress(FileNotFoundError, PackCorruptError):
            written = mapping(from_json(bytes(self._blobs.read("used"))), "used")
        known = {name: used_at for name, used_at in written.items() if isinstance(used_at, float) and isfinite(used_at)}
        for name, used_at in self._times.copy().items():  # Other threads note meanwhile.
            known[name] = max(used_at, known.get(name, used_at))
        if len(known) > _MOST_NAMES:
            known = dict(sorted(known.items(), key=lambda item: item[1])[-_MOST_NAMES:])
            self._times = known.copy()
        return known

    def flush(self) -> None:
        """Write the recorded times, unless the store is read-only or gone."""
        self._flushed = time.monotonic()
        with suppress(OSError, KnowledgePackError):
            if self._noted and is_made(self._blobs):
                self._noted = False
                self._blobs.write("used", [to_json(self.times()).encode()])


_BY_PLACE: dict[str, LastUse] = {}


def last_use_of(blobs: Blobs) -> LastUse:
    """Return the times of the store in `blobs`, which all stores that this process opens there share."""
    uses = _BY_PLACE.setdefault(str(blobs), LastUse(blobs))
    uses.flush()
    return uses


@atexit.register
def _flush_all() -> None:
    for uses in list(_BY_PLACE.values()):
        uses.flush()
