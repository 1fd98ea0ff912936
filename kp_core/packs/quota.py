"""The bytes that a store of packs may take: entries whose last use is longest ago go for newer ones, texts stay."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection

from kp_core.events import log_event
from kp_core.packs.blobs import Blobs, BlobStat, FolderBlobs
from kp_core.packs.keys import BEHIND, own_files
from kp_core.packs.uses import LastUse
from kp_core.progress import bar_of

logger = logging.getLogger(__name__)

_MOST, _SHARE = 2**31, 20
_SLACK, _WRITERS, _AGAIN_S = 8, 4, 60


class Quota:
    """The bytes that a store may take: `max_bytes` for all files, or by default `for_kept` for what has several owners.

    An entry with several owners also goes when it was unused for `keep_seconds`.
    """

    def __init__(self, blobs: Blobs, uses: LastUse, max_bytes: int | None, keep_seconds: float | None) -> None:
        self._blobs, self._uses = blobs, uses
        self.max_bytes, self.keep_seconds = max_bytes, keep_seconds
        self._spare = (0, 0.0)  # Bytes that may be kept without looking for room, and until when.

    @property
    def for_kept(self) -> int:
        """Bytes of entries with several owners, at most: by default a twentieth of the store's disk, at most 2 GiB."""
        if self.max_bytes:
            return self.max_bytes
        if not isinstance(self._blobs, FolderBlobs):
            return _MOST
        folders = (self._blobs.path, *self._blobs.path.parents)  # The first of them need not exist yet.
        disk = next((shutil.disk_usage(folder).total for folder in folders if folder.is_dir()), _MOST * _SHARE)
        return min(_MOST, disk // _SHARE)

    def is_old(self, key: str, stat: BlobStat) -> bool:
        """Whether an entry with several owners was unused for longer than `keep_seconds`."""
        since = time.time() - (self.keep_seconds or 0)
        if self.keep_seconds is None or stat.modified >= since or not key.startswith(BEHIND):
            return False
        return max(self._uses.times().get(key, 0), stat.modified) < since

    def make_room(self, own: Collection[str], size: int) -> bool:
        """Delete the entries used longest ago until `size` bytes for the keys `own` fit; returns whether they do.

        One that another writer is storing or removing now counts as deleted, but stays. Within the default bound, a
        quarter of the room that was seen may be filled in the next minute without looking again.
        """
        if not self.max_bytes:
            if not any(key.startswith(BEHIND) for key in own):
                return True
            spare, until = self._spare
            if self.keep_seconds is None and size <= spare and time.monotonic() < until:
                self._spare = spare - size, until
                return True
        bound = self.for_kept
        listed = own_files(self._blobs, *() if self.max_bytes else (BEHIND,))
        entries = {key: stat for key, stat in listed.items() if key.endswith(".safetensors") and key not in own}
        excess = size + sum(stat.size for key, stat in listed.items() if key not in own) - bound
        if excess > sum(stat.size for stat in entries.values()):
            return False
        # With the default bound, the next writes need not look.
        least = -(bound // _SLACK) if excess > 0 and not self.max_bytes else 0
        times, dropped = self._uses.times() if entries else {}, list[str]()
        for key in sorted(entries, key=lambda key: (max(times.get(key, 0), entries[key].modified), key)):
            if excess <= least and not self.is_old(key, entries[key]):
                break
            dropped.append(key)
            excess -= entries[key].size
        # Other processes may take as much meanwhile.
        self._spare = max(0, -excess) // _WRITERS, time.monotonic() + _AGAIN_S
        if dropped:
            logger.info("Deleting %d entries of %s for newer ones, within %d bytes.", len(dropped), self._blobs, bound)
            log_event(logger, "KV dropped from the store", packs=len(dropped), max_bytes=bound)
        for key in bar_of("Dropping KV", None, "entry", dropped):
            if self._blobs.stat(key) == entries[key]:
                self._blobs.delete(key)
        return True
