"""The files of a store of packs: where they lie (`docs/format.md` describes them), and the bytes that they may take.

Entries whose last use is longest ago go for newer ones; texts stay.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Collection
from contextlib import suppress

from kp_core.errors import PromptError
from kp_core.events import log_event
from kp_core.packs.blobs import Blobs, BlobStat, FolderBlobs, is_key
from kp_core.packs.handle import Handle
from kp_core.packs.uses import LastUse
from kp_core.progress import bar_of

logger = logging.getLogger(__name__)

BEHIND = "behind/"
"""Below it lie entries with several owners."""
_EARLIER = "kept/"  # Those of release 0.2, which are not read.
_PACK = re.compile(r"packs/([^/]+)/[^/]+/([^/.]+)(?:\.[0-9a-f]{32}\.safetensors|\.txt)")
_ENTRY_BEHIND = re.compile(r"behind/[0-9a-f]{2}/[0-9a-f]{32}\.safetensors")
_MOST, _SHARE = 2**31, 20
_SLACK, _WRITERS, _AGAIN_S = 8, 4, 60


def text_key(handle: Handle) -> str:
    """Return the key of the text of a pack."""
    return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.txt"


def buried_key(handle: Handle) -> str:
    """Return the key of the mark that a pack was deleted."""
    return f"deleted/{handle.namespace}/{handle.id[:2]}/{handle.id}"


def handle_of(key: str) -> Handle | None:
    """Return the handle of the text or of the only owner of the entry at `key`; `None` if `key` is neither."""
    match = _PACK.fullmatch(key)
    with suppress(PromptError):
        return Handle(match[1], match[2]) if match else None
    return None


def own_files(blobs: Blobs, *prefixes: str) -> dict[str, BlobStat]:
    """Return our files, by default all texts and entries.

    Others, such as a `.DS_Store` or what a network drive leaves, are not touched.
    """
    listed = (each for prefix in prefixes or ("packs/", BEHIND) for each in blobs.list(prefix))
    return {
        key: stat for key, stat in listed if (_ENTRY_BEHIND.fullmatch(key) if key.startswith(BEHIND) else is_key(key))
    }


def entries_of(blobs: Blobs, handle: Handle) -> list[str]:
    """Return the keys of the entries that this pack alone owns, and of those of release 0.2."""
    return [key for key in own_files(blobs, text_key(handle).removesuffix("txt")) if not key.endswith(".txt")]


def earlier_of(blobs: Blobs, handle: Handle) -> list[str]:
    """Return what release 0.2 left that may hold the KV of a pack: nobody reads it, and it goes with the pack."""
    left = own_files(blobs, _EARLIER, f"quarantine/{handle.namespace}.{handle.id}.")
    return [key for key in left if key.endswith((".safetensors", ".txt"))]


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
