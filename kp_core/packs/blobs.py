"""Byte storage under keys, and its form in a folder, whose files are whole or absent, also after a crash."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from kp_core.errors import PackError
from kp_core.memory import new_memory
from kp_core.threads import in_threads

try:
    import fcntl
except ImportError:  # Windows has no file locks of this kind.
    fcntl = None  # type: ignore[assignment]

Buffer: TypeAlias = bytes | bytearray | memoryview

_KEY = re.compile(r"(?!staging(?:/|$))[a-z0-9][a-z0-9_.-]*(?:/[a-z0-9][a-z0-9_.-]*)*")
_STALE_SECONDS = 24 * 3600
_PART = 1 << 22  # Bytes that one thread reads at once.
_PREFIX = ".kp-"
_SEEKING = threading.Lock()


class BlobStat(NamedTuple):
    """Size in bytes, a token that changes whenever other bytes are written, and the write time (seconds since 1970)."""

    size: int
    version: str
    modified: float


def is_key(key: str) -> bool:
    """Whether `key` is valid; other programs may leave files with other names."""
    return _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return `key` if it is a valid key; raise `PackError` otherwise."""
    if not is_key(key):
        raise PackError(f"Got the key {key!r}; expected lower-case names joined by '/', not under staging/.")
    return key


@runtime_checkable
class Blobs(Protocol):
    """Byte values ("blobs") under keys such as `packs/geo/ab/abc.txt`, shared by any number of threads and processes.

    A reader sees a whole blob or none, also after a crash. Every call sees what earlier calls wrote. `str()` names the
    storage. I/O errors are `OSError`.
    """

    @property
    def is_far(self) -> bool:
        """Whether each access takes long and the storage is not ours, so that it never holds the secret of handles."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of one version of the blob, whole or `start:stop`; raises `FileNotFoundError`."""

    def write(self, key: str, chunks: Iterable[Buffer], *, if_absent: bool = False) -> bool:
        """Write `chunks` as the blob, with `if_absent` only if there is none. Returns whether it wrote."""

    def stat(self, key: str, *, recent: bool = False) -> BlobStat | None:
        """Return size, version and time without reading the blob; `None` if there is no such blob.

        With `recent`, a slow storage may answer from a cache that is at most one second old. It never caches absence.
        """

    def list(self, prefix: str = "") -> Iterator[tuple[str, BlobStat]]:
        """Yield every blob whose key starts with `prefix`, in any order."""

    def delete(self, key: str) -> bool:
        """Delete the blob; returns whether there was one."""


class FolderBlobs:
    """Blobs as files of a folder, which the first write creates. Unfinished files lie in its `staging/`.

    Raises `PackError` for a key that is not lower-case names joined by `/`, so no key points outside the folder.
    """

    is_far = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._root = str(self.path)
        if not (self.path / "staging").is_symlink():
            _discard_left(self.path / "staging")

    def __str__(self) -> str:
        return self._root

    def open(self, key: str) -> FileIO:
        """Open the file of a blob, which keeps its bytes if another one replaces it; raises `FileNotFoundError`."""
        try:
            return open(self._file(key), "rb", buffering=0)  # noqa: PTH123 - a string, as `_file`
        except NotADirectoryError as error:  # There is a blob under the first part of the key.
            raise FileNotFoundError(key) from error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> memoryview:
        """As `Blobs.read`; the caller owns the returned memory and may write to it."""
        with self.open(key) as file:
            size = os.fstat(file.fileno()).st_size
            data = new_memory(max(0, min(size if stop is None else stop, size) - start)).data
            parts = [(at, data[at : at + _PART]) for at in range(0, len(data), _PART)]
            ends = in_threads(lambda part: part[0] + fill(file, part[1], start + part[0]), parts, len(data))
            # In a file that became shorter, nothing counts from the first byte that is missing.
            missing = (end for end, (at, part) in zip(ends, parts, strict=True) if end < at + len(part))
            return data[: next(missing, len(data))]

    def write(self, key: str, chunks: Iterable[Buffer], *, if_absent: bool = False) -> bool:
        """As `Blobs.write`."""
        target, staging = Path(self._file(key)), self.path / "staging"
        if if_absent and target.exists():
            return False
        if staging.is_symlink():
            raise PackError(f"{staging} is a link that leads elsewhere, where nothing is written. Remove the link.")
        _make_dirs(staging)
        _discard_left(staging, is_ours=True)
        with _stage(staging, chunks) as staged:
            # File system clocks are coarse: two writes within one tick would have the same time.
            os.utime(staged, ns=(time.time_ns(),) * 2)
            if if_absent:
                _make_dirs(target.parent)
                try:
                    os.link(staged, target)
                except FileExistsError:
                    return False
                except OSError:  # Without hard links, check for the file before the rename.
                    if target.exists():
                        return False
                else:
                    _sync_dir(target.parent)
                    return True
            _publish(staged, target)
            return True

    def stat(self, key: str, *, recent: bool = False) -> BlobStat | None:  # noqa: ARG002
        """As `Blobs.stat`."""
        try:
            return _stat(os.stat(self._file(key)))  # noqa: PTH116 - as `_file`
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str = "") -> Iterator[tuple[str, BlobStat]]:
        """As `Blobs.list`; also yields files whose names are not valid keys."""
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
        _sync_dir(file.parent)
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
        # A string: building a Path would cost more than the rest of `stat`.
        return f"{self._root}/{check_key(key)}"


