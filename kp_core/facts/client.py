"""Opening Chroma, and what only its own tools can do; the only module that imports it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kp_core.bundled import needing
from kp_core.errors import FactError, FactStoreLockedError
from kp_core.facts.index import blank_room

# An index is written after so many changes; what is set counts from the next opening on.
_FLUSH = """
import sys, chromadb
client = chromadb.PersistentClient(sys.argv[1], settings=chromadb.config.Settings(anonymized_telemetry=False))
for each in client.list_collections():
    if "kp:kind" not in (each.metadata or {}):
        continue
    held = client.get_collection(each.name, embedding_function=None)
    one = held.get(limit=1, include=["embeddings"])
    for _ in range(3):
        held.update(ids=one["ids"], embeddings=one["embeddings"])
"""

_LOCKED_SECONDS = 4.0

__all__ = ["check_unlocked", "is_url", "open_client", "run_vacuum"]


def open_client(
    path: str | os.PathLike[str] | None,
    *,
    migrations: str = "apply",
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
    **server: Any,  # noqa: ANN401 - tenant, database
) -> Any:  # noqa: ANN401 - the library's own types are unions of unions
    """A client of a folder or a server."""
    with needing("ChromaFactStore needs chromadb", "chroma"):
        import chromadb
        from chromadb.config import Settings
    settings = Settings(anonymized_telemetry=False, migrations=migrations)
    if path is None or not is_url(path):
        check_unlocked(Path(path or "."), writing=True)
        try:
            # Chroma knows a folder that is open already by the path it was given, wherever the process went since.
            return chromadb.PersistentClient(str(Path(path or ".").resolve()), settings=settings, **server)
        except chromadb.errors.InternalError as error:
            if "migrations" not in str(error):
                raise
            upgrade = f"python -c \"import chromadb; chromadb.PersistentClient('{path}')\""
            raise FactError(
                f"{path} has an older schema than the chromadb that is installed, and stays as it is ({error}). "
                f"`{upgrade}` upgrades it."
            ) from error
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
    # Chroma's own client waits for ever.
    client._server._session.timeout = httpx.Timeout(timeout_s)  # noqa: SLF001 - there is no other way
    return client


def check_unlocked(path: Path, *, writing: bool) -> None:
    """Raise `FactStoreLockedError` for a database that someone holds: Chroma would wait for minutes, deaf to signals.

    With `writing` that is also one which someone else is writing to. What is locked later, within a call, is not seen.
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
        # Anything else, such as what a killed writer left to be rolled back, is Chroma's to deal with.
        if "locked" in str(error):
            raise FactStoreLockedError(
                f"{file} is locked; another process holds it. Wait for that, or end it."
            ) from error
    except sqlite3.DatabaseError as error:
        raise FactError(f"{file} is no database, or damaged ({error}). Restore the folder from a copy.") from error


def run_vacuum(path: Path) -> None:
    """Take what was removed off the disk, in a folder that nobody has open; raises `FactError` where it fails.

    Chroma's log of changes is cut up to what its index holds, so each index is written first. What the memory of the
    process that reads the log held goes into new files of an index, so what these have room for is overwritten last.
    """
    beside = Path(sys.executable).with_name("chroma")
    tool = str(beside) if beside.is_file() else shutil.which("chroma") or "chroma"
    flush = [sys.executable, "-c", _FLUSH, str(path)]
    for command in (flush, [tool, "vacuum", "--path", str(path), "--force"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
        if done.returncode:
            raise FactError(f"`{command[0]} ... {path}` failed: {(done.stderr or done.stdout).strip()}")
    blank_room(path)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` leads to a server."""
    return str(path).startswith(("http://", "https://"))
