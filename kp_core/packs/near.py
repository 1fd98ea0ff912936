"""Copies of far blobs on the local disk, within a budget of bytes."""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import blake2b

from kp_core.bundled import cache_directory
from kp_core.packs.blobs import Buffer, FolderBlobs

__all__ = ["NearBlobs"]

# Not fsspec's `filecache`: it has no budget of bytes, raises where a disk refuses, and does not check its copies: of 12
# packs whose copies were damaged on this disk, all 12 counted as damaged in the store, and were set aside there.
_DIGEST_BYTES = 16


class NearBlobs:
    """Blobs of the object storage at `place`, as files of one folder for all processes and places of this user.

    The folder is `objects` in `KP_CACHE`, by default `~/.cache/knowledge-packs`; what was read longest ago goes first.
    Every copy ends with its digest, so that damage here is never taken for damage there. What this disk refuses is
    not kept.
    """

    def __init__(self, place: str, max_bytes: int) -> None:
        self._blobs, self._place, self.max_bytes = FolderBlobs(cache_directory() / "objects"), place, max_bytes

    def has(self, key: str, version: str) -> bool:
        """Whether there is a copy of this version; says nothing about damage."""
        return self._blobs.stat(self._name(key, version)) is not None

    def read(self, key: str, version: str) -> memoryview | None:
        """The copy of this version, in the caller's own memory; `None` where there is none that is intact."""
        name = self._name(key, version)
        with suppress(OSError):
            data = self._blobs.read(name)
            found = data[:-_DIGEST_BYTES]
            if _digest(found) == bytes(data[-_DIGEST_BYTES:]):
                os.utime(self._blobs.path / name)
                return found
            self._blobs.delete(name)
        return None

    def write(self, key: str, version: str, data: Buffer) -> None:
        """Keep a copy in place of older versions, and drop others until all fit."""
        if len(data) + _DIGEST_BYTES > self.max_bytes:
            return
        with suppress(OSError):
            self.drop(key)
            self._blobs.write(self._name(key, version), [data, _digest(data)])
            held = sorted(self._blobs.list(), key=lambda each: each[1].modified)
            spare = self.max_bytes - sum(found.size for _, found in held)
            for name, found in held:
                if spare >= 0:
                    break
                self._blobs.delete(name)
                spare += found.size

    def drop(self, key: str) -> None:
        """Delete the copies of a blob."""
        with suppress(OSError):
            for name, _ in list(self._blobs.list(self._name(key))):
                self._blobs.delete(name)

    def _name(self, key: str, version: str | None = None) -> str:
        parts = (f"{self._place}/{key}",) if version is None else (f"{self._place}/{key}", version)
        return ".".join(blake2b(part.encode(), digest_size=16).hexdigest() for part in parts)


def _digest(data: Buffer) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
