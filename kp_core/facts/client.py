"""Opening Chroma, and what only its own tools can do; the only module that imports it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kp_core.bundled import needing
from kp_core.errors import BankError
from kp_core.facts.folder import check_unlocked, writing

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

__all__ = ["is_url", "open_client", "run_vacuum"]


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
            raise BankError(
                f"{path} has an older schema than the chromadb that is installed, and stays as it is ({error}). "
                f"`{upgrade}` upgrades it."
            ) from error
    import httpx

    url = urlsplit(str(path))
    try:
        httpx.get(f"{url.scheme}://{url.netloc}/api/v2/heartbeat", timeout=timeout_s, headers=dict(headers or {}))
    except httpx.HTTPError as error:
        raise BankError(
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


def run_vacuum(path: Path) -> None:
    """Take what was removed off the disk, in a folder that nobody has open; raises `BankError` where it fails.

    Chroma's log of changes is cut up to what its index holds, so each index is written first. It is written by
    processes that never held what was removed, as it is written with whatever the memory held: the first still reads
    the log, the second does not.
    """
    beside = Path(sys.executable).with_name("chroma")
    tool = str(beside) if beside.is_file() else shutil.which("chroma") or "chroma"
    flush = [sys.executable, "-c", _FLUSH, str(path)]
    for command in (flush, flush, [tool, "vacuum", "--path", str(path), "--force"]):
        with writing(path):
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
            if done.returncode:
                raise BankError(f"`{command[0]} ... {path}` failed: {(done.stderr or done.stdout).strip()}")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` leads to a server."""
    return str(path).startswith(("http://", "https://"))
