"""The vectors of a bank in embedded Chroma; the only module that knows Chroma.

Chroma is for other programs that read it, and for comparison: our own searches do not go through it. It is made from
the journal and mended from it, never the other way round.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp_core.errors import BankError, BankLockedError, MissingDependencyError
from kp_core.facts.layout import lock_folder
from kp_core.facts.rows import Vectors

__all__ = ["ChromaMirror", "Entries", "Entry", "problem_beside"]

logger = logging.getLogger(__name__)

_COLLECTION = "facts"
_TOLERANCE = 1e-5
_SAMPLE = 16


class Entry(NamedTuple):
    """What Chroma should hold under an id: the row of its vector, and what ties that to its text."""

    row: int
    crc: int


Entries: TypeAlias = Mapping[str, Entry]


class ChromaMirror:
    """One collection in `chroma-<part>` of a bank's folder: vectors under fact ids, each with the CRC-32 of its row.

    For one process at a time. `vectors` gives the vectors of rows. What Chroma cannot do is logged and made good by the
    next `mend`; with `mends=False` nothing is made good, and `problem` says what is wrong. Raises
    `MissingDependencyError` where Chroma is not installed, `BankError` when it fails on new files.
    """

    def __init__(
        self,
        folder: Path,
        vectors: Callable[[NDArray[np.intp]], Vectors],
        entries: Entries,
        *,
        mends: bool = True,
    ) -> None:
        self.folder, self.vectors = folder, vectors
        self._client: Any = None
        self.collection: Any = None
        held = sorted(folder.glob("chroma-*"), key=lambda path: path.stat().st_mtime_ns)
        if not mends:
            self._path = held[-1] if held else folder / "chroma-0"
            return
        if not held and entries:
            logger.warning("%s: Chroma has to be rebuilt (it is missing).", folder)
        if held:
            self._path = held[-1]
            try:
                self._connect()
                self._check(entries)
            except _DamagedError as error:
                logger.warning("%s: Chroma has to be rebuilt (%s).", folder, error)
                self._renew(entries)
            else:
                self.mend(entries, deep=False)
        else:
            self._renew(entries)

    def follow(self, removed: Sequence[str], entries: Entries) -> None:
        """Remove what is under these ids, and add or replace entries."""
        try:
            self._remove(removed)
            self._put(entries)
        except _DamagedError as error:
            logger.warning("%s: Chroma could not follow (%s); it is mended when next opened.", self.folder, error)

    def mend(self, entries: Entries, *, deep: bool) -> None:
        """Make Chroma hold exactly these entries; `deep` compares the vectors too."""
        try:
            missing, extra = self._differences(entries, deep=deep)
            self._remove(extra)
            self._put(missing)
            self._check(entries)
        except _DamagedError as error:
            logger.warning("%s: Chroma has to be rebuilt (%s).", self.folder, error)
            self._renew(entries)
        else:
            if missing or extra:
                logger.warning(
                    "%s: Chroma lacked %d facts and had %d too many; it is mended.",
                    self.folder,
                    len(missing),
                    len(extra),
                )

    def problem(self, entries: Entries) -> str | None:
        """What is wrong with what Chroma holds, vector by vector; `None` when nothing is."""
        try:
            if self._client is None:
                if not self._path.exists():
                    return "Chroma is missing."
                self._connect()
            missing, extra = self._differences(entries, deep=True)
            if missing or extra:
                return f"Chroma lacks {len(missing)} facts or has others, and has {len(extra)} too many."
            self._check(entries)
        except _DamagedError as error:
            return f"Chroma cannot be read ({error})."
        return None

    def close(self) -> None:
        """Release the files."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connect(self) -> None:
        with _damage():
            self._client = _client(self._path)
            self.collection = self._client.get_or_create_collection(
                _COLLECTION, configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
            )

    def _renew(self, entries: Entries) -> None:
        """Start over in a new folder: Chroma remembers, within a process, what was in the old one."""
        self.close()
        for path in self.folder.glob("chroma-*"):
            shutil.rmtree(path, ignore_errors=True)
        self._path = self.folder / f"chroma-{secrets.token_hex(8)}"
        try:
            self._connect()
            self._put(entries)
        except _DamagedError as error:
            raise BankError(
                f"{self.folder}: Chroma fails on new files ({error}). Look at the disk and at the version of chromadb, "
                f"or open the bank with `mirror=False`; the facts are safe in facts.jsonl."
            ) from error

    def _check(self, entries: Entries) -> None:
        """Raise `_DamagedError` unless the vectors of a few facts are there."""
        ids = list(entries)[:: max(1, len(entries) // _SAMPLE)]
        with _damage():
            # Counts and metadata come from SQLite; only this loads the vector index.
            held = self.collection.get(ids=ids, include=["embeddings"]) if ids else {"ids": []}
            count = self.collection.count()
        if len(held["ids"]) < len(ids) and count >= len(entries):
            raise _DamagedError(f"it gave {len(held['ids'])} facts of {len(ids)}")

    def _put(self, entries: Entries) -> None:
        ids = list(entries)
        with _damage(), tqdm(total=len(ids), desc="Chroma", unit="fact", delay=1, disable=None) as progress:
            step = min(2048, self._client.get_max_batch_size())
            for at in range(0, len(ids), step):
                page = ids[at : at + step]
                rows = np.array([entries[fact_id].row for fact_id in page], np.intp)
                about = [{"crc": entries[fact_id].crc} for fact_id in page]
                self.collection.upsert(ids=page, embeddings=self.vectors(rows), metadatas=about)
                progress.update(len(page))

    def _remove(self, ids: Sequence[str]) -> None:
        with _damage():
            step = self._client.get_max_batch_size()
            for at in range(0, len(ids), step):
                self.collection.delete(ids=list(ids[at : at + step]))

    def _differences(self, expected: Entries, *, deep: bool) -> tuple[dict[str, Entry], list[str]]:
        """What is missing or another, and the ids that should not be there."""
        missing, extra = dict(expected), list[str]()
        include = ["metadatas", "embeddings"] if deep else ["metadatas"]
        with _damage():
            step, at = self._client.get_max_batch_size(), 0
            while (page := self.collection.get(limit=step, offset=at, include=include))["ids"]:
                ids = page["ids"]
                at += len(ids)
                extra += [fact_id for fact_id in ids if fact_id not in expected]
                same = [
                    fact_id in expected and bool(about) and about.get("crc") == expected[fact_id].crc
                    for fact_id, about in zip(ids, page["metadatas"], strict=True)
                ]
                right = np.array(same)
                if deep and right.any():
                    held = np.asarray(page["embeddings"], np.float32)[right]
                    rows = np.array([expected[ids[place]].row for place in np.flatnonzero(right)], np.intp)
                    right[right] = np.abs(held - self.vectors(rows)).max(axis=1) <= _TOLERANCE
                for place in np.flatnonzero(right).tolist():
                    missing.pop(ids[place], None)
        return missing, extra


def problem_beside(folder: Path, vectors: Callable[[NDArray[np.intp]], Vectors], entries: Entries) -> str | None:
    """As `ChromaMirror.problem`, for one who only reads the bank; `None` also where there is no Chroma, or a writer."""
    if not any(folder.glob("chroma-*")):
        return None
    # Chroma is for one process at a time, so also looking takes the lock.
    try:
        lock = lock_folder(folder, 0)
    except BankLockedError:
        return None
    with lock:
        mirror = ChromaMirror(folder, vectors, entries, mends=False)
        try:
            return mirror.problem(entries)
        finally:
            mirror.close()


class _DamagedError(Exception):
    """Chroma failed, or holds something else than it was given."""


@contextmanager
def _damage() -> Iterator[None]:
    """Turn whatever Chroma raises into `_DamagedError`."""
    try:
        yield
    except (_DamagedError, MissingDependencyError):
        raise
    except Exception as error:
        # Chroma's own errors, SQLite's through Rust, ValueError, KeyError: it depends on which of its files is damaged.
        raise _DamagedError(f"{type(error).__name__}: {error}") from error


def _client(folder: Path) -> Any:  # noqa: ANN401 - the library's own types are unions of unions
    try:
        import chromadb
        from chromadb.config import Settings
    except ImportError as error:
        raise MissingDependencyError(
            'ChromaFactBank needs chromadb: `pip install "knowledge-packs[chroma]"`.'
        ) from error
    return chromadb.PersistentClient(str(folder), settings=Settings(anonymized_telemetry=False))
