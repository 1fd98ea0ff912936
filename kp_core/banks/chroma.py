"""Facts in Chroma: in a folder, on a server or through any client. The only module that imports chromadb."""

from __future__ import annotations

import itertools
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

import numpy as np
from filelock import FileLock, Timeout

from kp_core.banks.base import Fact, Filter, Hit
from kp_core.banks.embed import Embedder, SentenceTransformerEmbedder, as_embedder, normalised
from kp_core.banks.filters import ORDERED, predicate
from kp_core.banks.store import BANK_SIZE, FactStore, Row, Vectors, alive, ranked
from kp_core.bundled import needing
from kp_core.errors import FactError, FactStoreLockedError, KnowledgePackError, gone
from kp_core.packs.blobs import replace_file
from kp_core.pickling import Shared
from kp_core.threads import check_process

_FACTS, _SCHEMA = "facts", 1
_MARKER, _LOCK = "kp.json", "kp.lock"
_LOCKED_SECONDS = 4.0
_NUMBERS = itertools.count(1)
_OURS = "kp:"  # Prefix of our names in metadata of records and collections.
_BUNDLED = "all-MiniLM-L6-v2"
_HNSW = {"space": "cosine", "ef_search": 200}
_BANK, _BANKS = _OURS + "bank", _OURS + "banks"
_READS = ("count", "get", "query")
_GROWTH, _PAGE = 4, 1000
_NO_VECTOR = np.zeros(0, np.float32)
_LARGEST = 2**63
_FIELDS = ("title", "source", "version", "expires", "digest", "bank")


