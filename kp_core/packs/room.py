"""Free space in a bounded store: drops the least recently used KV first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from kp_core.errors import PackCorruptError, PackError, QuotaError
from kp_core.packs.blobs import Blobs, BlobStat
from kp_core.packs.envelope import from_json, mapping, to_json
from kp_core.packs.file import PackFile, encode_pack
from kp_core.packs.files import PackFiles, handle_of, pack_key, text_key
from kp_core.packs.handle import Handle
from kp_core.packs.secret import is_made
from kp_core.progress import bar_of

__all__ = ["LastUse", "make_room"]

logger = logging.getLogger(__name__)

_SETTLE_SECONDS = 2.0
"""How long to wait, since the last change, for an entry that another writer is storing or removing."""
_STEP_SECONDS = 0.01
_FLUSH_SECONDS = 60
_MOST_NAMES = 100_000


class LastUse:
    """When each name was last used: in memory, and merged into the blob `used` at most once a minute and at the end.

    File access times are no substitute: mounts may disable them, and object storage has none. The times are only good
    for an order. If two processes write at once, the later write wins until the other writes again. A killed process
    loses the last minute.
    """

    def __init__(self, blobs: Blobs) -> None:
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

    def flush(self) -> None:
        """Write the recorded times, unless the store is read-only or gone."""
        self._flushed = time.monotonic()
        with suppress(OSError):
            if self._noted and is_made(self._blobs):
                self._noted = False
                self._blobs.write("used", [to_json(self.times()).encode()])


def make_room(files: PackFiles, uses: LastUse, max_bytes: int, own: tuple[str, ...], size: int) -> None:
    """Drop the least recently used KV until `size` bytes fit under `packs/`, not counting the keys `own`.

    The first entry of a pack loses its KV; other entries are deleted. First waits for entries that another writer is
    storing or removing. Raises `QuotaError`, and drops nothing, if the bytes cannot fit.
    """
    blobs = files.blobs
    listed, changed = dict(blobs.list("packs/")), time.monotonic()
    while True:
        used = size + sum(stat.size for key, stat in listed.items() if key not in own)
        plan, freed, is_settled = _plan(files, uses, listed, own, used - max_bytes)
        if used - freed <= max_bytes:
            break
        if not is_settled:
            time.sleep(_STEP_SECONDS)
        before, listed = listed, dict(blobs.list("packs/"))
        if listed != before:  # Another writer stores, removes or drops packs.
            changed = time.monotonic()
        elif is_settled or time.monotonic() > changed + _SETTLE_SECONDS:
            raise QuotaError(
                f"The pack needs {size} bytes. With it, and without the KV of the others, {blobs} would hold "
                f"{used - freed} bytes; max_bytes is {max_bytes}. "
                "Raise max_bytes, remove packs, or put `pack.without_kv()`."
            )
    for handle, slot, lazy, expected in bar_of("Dropping KV", None, "pack", plan):
        logger.info("Dropping the KV of %s%s to make room.", handle, slot)
        if not slot:
            files.replace(handle, lazy, expected)
        elif blobs.stat(pack_key(handle, slot)) == expected:
            blobs.delete(pack_key(handle, slot))


def _plan(
    files: PackFiles, uses: LastUse, listed: Mapping[str, BlobStat], own: tuple[str, ...], needed: int
) -> tuple[list[tuple[Handle, str, PackFile, BlobStat]], int, bool]:
    """Return the entries to drop to free `needed` bytes, the bytes this frees, and whether the store is settled.

    Each entry is its handle, slot, pack without KV, and version. The store is not settled if an entry was skipped
    because it is not readable yet or has no text yet.
    """
    times = uses.times() if needed > 0 else {}
    entries = {
        entry: stat
        for key, stat in listed.items()
        if key not in own and (entry := handle_of(key)) and key == pack_key(*entry)
    }
    plan: list[tuple[Handle, str, PackFile, BlobStat]] = []
    freed, is_settled = 0, True

    def age(entry: tuple[Handle, str]) -> tuple[float, tuple[Handle, str]]:
        return max(times.get(f"{entry[0]}{entry[1]}", 0), entries[entry].modified), entry

    for handle, slot in sorted(entries, key=age):
        if freed >= needed:
            break
        with suppress(PackError, FileNotFoundError):  # Leave files of a later release alone.
            pack, blob = files.look(handle, slot), entries[handle, slot]
            if pack is None or (pack.stored_bytes and text_key(handle) not in listed):
                is_settled = False
            elif pack.stored_bytes:
                plan.append((handle, slot, encode_pack(pack), blob))
                freed += blob.size if slot else blob.size - plan[-1][2].nbytes
    return plan, freed, is_settled
