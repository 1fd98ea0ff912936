"""Files that are either whole or absent, also after a crash: written aside, synced, then renamed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no file locks of this kind.
    fcntl = None  # type: ignore[assignment]

__all__ = ["discard_left", "discard_stale", "make_dirs", "publish", "replace_file", "stage", "sync_dir"]

_STALE_SECONDS = 24 * 3600
_PREFIX = ".kp-"


def make_dirs(path: Path) -> None:
    """Create `path` and its missing parents, readable by their owner only, and sync them to disk."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_dir(path.parent)


@contextmanager
def stage(directory: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> Iterator[Path]:
    """Write a temporary file of `chunks` in `directory`, synced, readable by its owner only; delete it at the end.

    The file is locked until then, so that `discard_left` can tell it from files that killed processes left.
    """
    descriptor, name = _locked(directory)
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


def _locked(directory: Path) -> tuple[int, str]:
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".tmp", dir=directory)
        # Another process may have taken the file for a leftover before we locked it. Wait until it has deleted it.
        _lock(descriptor, wait=True)
        if fcntl is None or Path(name).exists():
            return descriptor, name
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock the file and return whether that worked; with `wait`, wait for it. `False` where there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def publish(staged: Path, target: Path) -> None:
    """Rename `staged` to `target` and replace what is there; readers see the old file or the new one, both whole."""
    make_dirs(target.parent)
    staged.replace(target)
    sync_dir(target.parent)


def replace_file(target: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write `chunks` to `target` and replace what is there, whole or not at all. Raises `OSError`."""
    make_dirs(target.parent)
    discard_left(target.parent)
    with stage(target.parent, chunks) as staged:
        publish(staged, target)


def sync_dir(path: Path) -> None:
    """Sync the directory, so that renames and deletions in it survive a crash."""
    if os.name != "posix":  # Windows cannot open a directory, and syncs renames by itself.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_left(directory: Path) -> None:
    """Delete the temporary files in `directory` that killed processes left; other files stay."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(directory):
            if entry.name.startswith(_PREFIX) and entry.name.endswith(".tmp") and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    descriptor = os.open(entry.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                    try:
                        if _lock(descriptor):
                            Path(entry.path).unlink()
                    finally:
                        os.close(descriptor)


def discard_stale(directory: Path) -> None:
    """Run `discard_left`, then delete every file older than a day, for file systems without locks."""
    discard_left(directory)
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            if entry.is_file() and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                Path(entry.path).unlink()
