"""Facts in Chroma: in a folder, on a server, or wherever a client leads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Self

from kp_core.errors import FactError
from kp_core.facts.banking import BANK_SIZE
from kp_core.facts.client import check_unlocked, is_url, open_client, run_vacuum
from kp_core.facts.collection import CollectionFacts
from kp_core.facts.embed import Embedder, SentenceTransformerEmbedder, as_embedder
from kp_core.facts.folder import FACTS, SCHEMA, check_index, prepared
from kp_core.facts.index import blank_room, end_repair, needs_repair
from kp_core.facts.living import LivingFacts
from kp_core.facts.records import ChromaTable, bank_name, own_collection, told
from kp_core.facts.table import Table

__all__ = ["ChromaFactStore"]

_BUNDLED = "all-MiniLM-L6-v2"
_HNSW = {"space": "cosine", "ef_search": 200}


class ChromaFactStore(LivingFacts):
    """A `FactStore` in Chroma: text as document, metadata as metadata, a collection `kp-<namespace>-facts` each.

    `path` is a folder, for one process at a time and readable by its owner alone, or the URL of a Chroma server, for
    any number; or hand in a `client` (e.g. a `CloudClient`). `tenant`, `database`, `headers` go to the server;
    `timeout_s` is how long it may take for a call. What a call has returned for is kept, whatever happens to the
    process. Collections and folders that we did not make are never changed; to read them, see `from_collection`.

    Without an `embedder` a folder is opened with the one it was made with, a new one with the bundled MiniLM;
    LangChain `Embeddings` and LlamaIndex embeddings are embedders too. `bank_size` is kept with the collections; for
    it and `near_duplicate` see `LivingFacts`. The same folder may be opened again in one process. With `read_only`
    nothing is locked or changed, and what another process writes is seen when the folder is opened again. Use it as a
    context manager, or `close` it.

    Raises `FactStoreLockedError` when another process does not let go of the folder within `wait` seconds; `FactError`
    for a folder or collection that is not ours, another embedder (both are named), a server that is away, or nothing to
    read; `MissingDependencyError` where Chroma is not installed.
    """

    def __init__(  # noqa: PLR0913 - every setting has a default that works
        self,
        path: str | os.PathLike[str] | None = None,
        embedder: Embedder | Any | None = None,  # noqa: ANN401 - or another library's
        *,
        client: Any = None,  # noqa: ANN401 - a chromadb client
        bank_size: int | None = None,
        near_duplicate: float | None = 0.97,
        read_only: bool = False,
        wait: float = 0.0,
        timeout_s: float = 60.0,
        **server: Any,  # noqa: ANN401 - tenant, database, headers
    ) -> None:
        if (path is None) == (client is None):
            raise FactError(f"Got path={path!r} and client={client!r}; expected one of the two.")
        self.path = None if path is None or is_url(path) else Path(path)
        self.where = str(path or type(client).__name__)
        self.read_only, self._lock, self._closed = read_only, None, False
        if self.path is not None:
            self._lock = prepared(self.path, read_only=read_only, wait=wait)
        try:
            if self.path is not None:
                check_index(self.path, self._lock)
            with told(self.where):
                self._client = client or open_client(path, timeout_s=timeout_s, **server)
                held = self._listed()
            made = next(map(_about, held.values()), {})
            name, self._is_sized = made.get("embedder", _BUNDLED), bank_size is not None
            own = SentenceTransformerEmbedder(None if name == _BUNDLED else name)
            super().__init__(
                own if embedder is None else as_embedder(embedder),
                bank_size=made.get("bank_size", BANK_SIZE) if bank_size is None else bank_size,
                near_duplicate=near_duplicate,
            )
            self._opened = {name: self._table(name, each) for name, each in held.items()}
            if self.path is not None:
                # Two objects on one folder see each other's changes, and change it one at a time.
                self._writing = _WRITING.setdefault(str(self.path.resolve()), self._writing)
                if self._lock is not None:
                    self._mend(self.path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_collection(
        cls,
        collection: Any = None,  # noqa: ANN401 - a chromadb collection, or its name
        embedder: Embedder | Any | None = None,  # noqa: ANN401
        *,
        path: str | os.PathLike[str] | None = None,
        client: Any = None,  # noqa: ANN401
        namespace: str = "default",
        **server: Any,  # noqa: ANN401
    ) -> CollectionFacts:
        """The facts of any Chroma collection, read as it is: a collection, or its name in a folder, server or client.

        The name may be left out where there is but one.

        Without an `embedder` the collection's own embedding function is used, else the bundled MiniLM where its vectors
        are those of the collection; see `CollectionFacts`. Raises `FactError` where there is no such collection, naming
        those that there are, and for an embedder whose vectors are others.
        """
        where = str(path or "Chroma")
        if collection is None or isinstance(collection, str):
            if (path is None) == (client is None):
                raise FactError(f"Got the name {collection!r}; expected `path` or `client` to find it in.")
            if path is not None and not is_url(path) and not (Path(path) / "chroma.sqlite3").is_file():
                raise FactError(f"There is no Chroma database in {path}.")
            with told(where):
                client = client or open_client(path, migrations="validate", **server)
                names = [each.name for each in client.list_collections()]
                if collection is None and len(names) == 1:
                    [collection] = names
                if collection not in names:
                    which = (
                        "Name a collection of" if collection is None else f"There is no collection {collection!r} in"
                    )
                    raise FactError(f"{which} {where}; there are {names}.")
                collection = client.get_collection(collection)
        return CollectionFacts(collection, None if embedder is None else as_embedder(embedder), namespace, where)

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        if not self._closed:
            self._closed, client = True, getattr(self, "_client", None)
            if client is not None and self.path is not None:
                client.close()
            if self._lock is not None:
                if self.path is not None and self._lock.lock_counter == 1:
                    blank_room(self.path)
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r}, {self.embedder!r})"

    @property
    def nbytes(self) -> int:
        """Bytes of Chroma's files; 0 for what is not in a folder."""
        if self.path is None:
            return 0
        files = [self.path / "chroma.sqlite3", *self.path.glob("*-*-*-*-*/*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    def vacuum(self) -> None:
        """Take what was removed off the disk: until then Chroma keeps it in free pages and in its log of changes.

        For a folder that nothing else in this process has open; elsewhere that is the server's work.
        """
        self._check_writes()
        if self.path is None:
            raise FactError(f"{self.where} is no folder; vacuum it where it runs, with `chroma vacuum --path FOLDER`.")
        with self._writing, told(self.where):
            for own in self._own_collections():
                if own.count() and not _is_replaced(own):
                    own.modify(configuration={"hnsw": {"sync_threshold": 2, "batch_size": 2}})
                else:
                    self._client.delete_collection(own.name)
            self._client.close()
            try:
                run_vacuum(self.path)
            finally:
                self._client = open_client(self.path)
                self._opened = {name: self._table(name, each) for name, each in self._listed().items()}
                for own in self._own_collections():
                    own.modify(configuration={"hnsw": {"sync_threshold": 1000, "batch_size": 100}})

    def _mend(self, path: Path) -> None:
        """Put right what a process left that was killed: indexes that it was writing."""
        with self._writing, told(self.where):
            if needs_repair(path):
                for table in self._tables(None):
                    self._renew(table)
                end_repair(path)

    def _listed(self) -> dict[str, Any]:
        """The collections of facts that carry our marker, by namespace."""
        return {name: each for each in self._client.list_collections() if (name := _namespace_of(each))}

    def _own_collections(self) -> list[Any]:
        """The collections that carry our marker; others in the same database are somebody else's."""
        ours = [each.name for each in self._client.list_collections() if "kind" in _about(each)]
        return [self._client.get_collection(name, embedding_function=None) for name in ours]

    def namespaces(self) -> tuple[str, ...]:
        """See `FactStore.namespaces`; those that others have made on the server, too."""
        self._check_open()
        with told(self.where):
            for name in self._listed():
                self._tables(name)
        return super().namespaces()

    def _tables(self, namespace: str | None) -> list[Table]:
        self._check_open()
        if namespace is not None and namespace not in self._opened:
            # Another object, or another process on the server, may have made it.
            with told(self.where):
                if (held := self._listed().get(namespace)) is not None:
                    self._opened[namespace] = self._table(namespace, held)
        return super()._tables(namespace)

    def _open(self, namespace: str) -> Table:
        if found := self._tables(namespace):
            return found[0]
        name = f"kp-{namespace}-{FACTS}"
        about = {"kind": FACTS, "schema": SCHEMA, "namespace": namespace, "embedder": self.embedder.name}
        about["bank_size"] = self.bank_size
        made = own_collection(self._client, self.where, name, about, _HNSW)
        return self._table(namespace, made)

    def _table(self, namespace: str, collection: Any) -> ChromaTable:  # noqa: ANN401
        about = _about(collection)
        if about["schema"] != SCHEMA:
            raise FactError(
                f"{self.where}: {collection.name} has schema {about['schema']}; this release knows {SCHEMA}."
            )
        if about["embedder"] != self.embedder.name:
            one = collection.get(limit=1, include=["embeddings"])["embeddings"]
            held = f"{len(one[0])} dimensions" if len(one) else "no vectors yet"
            raise FactError(
                f"{self.where} was built with the embedder {about['embedder']!r} ({held}), got {self.embedder.name!r} "
                f"({self.embedder.dimensions} dimensions); their vectors cannot be compared. Open it with the former, "
                "or build another store."
            )
        own = self._client.get_collection(collection.name, embedding_function=None)
        if self._is_sized and not self.read_only and about.get("bank_size") != self.bank_size:
            own.modify(metadata={**own.metadata, "kp:bank_size": self.bank_size})
        return ChromaTable(self._client, own, namespace, self.where)

    def _check_open(self) -> None:
        if self._closed:
            raise FactError(f"{self.where} was closed. Open it again with `ChromaFactStore(path)`.")
        if self.path is not None:
            check_unlocked(self.path, writing=False)

    def _check_writes(self) -> None:
        self._check_open()
        if self.read_only:
            raise FactError(f"{self.where} was opened with read_only=True. Open it without to change it.")
        if self.path is not None:
            check_unlocked(self.path, writing=True)


_WRITING: dict[str, threading.RLock] = {}


def _about(collection: Any) -> dict[str, Any]:  # noqa: ANN401
    held = (collection.metadata or {}).items()
    return {key.removeprefix("kp:"): value for key, value in held if key.startswith("kp:")}


def _namespace_of(collection: Any) -> str | None:  # noqa: ANN401
    about = _about(collection)
    ours = about.get("kind") == FACTS and collection.name == f"kp-{about.get('namespace')}-{FACTS}"
    return str(about["namespace"]) if ours else None


def _is_replaced(collection: Any) -> bool:  # noqa: ANN401
    """Whether it holds banks of an earlier release, which kept other things of them."""
    about = _about(collection)
    return bool(about["kind"] == "banks" and collection.name != bank_name(str(about.get("namespace"))))
