"""Opens Chroma: whether a folder is ours, the lock for writing, and the client.

The only module that imports chromadb.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from kp_core.bundled import needing
from kp_core.errors import FactError, FactStoreLockedError
from kp_core.packs.blobs import replace_file

FACTS, SCHEMA = "facts", 1
MARKER, _LOCK = "kp.json", "kp.lock"
_LOCKED_SECONDS = 4.0
_NUMBERS = itertools.count(1)


def open_client(
    path: str | os.PathLike[str] | None,
    *,
    shared: bool = True,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
    **server: Any,  # noqa: ANN401 - tenant, database
) -> Any:  # noqa: ANN401 - the library's own types are unions of unions
    """Open a client of a folder or a server; without `shared`, one that reads the folder's files anew."""
    with needing("ChromaFactStore needs chromadb", "chroma"):
        import chromadb
        from chromadb.config import Settings
    settings = Settings(anonymized_telemetry=False)
    if path is None or not is_url(path):
        check_unlocked(Path(path or "."), writing=True)
        # Chroma identifies an open folder by the path it was given, even after the process changes its directory.
        # All clients of one spelling share what Chroma has read of the files.
        spelling = "" if shared else "".join((os.sep, f"{os.sep}.")[int(bit)] for bit in f"{next(_NUMBERS):b}")
        return chromadb.PersistentClient(f"{Path(path or '.').resolve()}{spelling}", settings=settings, **server)
    import httpx

    url = urlsplit(str(path))
    try:
        httpx.get(f"{url.scheme}://{url.netloc}/api/v2/heartbeat", timeout=timeout_s, headers=dict(headers or {}))
    except httpx.HTTPError as error:
        raise FactError(
            f"There is no Chroma server at {path} ({type(error).__name__}: {error}). Start it with "
            "`chroma run --path FOLDER`, on a trusted network only."
        ) from error
    secure = url.scheme == "https"
    client = chromadb.HttpClient(
        url.hostname or "localhost",
        url.port or (443 if secure else 8000),
        ssl=secure,
        headers=dict(headers or {}),
        settings=settings,
        **server,
    )
    # By default, Chroma's client waits forever.
    client._server._session.timeout = httpx.Timeout(timeout_s)  # noqa: SLF001 - there is no other way
    return client


def version_of(path: Path) -> tuple[int, int]:
    """Return what changes when a store has changed the database in this folder, or another folder took its place."""
    with suppress(FileNotFoundError):  # It is being replaced.
        stat = (path / MARKER).stat()
        return stat.st_ino, stat.st_mtime_ns
    return 0, 0


def is_fact_store(path: Path) -> bool:
    """Whether this folder holds a `ChromaFactStore`."""
    return (path / MARKER).is_file()


def prepared(path: Path, *, read_only: bool, wait: float) -> FileLock | None:
    """Lock our folder, creating it if it is empty; returns `None` for a reader."""
    if not is_fact_store(path):
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        names = [name for name in names if name != "packs" and not name.startswith("kp.") and not name.endswith(".tmp")]
        if "chroma.sqlite3" in names:
            raise FactError(
                f"{path} holds a Chroma database that we did not make; it stays as it is. Give another folder, "
                "or put a retriever of LangChain or LlamaIndex over it (docs/vector-stores.md)."
            )
        if names:
            raise FactError(
                f"{path} holds other things ({', '.join(names[:3])}), and stays as it is. Give a new folder."
            )
        if read_only:
            raise FactError(f"Got {path} to read; there are no facts in it. Add some there first.")
        replace_file(path / MARKER, [json.dumps({"kind": FACTS, "schema": SCHEMA}).encode()])
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


def check_unlocked(path: Path, *, writing: bool) -> None:
    """Raise `FactStoreLockedError` if a process locks the database: Chroma would wait for minutes and ignore signals.

    With `writing`, also if another process is writing.
    """
    file = path / "chroma.sqlite3"
    if not file.is_file():
        return
    uri = f"{file.resolve().as_uri()}?mode={'rw' if writing else 'ro'}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_LOCKED_SECONDS, isolation_level=None)) as opened:
            opened.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if writing:
                opened.execute("BEGIN IMMEDIATE")
                opened.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        # Chroma handles everything else, e.g. rolling back what a killed writer left.
        if "locked" in str(error):
            raise FactStoreLockedError(
                f"{file} is locked; another process holds it. Wait for that, or end it."
            ) from error
    except sqlite3.DatabaseError as error:
        raise FactError(f"{file} is no database, or damaged ({error}). Restore the folder from a copy.") from error


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the URL of a server."""
    return str(path).startswith(("http://", "https://"))