class ChromaFactStore(FactStore):
    """A `FactStore` in Chroma: one collection `kp-<namespace>-facts` per namespace, with texts as documents.

    Centroids of banks are in a second collection; the number of banks is metadata of the first, and is written last.

    `path` is a folder or the URL of a Chroma server; or pass a `client` (e.g. a `CloudClient`). A folder is for one
    process at a time, readable by its owner only; a server is for any number. `tenant`, `database` and `headers` go to
    the server; `timeout_s` limits each call. Once a call has returned, its changes are safe. Collections and folders
    that are not ours are refused, and never changed.

    Without an `embedder`, a folder uses the one it was made with, and a new one the bundled MiniLM. LangChain
    `Embeddings` and LlamaIndex embeddings work too. `read_only` locks and changes nothing; each call sees what other
    processes have changed. Use the store as a context manager, or `close` it.

    Raises `FactStoreLockedError` if another process keeps the folder open for more than `wait` seconds; `FactError` for
    a folder or collection that is not ours, another embedder (both are named), an unreachable server, or nothing to
    read; `MissingDependencyError` if Chroma is not installed.
    """

    path: Path | None = None
    """The folder; `None` for a server or client."""
    _client: Any = None
    _former: Any = None
    _version: tuple[int, int] | None = None
    _lock: FileLock | None = None
    _closed = False

    def __init__(  # noqa: PLR0913 - every setting has a default that works
        self,
        path: str | os.PathLike[str] | None = None,
        embedder: Embedder | Any | None = None,  # noqa: ANN401 - or another library's
        *,
        client: Any = None,  # noqa: ANN401 - a chromadb client
        bank_size: int | None = None,
        read_only: bool = False,
        wait: float = 0.0,
        timeout_s: float = 60.0,
        **server: Any,  # noqa: ANN401 - tenant, database, headers
    ) -> None:
        if (path is None) == (client is None):
            raise FactError(f"Got path={path!r} and client={client!r}; expected one of the two.")
        embedder = None if embedder is None else as_embedder(embedder)
        self.where, self.read_only = str(path or type(client).__name__), read_only
        self._opened, self._centroids = dict[str, Any](), dict[str, Any]()
        self._process = os.getpid()
        if client is None:
            _library()  # Without it, no folder is made.
        if path is not None and not is_url(path):
            self.path = Path(path)
            self._lock = _prepared(self.path, read_only=read_only, wait=wait)
        try:
            with _told(self.where):
                if self.path is not None and self._lock is None:
                    self._version = _version_of(self.path)
                self._client = client or open_client(path, shared=self._version is None, timeout_s=timeout_s, **server)
                collections = self._listed()
            marker = next(map(_about, collections.values()), {})
            name, self._is_sized = marker.get("embedder", _BUNDLED), bank_size is not None
            fallback = SentenceTransformerEmbedder(None if name == _BUNDLED else name)
            super().__init__(
                fallback if embedder is None else embedder,
                bank_size=marker.get("bank_size", BANK_SIZE) if bank_size is None else bank_size,
            )
            self._spaces(None)
            if self.path is not None:
                # Two stores on one folder see each other's changes, and write one at a time.
                self._writing = _WRITING.setdefault(str(self.path.resolve()), self._writing)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        # In a forked process, client and file lock are those of the other.
        if not self._closed and self._process == os.getpid():
            self._closed = True
            for client in (self._client, self._former) if self.path is not None else ():
                if client is not None:
                    client.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opens(self) -> Callable[[], Shared]:
        if self.path is None:
            return super()._opens()
        return partial(ChromaFactStore, str(self.path.absolute()), self.embedder, read_only=self.read_only)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r}, {self.embedder!r})"

    @property
    def nbytes(self) -> int:
        """Bytes of Chroma's files; 0 without a folder."""
        if self.path is None:
            return 0
        files = [self.path / "chroma.sqlite3", *self.path.glob("*-*-*-*-*/*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    @classmethod
    def from_collection(cls, *_: object, **_settings: object) -> NoReturn:
        """Raises `FactError`."""
        raise FactError(f"There is no `ChromaFactStore.from_collection`.{gone('from_collection')}")

    def vacuum(self) -> NoReturn:
        """Raises `FactError`."""
        raise FactError(f"There is no `ChromaFactStore.vacuum`.{gone('vacuum')}")

    def _listed(self) -> dict[str, Any]:
        """Return our fact collections, by namespace."""
        ours = ((_about(collection), collection) for collection in self._client.list_collections())
        facts = ((about.get("namespace"), collection) for about, collection in ours if about.get("kind") == _FACTS)
        return {str(name): collection for name, collection in facts if collection.name == f"kp-{name}-{_FACTS}"}

    def _spaces(self, namespace: str | None) -> list[str]:
        self._check_open()
        if namespace not in self._opened:
            # Another store, or another process on the server, may have added some.
            with _told(self.where):
                for name, collection in self._listed().items():
                    if name not in self._opened:
                        self._opened[name] = self._checked_collection(collection)
        return [space for space in sorted(self._opened) if namespace in (None, space)]

    def _collection(self, space: str) -> Any:  # noqa: ANN401
        if space not in self._opened and not self._spaces(space):
            marker = {"kind": _FACTS, "schema": _SCHEMA, "namespace": space, "embedder": self.embedder.name}
            marker["bank_size"] = self.bank_size
            collection = self._own_collection(f"kp-{space}-{_FACTS}", marker, _HNSW)
            self._opened[space] = self._checked_collection(collection)
        return self._opened[space]

    def _count(self, space: str) -> int:
        return int(self._call(self._collection(space), "count"))

    def _rows(
        self, space: str, *, ids: Sequence[str] | None = None, where: Filter | None = None, vectors: bool = False
    ) -> Iterator[Row]:
        test = _pushed_down(where)
        include = ["documents", "metadatas", *["embeddings"] * vectors]
        unique = None if ids is None else list(dict.fromkeys(ids))  # Chroma refuses repeated ids.
        for at in itertools.count(0, _PAGE) if unique is None else range(0, len(unique), _PAGE):
            page = {"limit": _PAGE, "offset": at, "where": test} if unique is None else {"ids": unique[at : at + _PAGE]}
            answer = self._call(self._collection(space), "get", include=include, **page)
            embeddings = answer["embeddings"] if vectors else [_NO_VECTOR] * len(answer["ids"])
            records = zip(answer["ids"], answer["documents"], answer["metadatas"], strict=True)
            for record, vector in zip(records, embeddings, strict=True):
                yield Row(_from_record(*record, space), np.asarray(vector, np.float32), record[2].get(_BANK))
            if unique is None and len(answer["ids"]) < _PAGE:
                return

    def _nearest(self, space: str, vector: Vectors, count: int, where: Filter | None = None) -> list[Hit]:
        test, limit, pushed = predicate(where), count, _pushed_down(where)
        arguments = {
            "query_embeddings": vector[None],
            "where": pushed,
            "include": ["documents", "metadatas", "distances"],
        }
        while True:
            answer = self._call(self._collection(space), "query", n_results=limit, **arguments)
            columns = (answer[name][0] for name in ("ids", "documents", "metadatas", "distances"))
            # What another process deletes meanwhile is in this index, and has no text any more.
            records = [record for record in zip(*columns, strict=True) if record[1] is not None]
            found = [Hit(_from_record(i, text, about, space), 1 - distance) for i, text, about, distance in records]
            hits = [hit for hit in found if alive(hit.fact) and test(hit.fact)]
            if len(hits) >= count:
                return hits[:count]
            if (reached := len(answer["ids"][0])) < limit:
                break
            limit *= _GROWTH
        # Once vectors were replaced or deleted, the index may not reach some: compare with every vector.
        matching = self._call(self._collection(space), "get", where=pushed, include=[])["ids"] if pushed else ()
        if reached >= (len(matching) if pushed else self._count(space)):
            return hits
        rows = [row for row in self._rows(space, vectors=True) if alive(row.fact) and test(row.fact)]
        if not rows:
            return []
        [near] = ranked(vector[None], normalised(np.stack([row.vector for row in rows])), count)
        return [Hit(rows[at].fact, cosine) for at, cosine in near]

    def _put(self, space: str, facts: Sequence[Fact], vectors: Vectors, banks: Sequence[int] | None = None) -> None:
        collection, ids = self._collection(space), [fact.id for fact in facts]
        stored = self._call(collection, "get", ids=ids, include=["metadatas"])
        # Chroma merges metadata, so removed fields must be set to `None`.
        cleared = {
            i: dict.fromkeys(metadata or {}) for i, metadata in zip(stored["ids"], stored["metadatas"], strict=True)
        }
        metadatas = [cleared.get(fact.id, {}) | _to_record(fact) for fact in facts]
        if banks is not None:
            metadatas = [record | {_BANK: number} for record, number in zip(metadatas, banks, strict=True)]
        texts = [fact.text for fact in facts]
        self._call(collection, "upsert", ids=ids, embeddings=vectors, documents=texts, metadatas=metadatas)

    def _set_expires(self, space: str, times: Mapping[str, float | None]) -> None:
        ids = list(times)
        for at in range(0, len(ids), _PAGE):
            page = ids[at : at + _PAGE]
            metadatas = [{_OURS + "expires": times[fact_id]} for fact_id in page]
            self._call(self._collection(space), "update", ids=page, metadatas=metadatas)

    def _remove(self, space: str, ids: Sequence[str]) -> None:
        for at in range(0, len(ids), _PAGE):
            self._call(self._collection(space), "delete", ids=list(ids[at : at + _PAGE]))

    def _bank_count(self, space: str) -> int | None:
        # Another process may have made banks since.
        count = self._metadata(space).get(_BANKS)
        return count if isinstance(count, int) and count > 0 else None

    def _nearest_banks(self, space: str, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        banks = self._bank_count(space)
        if banks is None:
            return [[] for _ in vectors]
        centroids, wanted = self._bank_collection(space), min(count, banks)
        arguments = {"query_embeddings": vectors, "n_results": wanted, "include": ["distances"]}
        answer = self._call(centroids, "query", **arguments)
        if all(len(ids) == wanted for ids in answer["ids"]):
            results = zip(answer["ids"], answer["distances"], strict=True)
            return [[(int(i), 1 - distance) for i, distance in zip(*columns, strict=True)] for columns in results]
        # Once vectors were replaced, Chroma's index may no longer reach all of them.
        stored = self._call(centroids, "get", include=["embeddings"])
        numbers, rows = [int(number) for number in stored["ids"]], np.asarray(stored["embeddings"], np.float32)
        near = ranked(vectors, normalised(rows), wanted)
        return [[(numbers[at], cosine) for at, cosine in ranking] for ranking in near]

    def _set_banks(self, space: str, numbers: Mapping[str, int], centroids: Vectors) -> None:
        self._count_banks(space, 0)
        if not len(centroids):
            return
        ids, banks = list(numbers), self._bank_collection(space)
        for at in range(0, len(ids), _PAGE):
            page = ids[at : at + _PAGE]
            metadatas = [{_BANK: numbers[fact_id]} for fact_id in page]
            self._call(self._collection(space), "update", ids=page, metadatas=metadatas)
        for at in range(0, len(centroids), _PAGE):
            rows = centroids[at : at + _PAGE]
            self._call(banks, "upsert", ids=[str(at + row) for row in range(len(rows))], embeddings=rows)
        stored = self._call(banks, "get", include=[])["ids"]
        if surplus := [number for number in stored if int(number) >= len(centroids)]:
            self._call(banks, "delete", ids=surplus)
        self._count_banks(space, len(centroids))

    def _count_banks(self, space: str, count: int) -> None:
        self._call(self._collection(space), "modify", metadata={**self._metadata(space), _BANKS: count})

    def _bank_collection(self, space: str) -> Any:  # noqa: ANN401
        if space not in self._centroids:
            marker = {"kind": "banks", "namespace": space}
            self._centroids[space] = self._own_collection(f"kp-{space}-banks", marker, {"space": "cosine"})
        return self._centroids[space]

    def _metadata(self, space: str) -> dict[str, Any]:
        collection = self._collection(space)
        with _told(self.where):
            current = self._client.get_collection(collection.name, embedding_function=None)
        return dict(current.metadata or {})

    def _call(self, collection: Any, name: str, **arguments: Any) -> Any:  # noqa: ANN401
        with _told(self.where):
            try:
                return getattr(collection, name)(**arguments)
            finally:
                if self.path is not None and name not in _READS:
                    # The clock of files is too coarse: two changes would have one time.
                    os.utime(self.path / _MARKER, ns=(time.time_ns(),) * 2)

    def _own_collection(self, name: str, about: Mapping[str, Any], hnsw: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Return our collection of this name; creates it, with `about` as its marker, if there is none.

        Raises `FactError` for a collection that is not ours.
        """
        with _told(self.where):
            existing = {collection.name: collection.metadata or {} for collection in self._client.list_collections()}
            if name not in existing:
                metadata = {_OURS + key: value for key, value in about.items()}
                settings = {"metadata": metadata, "configuration": {"hnsw": hnsw}, "embedding_function": None}
                return self._client.get_or_create_collection(name, **settings)
            if _OURS + "kind" not in existing[name]:
                raise FactError(
                    f"{self.where}: the collection {name!r} is not ours (it lacks our marker), and stays as it is. Use "
                    "another namespace or database."
                )
            return self._client.get_collection(name, embedding_function=None)

    def _checked_collection(self, collection: Any) -> Any:  # noqa: ANN401
        marker = _about(collection)
        if marker["schema"] != _SCHEMA:
            raise FactError(
                f"{self.where}: {collection.name} has schema {marker['schema']}; this release knows {_SCHEMA}."
            )
        if marker["embedder"] != self.embedder.name:
            sample = collection.get(limit=1, include=["embeddings"])["embeddings"]
            dimensions = f"{len(sample[0])} dimensions" if len(sample) else "no vectors yet"
            got = len(self.embedder.embed_query("a"))
            raise FactError(
                f"{self.where} was built with the embedder {marker['embedder']!r} ({dimensions}), got "
                f"{self.embedder.name!r} ({got} dimensions); their vectors cannot be compared. "
                "Open it with the former, or build another store."
            )
        unembedded = self._client.get_collection(collection.name, embedding_function=None)
        if self._is_sized and not self.read_only and marker.get("bank_size") != self.bank_size:
            unembedded.modify(metadata={**unembedded.metadata, "kp:bank_size": self.bank_size})
        return unembedded

    def forked(self) -> None:
        """See `FactStore.forked`; the lock of a folder is that of all its stores."""
        super().forked()
        _WRITING.clear()

    def _check_open(self) -> None:
        check_process(self._process, f"The Chroma database {self.where}", FactError)
        if self._closed:
            raise FactError(f"{self.where} was closed. Open it again with `ChromaFactStore(path)`.")
        if self.path is not None:
            _check_unlocked(self.path, writing=False)
            if self._version is not None and self._version != _version_of(self.path):
                self._reopen(self.path)

    def _reopen(self, path: Path) -> None:
        """Read the folder anew: Chroma never reads again what another process has changed."""
        with self._writing, _told(self.where):
            version = _version_of(path)
            if version == self._version:
                return
            former, self._former = self._former, self._client
            self._client, self._version = open_client(path, shared=False), version
            collections = {name: self._checked_collection(item) for name, item in self._listed().items()}
            self._opened, self._centroids = collections, {}
            if former is not None:  # The last client remains open for calls of other threads.
                former.close()

    def _check_writes(self) -> None:
        self._check_open()
        if self.read_only:
            raise FactError(f"{self.where} was opened with read_only=True. Open it without to change it.")
        if self.path is not None:
            _check_unlocked(self.path, writing=True)


_WRITING: dict[str, threading.RLock] = {}


def _library() -> Any:  # noqa: ANN401 - the module
    with needing("ChromaFactStore needs chromadb", "chroma"):
        import chromadb.config
    return chromadb


def open_client(
    path: str | os.PathLike[str] | None,
    *,
    shared: bool = True,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
    **server: Any,  # noqa: ANN401 - tenant, database
) -> Any:  # noqa: ANN401 - the library's own types are unions of unions
    """Open a client of a folder or a server; without `shared`, one that reads the folder's files anew."""
    chromadb = _library()
    settings = chromadb.config.Settings(anonymized_telemetry=False)
    if path is None or not is_url(path):
        _check_unlocked(Path(path or "."), writing=True)
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


def _version_of(path: Path) -> tuple[int, int]:
    """Return what changes when a store has changed the database in this folder, or another folder took its place."""
    with suppress(FileNotFoundError):  # It is being replaced.
        stat = (path / _MARKER).stat()
        return stat.st_ino, stat.st_mtime_ns
    return 0, 0


def is_fact_store(path: Path) -> bool:
    """Whether this folder holds a `ChromaFactStore`."""
    return (path / _MARKER).is_file()


def _prepared(path: Path, *, read_only: bool, wait: float) -> FileLock | None:
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
        replace_file(path / _MARKER, [json.dumps({"kind": _FACTS, "schema": _SCHEMA}).encode()])
        with suppress(OSError):  # The folder may have existed with wider rights, which Chroma's files inherit.
            path.chmod(0o700)
    if read_only:
        return None
    lock = FileLock(path / _LOCK, thread_local=False, is_singleton=True, mode=0o600)
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise FactStoreLockedError(
            f"{path} is open for writing in another process. Wait for it (`--wait SECONDS` in the shell, "
            "`wait=seconds` in Python), read with `read_only=True`, or let both use a server (`chroma run`)."
        ) from error
    return lock


def _check_unlocked(path: Path, *, writing: bool) -> None:
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


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Turn every error of Chroma into a `FactError` that names the database."""
    try:
        yield
    except KnowledgePackError:
        raise
    except Exception as error:
        # Depending on the cause: Chroma's own errors, SQLite's through Rust, the HTTP client's, ValueError.
        raise FactError(
            f"{where}: Chroma failed ({type(error).__name__}: {error}). What was acknowledged before is kept; look at "
            "the disk, or at the server, and try again."
        ) from error


def _about(collection: Any) -> dict[str, Any]:  # noqa: ANN401
    items = (collection.metadata or {}).items()
    return {key.removeprefix("kp:"): value for key, value in items if key.startswith("kp:")}


def _to_record(fact: Fact) -> dict[str, Any]:
    """Return the metadata of a fact's record: the user's, and ours; what Chroma cannot store is JSON in `kp:more`."""
    more = {name: value for name, value in fact.metadata.items() if not _holds(name, value)}
    fields = {
        "title": fact.title or None,
        "source": fact.source or None,
        "expires": fact.expires,
        "version": fact.version,
        "digest": fact.digest,
        "more": json.dumps(more, ensure_ascii=False, default=dict) if more else None,
        "has_more": bool(more) or None,
    }
    plain = {name: value for name, value in fact.metadata.items() if name not in more}
    return plain | {_OURS + name: value for name, value in fields.items() if value is not None}


def _from_record(fact_id: str, text: str, metadata: Mapping[str, Any] | None, namespace: str) -> Fact:
    extra = dict(metadata or {})
    own_fields = {name.removeprefix(_OURS): extra.pop(name) for name in list(extra) if name.startswith(_OURS)}
    more = json.loads(own_fields.get("more", "{}"))
    arguments = {name: own_fields[name] for name in ("title", "source", "expires", "version") if name in own_fields}
    return Fact(text, metadata=extra | more, id=fact_id, namespace=namespace, **arguments)


def _pushed_down(where: Filter | None) -> dict[str, Any] | None:
    """Return the part of a filter that Chroma can check; every match of `where` passes it. `None` if there is none."""
    tests = (_pushed(name, wanted) for name, wanted in (where or {}).items())
    return _together("$and", [test for test in tests if test])


def _pushed(name: str, wanted: Any) -> dict[str, Any] | None:  # noqa: ANN401 - as `predicate` allows
    if name in {"$and", "$or"}:
        pushed = [_pushed_down(inner) for inner in wanted]
        expressible = [entry for entry in pushed if entry is not None]
        return None if name == "$or" and len(expressible) < len(pushed) else _together(name, expressible)
    if name.startswith("$") or name.removeprefix(_OURS) in {"id", "namespace"}:
        return None
    supported: list[dict[str, Any]] = []
    for how, value in (wanted if isinstance(wanted, Mapping) else {"$eq": wanted}).items():
        values = list(value) if how == "$in" else [value]
        # Records do not store an empty title or source.
        if how in {"$eq", "$in", *ORDERED} and _is_uniform(values) and "" not in values:
            supported.append({how: values if how == "$in" else value})
    bare = name.removeprefix(_OURS)  # Our records store the fact's own fields under `kp:` names.
    names = [name, _OURS + name] if name in _FIELDS else [name]
    tests = [test for key in names if (test := _together("$and", [{key: each} for each in supported]))]
    if tests and (name == bare or bare not in _FIELDS):
        # The predicate checks values stored as JSON.
        tests.append({_OURS + "has_more": True})
    return _together("$or", tests)


def _together(how: str, tests: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {how: tests} if len(tests) > 1 else tests[0] if tests else None


def _scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)  # Servers are asked in JSON, which has no other floats.
    return isinstance(value, str | bool) or (isinstance(value, int) and -_LARGEST <= value < _LARGEST)


def _holds(name: str, value: object) -> bool:
    # Chroma does not accept names that begin with `$` or `#`.
    if not name or name.startswith((_OURS, "chroma:", "$", "#")):
        return False
    return _scalar(value) or _is_uniform(value)


def _is_uniform(value: object) -> bool:
    return isinstance(value, list) and len({type(item) for item in value}) == 1 and all(map(_scalar, value))
