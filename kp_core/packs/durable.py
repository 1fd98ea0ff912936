"""Files that are either whole or absent, also after a crash: staged, synced, renamed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["discard_stale", "make_dirs", "publish", "replace_file", "stage", "sync_dir"]

_STALE_SECONDS = 24 * 3600


def make_dirs(path: Path) -> None:
    """Create `path` and what is missing above it, readable by its owner alone, surviving a crash."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_dir(path.parent)


def stage(directory: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> Path:
    """Write `chunks` to a new file in `directory`, synced to disk, readable by its owner alone."""
    descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def publish(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`, replacing what is there; readers see the old file or the new one, both whole."""
    make_dirs(target.parent)
    staged.replace(target)
    sync_dir(target.parent)


def replace_file(target: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write `chunks` to `target`, replacing what is there: whole or not at all. Raises `OSError`."""
    make_dirs(target.parent)
    staged = stage(target.parent, chunks)
    try:
        publish(staged, target)
    finally:
        staged.unlink(missing_ok=True)


def sync_dir(path: Path) -> None:
    """Make renames and removals in `path` survive a crash."""
    if os.name != "posix":  # Windows cannot open a directory, and syncs renames by itself.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_stale(directory: Path) -> None:
    """Remove files that crashed processes left in `directory` more than a day ago."""
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            if entry.is_file() and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                Path(entry.path).unlink()
