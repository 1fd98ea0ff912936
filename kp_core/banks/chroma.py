"""Fact banks in embedded Chroma; the only module that knows Chroma."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kp_core.banks.base import Fact
from kp_core.banks.journal import Journal, digest_of
from kp_core.banks.layout import BankFile, lock_folder, read_arrays, remove_other_parts, vectors_path, write_arrays
from kp_core.banks.routing import Clustering, RoutedBank, Vectors, cluster
from kp_core.embed import Embedder
from kp_core.errors import BankError, MissingDependencyError

__all__ = ["ChromaFactBank"]

logger = logging.getLogger(__name__)

_COLLECTION = "facts"


class ChromaFactBank(RoutedBank):
    """A `FactBank` in a folder, for one process at a time.

    The facts themselves live in `facts.jsonl`; Chroma holds their vectors and is rebuilt from that file, with a log
    line, whenever it is missing, unreadable or holds something else. A folder that was built before opens without
    embedding anything. `bank_size` and `random_state` count from the next `build` on.

    Use it as a context manager, or call `close`: until then no other `ChromaFactBank` can open the folder.

    Raises `BankError` when the folder is open elsewhere, was built with another embedder (both are named), or its
    `facts.jsonl` is damaged (the line is named); `MissingDependencyError` where Chroma is not installed.
    """

    def __init__(
        self, path: str | os.PathLike[str], embedder: Embedder, *, bank_size: int = 20, random_state: int = 0
    ) -> None:
        super().__init__(embedder, bank_size=bank_size, random_state=random_state)
        self.path = Path(path)
        self._journal = Journal(self.path / "facts.jsonl")
        self._index: _Index | None = None
        self._folder_lock = lock_folder(self.path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def rebuild(self) -> None:
        """Compute vectors, banks and Chroma anew from the facts; needs nothing but `facts.jsonl`."""
        with self._lock:
            self._check_open()
            if self._facts:
                self._rebuild(None)

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        with self._lock:
            if self._index:
                self._index.close()
                self._index = None
            self._folder_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        about = BankFile.read(self.path)
        if about and about.embedder != self.embedder.name:
            raise BankError(
                f"{self.path} was built with the embedder {about.embedder!r}, got {self.embedder.name!r}; their "
                f"vectors cannot be compared. Open it with {about.embedder!r}, or build a bank in another folder."
            )
        self._set_facts(tuple(self._journal.read()))
        if not self._facts:
            if about:
                logger.warning("%s: %s holds no facts, %d were built.", self.path, self._journal.path.name, about.facts)
            return
        clustering = None
        if about and about.digest == digest_of(self._facts) and about.facts == len(self._facts):
            clustering = read_arrays(self.path, about)
        if about is None or clustering is None:
            logger.warning("%s: the index is missing or not of these facts; it is rebuilt.", self.path)
            self._rebuild(None)
            return
        try:
            self._index = _Index.open(vectors_path(self.path, about.part), clustering)
        except _DamagedError as error:
            logger.warning("%s: Chroma has to be rebuilt (%s).", self.path, error)
            self._rebuild(clustering)
            return
        self._clustering = clustering
        remove_other_parts(self.path, about.part)

    def _rebuild(self, clustering: Clustering | None) -> None:
        vectors = self._embed(self._facts)
        if clustering is None:
            clustering = cluster(vectors, self.bank_size, self.random_state)
        self._write((), vectors, clustering)
        self._clustering = clustering
        logger.info("%s: rebuilt %d banks of %d facts.", self.path, clustering.banks, len(self._facts))

    def _store(self, new: Sequence[Fact], vectors: Vectors, clustering: Clustering) -> None:
        self._check_open()
        self._write(new, vectors, clustering)

    def _write(self, new: Sequence[Fact], vectors: Vectors, clustering: Clustering) -> None:
        """Make a part of the facts held and the `new` ones, and make it the one that counts."""
        facts, part = (*self._facts, *new), secrets.token_hex(8)
        write_arrays(self.path, part, clustering)
        index = _Index.create(vectors_path(self.path, part), [fact.id for fact in facts], vectors, clustering)
        about = BankFile(
            embedder=self.embedder.name,
            dimensions=vectors.shape[1],
            bank_size=clustering.bank_size,
            random_state=clustering.random_state,
            facts=len(facts),
            digest=digest_of(facts),
            part=part,
        )
        try:
            if new:
                self._journal.append(new)
            about.write(self.path)
        except BaseException:
            # The journal may be ahead of what this object holds; opening the folder again sorts that out.
            index.close()
            self.close()
            raise
        if self._index:
            self._index.close()
        self._index = index
        remove_other_parts(self.path, part)

    def _vectors(self) -> Vectors:
        try:
            return self._live().vectors([fact.id for fact in self._facts])
        except _DamagedError as error:
            logger.warning("%s: Chroma cannot be read (%s); all facts are embedded again.", self.path, error)
            return self._embed(self._facts)

    def _scores(self, query: NDArray[np.float32], banks: Sequence[int]) -> Iterable[tuple[int, float]]:
        try:
            return self._asked(query, banks)
        except _DamagedError as error:
            logger.warning("%s: Chroma cannot be read (%s); it is rebuilt.", self.path, error)
            self._write((), self._vectors(), self._built())
        try:
            return self._asked(query, banks)
        except _DamagedError as error:
            raise BankError(
                f"{self.path}: Chroma fails right after it was rebuilt ({error}). Look at the disk and at the version "
                f"of chromadb; the facts themselves are safe in {self._journal.path.name}."
            ) from error

    def _asked(self, query: NDArray[np.float32], banks: Sequence[int]) -> list[tuple[int, float]]:
        clustering = self._built()
        expected = set(clustering.rows(banks).tolist())
        where = None if len(banks) == clustering.banks else banks
        found = self._live().scores(query, where, len(expected))
        rows = [(self._rows.get(fact_id, -1), score) for fact_id, score in found]
        # The index is approximate and has been lost before: every fact of the bank is asked for, so a gap shows.
        if {row for row, _ in rows} != expected:
            raise _DamagedError(f"it gave {len(rows)} facts of {len(expected)}")
        return rows

    def _live(self) -> _Index:
        self._check_open()
        if self._index is None:
            raise _DamagedError("it is not open")
        return self._index

    def _check_open(self) -> None:
        if not self._folder_lock.is_locked:
            raise BankError(f"{self.path} was closed. Open it again with `ChromaFactBank(path, embedder)`.")


class _DamagedError(Exception):
    """Chroma failed, or holds something else than it was given."""


class _Index:
    """One Chroma collection of vectors under fact ids, each with its bank as metadata; never changed once made."""

    def __init__(self, client: Any, collection: Any) -> None:  # noqa: ANN401 - the library's own types are unions of unions
        self._client, self._collection = client, collection

    @classmethod
    def create(cls, folder: Path, ids: Sequence[str], vectors: Vectors, clustering: Clustering) -> _Index:
        """A new collection in `folder`; raises `BankError` when Chroma cannot write it."""
        client = None
        try:
            with _damage():
                client = _client(folder)
                collection = client.create_collection(
                    _COLLECTION, configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
                )
                step = client.get_max_batch_size()
                for start in range(0, len(ids), step):
                    rows = slice(start, start + step)
                    banks = [{"bank": bank} for bank in clustering.labels[rows].tolist()]
                    collection.add(ids=list(ids[rows]), embeddings=vectors[rows], metadatas=banks)
        except _DamagedError as error:
            if client:
                client.close()
            raise BankError(f"Chroma could not write {folder}: {error}. Nothing was changed.") from error
        return cls(client, collection)

    @classmethod
    def open(cls, folder: Path, clustering: Clustering) -> _Index:
        """The collection in `folder`; raises `_DamagedError` unless it passes `check`."""
        if not folder.is_dir():
            raise _DamagedError("it is missing")
        client = None
        try:
            with _damage():
                client = _client(folder)
                index = cls(client, client.get_collection(_COLLECTION, embedding_function=None))
            index.check(clustering)
        except BaseException:
            if client:
                client.close()
            raise
        return index

    def check(self, clustering: Clustering) -> None:
        """Raise `_DamagedError` unless the number of facts is right and a query is answered."""
        expected = len(clustering.labels)
        with _damage():
            count = self._collection.count()
        if count != expected:
            raise _DamagedError(f"it holds {count} facts, expected {expected}")
        # The count comes from SQLite; only a query loads the vector index.
        self.scores(clustering.centroids[0], [0], int(clustering.sizes[0]))

    def scores(self, query: NDArray[np.float32], banks: Sequence[int] | None, count: int) -> list[tuple[str, float]]:
        """`count` facts of `banks` (`None` = of all) with their cosine to `query`."""
        where = None if banks is None else {"bank": banks[0] if len(banks) == 1 else {"$in": list(banks)}}
        with _damage():
            found = self._collection.query(
                query_embeddings=[query], n_results=count, where=where, include=["distances"]
            )
            pairs = zip(found["ids"][0], found["distances"][0], strict=True)
            return [(fact_id, 1.0 - distance) for fact_id, distance in pairs]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """The vectors under `ids`, in this order."""
        with _damage():
            step, found = self._client.get_max_batch_size(), dict[str, NDArray[np.float32]]()
            for start in range(0, len(ids), step):
                page = self._collection.get(ids=list(ids[start : start + step]), include=["embeddings"])
                found.update(zip(page["ids"], page["embeddings"], strict=True))
            return np.array([found[fact_id] for fact_id in ids], np.float32)

    def close(self) -> None:
        """Release the files."""
        self._client.close()


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


def _client(folder: Path) -> Any:  # noqa: ANN401 - see _Index
    try:
        import chromadb
        from chromadb.config import Settings
    except ImportError as error:
        raise MissingDependencyError(
            'ChromaFactBank needs chromadb: `pip install "knowledge-packs[chroma]"`.'
        ) from error
    return chromadb.PersistentClient(str(folder), settings=Settings(anonymized_telemetry=False))
