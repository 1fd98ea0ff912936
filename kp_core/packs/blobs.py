"""Where bytes lie: whole values under keys, in a folder or in object storage."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from kp_core.errors import PackError
from kp_core.packs.durable import discard_left, discard_stale, make_dirs, publish, stage, sync_dir

__all__ = ["BlobStat", "Blobs", "Buffer", "FolderBlobs", "check_key"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_KEY = re.compile(r"(?!staging(?:/|$))[a-z0-9][a-z0-9_.-]*(?:/[a-z0-9][a-z0-9_.-]*)*")


class BlobStat(NamedTuple):
    """Size in bytes, a token that changes whenever other bytes are written, and when that was (seconds since 1970)."""

    size: int
    version: str
    modified: float


def check_key(key: str) -> str:
    """`key`, when it is one; raises `PackError` otherwise."""
    if _KEY.fullmatch(key) is None:
        raise PackError(f"Got the key {key!r}; expected lower-case names joined by '/', not under staging/.")
    return key


class Blobs(Protocol):
    """Blobs under keys such as `packs/geo/ab/abc.txt`, shared by any number of threads and processes.

    A blob is whole or absent to every reader, after a crash too; what a call has written, every later call sees.
    `str()` names the place. Errors of the medium are `OSError`.
    """

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        """The bytes of one version of the blob, or those from `start` to `stop`; raises `FileNotFoundError`."""

    def write(self, key: str, chunks: Iterable[Buffer], *, if_absent: bool = False) -> bool:
        """Put `chunks` in the place of the blob; with `if_absent` only where there is none. Returns whether it did."""

    def stat(self, key: str, *, recent: bool = False) -> BlobStat | None:
        """What there is to know without reading it, or `None` when there is no such blob.

        With `recent` as it was at most a second ago, where asking takes long; what is absent is always looked for.
        """

    def list(self, prefix: str = "") -> Iterator[tuple[str, BlobStat]]:
        """Every blob whose key starts with `prefix`, in any order."""

    def delete(self, key: str) -> bool:
        """Remove the blob; returns whether there was one."""


class FolderBlobs:
    """Blobs as the files of a folder, which is made by the first write; files being written lie in its `staging/`.

    Raises `PackError` for keys that are not lower-case names joined by `/`, so that no key leaves the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._root = str(self.path)
        if not (self.path / "staging").is_symlink():
            discard_left(self.path / "staging")

    def __str__(self) -> str:
        return self._root

    def read(self, key: str, start: int = 0, stop: int | None = None) -> memoryview:
        """As `Blobs.read`; the memory is the caller's own, and can be written to."""
        with open(self._file(key), "rb", buffering=0) as file:  # noqa: PTH123 - as `_file`
            size = os.fstat(file.fileno()).st_size
            data = np.empty(max(0, min(size if stop is None else stop, size) - start), np.uint8).data
            file.seek(start)
            done = 0
            # One read(2) delivers at most 2 GiB.
            while done < len(data) and (count := file.readinto(data[done:])):
                done += count
            return data[:done]

    def write(self, key: str, chunks: Iterable[Buffer], *, if_absent: bool = False) -> bool:
        """As `Blobs.write`."""
        target, staging = Path(self._file(key)), self.path / "staging"
        if if_absent and target.exists():
            return False
        if staging.is_symlink():
            raise PackError(f"{staging} is a link that leads elsewhere, where nothing is written. Remove the link.")
        make_dirs(staging)
        discard_stale(staging)
        with stage(staging, chunks) as staged:
            # The clock of the file system ticks slowly, and two writes within a tick may look the same.
            os.utime(staged, ns=(time.time_ns(),) * 2)
            if not if_absent:
                publish(staged, target)
                return True
            make_dirs(target.parent)
            try:
                os.link(staged, target)
                sync_dir(target.parent)
            except FileExistsError:
                return False
            except OSError:  # A file system without hard links: a look before the rename has to do.
                if target.exists():
                    return False
                publish(staged, target)
            return True

    def stat(self, key: str, *, recent: bool = False) -> BlobStat | None:  # noqa: ARG002
        """As `Blobs.stat`."""
        try:
            return _stat(os.stat(self._file(key)))  # noqa: PTH116 - as `_file`
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str = "") -> Iterator[tuple[str, BlobStat]]:
        """As `Blobs.list`; files with names that no key has are listed too."""
        if prefix:
            self._file(prefix.rstrip("/"))
        return self._walk(prefix.rpartition("/")[0], prefix)

    def delete(self, key: str) -> bool:
        """As `Blobs.delete`."""
        file = Path(self._file(key))
        try:
            file.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        sync_dir(file.parent)
        return True

    def _walk(self, folder: str, prefix: str) -> Iterator[tuple[str, BlobStat]]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{self._root}/{folder}") as entries:
            for entry in entries:
                key = f"{folder}/{entry.name}" if folder else entry.name
                if not key.startswith(prefix) or key == "staging":
                    continue
                if entry.is_dir():
                    yield from self._walk(key, prefix)
                else:
                    with suppress(FileNotFoundError):
                        yield key, _stat(entry.stat())

    def _file(self, key: str) -> str:
        # A string, as Path objects would cost more than all the rest of a `stat`.
        return f"{self._root}/{check_key(key)}"


def _stat(found: os.stat_result) -> BlobStat:
    return BlobStat(found.st_size, f"{found.st_ino}.{found.st_mtime_ns}.{found.st_size}", found.st_mtime)