def fill(file: FileIO, data: memoryview, start: int) -> int:
    """Fill `data` with the bytes of `file` from `start` on; returns how many there were."""
    filled = 0
    while filled < len(data) and (count := _read_at(file, data[filled:], start + filled)):
        filled += count
    return filled


def _read_at(file: FileIO, data: memoryview, start: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [data], start)
    with _SEEKING:  # Windows has no reads at a place; threads share the file.
        file.seek(start)
        return file.readinto(data)


def _stat(found: os.stat_result) -> BlobStat:
    return BlobStat(found.st_size, f"{found.st_ino}.{found.st_mtime_ns}.{found.st_size}", found.st_mtime)


def _make_dirs(path: Path) -> None:
    """Create `path` and its missing parents, readable by their owner only, and sync them to disk."""
    if path.is_dir():
        return
    _make_dirs(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        _sync_dir(path.parent)


@contextmanager
def _stage(directory: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> Iterator[Path]:
    """Write a temporary file of `chunks` in `directory`, synced, readable by its owner only; delete it at the end.

    The file is locked until then, so that `_discard_left` can tell it from files that killed processes left.
    """
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".tmp", dir=directory)
        # Another process may have taken the file for a leftover before we locked it. Wait until it has deleted it.
        _lock(descriptor, wait=True)
        if fcntl is None or Path(name).exists():
            break
        os.close(descriptor)
    with os.fdopen(descriptor, "wb") as file:
        try:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:  # Windows cannot rename an open file.
                file.close()
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock the file and return whether that worked; with `wait`, wait for it. `False` where there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _publish(staged: Path, target: Path) -> None:
    """Rename `staged` to `target` and replace what is there; readers see the old file or the new one, both whole."""
    _make_dirs(target.parent)
    staged.replace(target)
    _sync_dir(target.parent)


def replace_file(target: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write `chunks` to `target` and replace what is there, whole or not at all. Raises `OSError`."""
    _make_dirs(target.parent)
    _discard_left(target.parent)
    with _stage(target.parent, chunks) as staged:
        _publish(staged, target)


def _sync_dir(path: Path) -> None:
    """Sync the directory, so that renames and deletions in it survive a crash."""
    if os.name != "posix":  # Windows cannot open a directory, and syncs renames by itself.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard_left(directory: Path, *, is_ours: bool = False) -> None:
    """Delete the temporary files in `directory` that killed processes left; other files stay.

    If the directory `is_ours`, also delete every file older than a day, for file systems without locks.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(directory):
            with suppress(OSError):
                if not entry.is_file(follow_symlinks=False):
                    continue
                if entry.name.startswith(_PREFIX) and entry.name.endswith(".tmp"):
                    descriptor = os.open(entry.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                    try:
                        if _lock(descriptor):
                            Path(entry.path).unlink()
                    finally:
                        os.close(descriptor)
                if is_ours and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                    Path(entry.path).unlink()
