"""A folder of facts: whether it is ours, and the lock for writing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kp_core.errors import FactError, FactStoreLockedError
from kp_core.packs.durable import replace_file

__all__ = ["FACTS", "SCHEMA", "is_fact_store", "prepared"]

FACTS, SCHEMA = "facts", 1
_MARKER, _LOCK = "kp.json", "kp.lock"


def is_fact_store(path: Path) -> bool:
    """Whether this folder holds a `ChromaFactStore`."""
    return (path / _MARKER).is_file()


def prepared(path: Path, *, read_only: bool, wait: float) -> FileLock | None:
    """Lock our folder, creating it if it is empty; returns `None` for a reader."""
    if not is_fact_store(path):
        names = (
            sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("kp.")) if path.is_dir() else []
        )
        names = [name for name in names if name != "packs" and not name.endswith(".tmp")]
        if "facts.jsonl" in names:
            raise FactError(
                f"{path} holds facts of version 0.1, which kept them in files of its own. Build them again from their "
                f"sources into another folder, or from it: `kp build NEW {path / 'facts.jsonl'}`."
            )
        if "chroma.sqlite3" in names:
            raise FactError(
                f"{path} holds a Chroma database that we did not make; it stays as it is. Read it with "
                "`ChromaFactStore.from_collection(name, path=...)`, or give another folder."
            )
        if names:
            raise FactError(
                f"{path} holds other things ({', '.join(names[:3])}), and stays as it is. Give a new folder."
            )
        if read_only:
            raise FactError(f"Got {path} to read; there are no facts in it. Add some there first.")
        replace_file(path / _MARKER, [json.dumps({"kind": FACTS, "schema": SCHEMA}).encode()])
        with suppress(OSError):  # The folder may have existed with wider rights, which Chroma's files inherit.
            path.chmod(0o700)
    if read_only:
        return None
    lock = FileLock(path / _LOCK, thread_local=False, is_singleton=True, mode=0o600)
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise FactStoreLockedError(
            f"{path} is open for writing in another process. Wait for it (`wait=seconds`), read with `read_only=True`, "
            "or let both use a server (`chroma run`)."
        ) from error
    return lock
