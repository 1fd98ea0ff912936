"""Facts as Chroma's records, and tables of them; works on collections that it is given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kp_core.errors import FactError, KnowledgePackError
from kp_core.facts.banking import Vectors
from kp_core.facts.base import Fact, Filter, Hit, content_id
from kp_core.facts.filters import predicate
from kp_core.facts.table import Row, alive

__all__ = [
    "ChromaTable",
    "QueriedCollection",
    "bank_name",
    "from_record",
    "own_collection",
    "pushed_down",
    "to_record",
    "told",
]

_OURS = "kp:"
_GROWTH, _PAGE = 4, 1000
_LARGEST = 2**63
_COMPARED = ("$eq", "$gt", "$gte", "$lt", "$lte")
_BANK = _OURS + "bank"
_BANKS = _OURS + "banks"
_BASIC = ("documents", "metadatas")
_NO_VECTOR = np.zeros(0, np.float32)


def to_record(fact: Fact) -> dict[str, Any]:
    """The metadata of a fact's record: the user's own as they are, ours under names that begin with `kp:`.

    What Chroma cannot hold, such as `None`, nested lists or large integers, stands as JSON in `kp:more`.
    """
    more = {name: value for name, value in fact.metadata.items() if not _holds(name, value)}
    ours = {
        "title": fact.title or None,
        "source": fact.source or None,
        "expires": fact.expires,
        "version": fact.version,
        "digest": fact.digest,
        "more": json.dumps(more, ensure_ascii=False, default=dict) if more else None,
        "has_more": bool(more) or None,
    }
    own = {name: value for name, value in fact.metadata.items() if name not in more}
    return own | {_OURS + name: value for name, value in ours.items() if value is not None}


def from_record(fact_id: str, text: str, metadata: Mapping[str, Any] | None, namespace: str) -> Fact:
    """The fact in a record."""
    held = dict(metadata or {})
    ours = {name.removeprefix(_OURS): held.pop(name) for name in list(held) if name.startswith(_OURS)}
    more = json.loads(ours.get("more", "{}"))
    kept = {name: ours[name] for name in ("title", "source", "expires", "version") if name in ours}
    return Fact(text, metadata=held | more, id=fact_id, namespace=namespace, **kept)


def pushed_down(where: Filter | None) -> dict[str, Any] | None:
    """What Chroma can check of a filter: all that match `where` match this too; `None` where it can check nothing."""
    return _together("$and", [part for name, wanted in (where or {}).items() if (part := _pushed(name, wanted))])


def _pushed(name: str, wanted: object) -> dict[str, Any] | None:
    if name in {"$and", "$or"} and isinstance(wanted, Sequence):
        parts = [pushed_down(part) for part in wanted]
        known = [part for part in parts if part is not None]
        return None if name == "$or" and len(known) < len(parts) else _together(name, known)
    if name.startswith("$") or name.removeprefix(_OURS) in {"id", "namespace"}:
        return None
    conditions = wanted if isinstance(wanted, Mapping) else {"$eq": wanted}
    plain = {how: list(v) if isinstance(v, tuple | set | frozenset) else v for how, v in conditions.items()}
    kept = [(how, value) for how, value in plain.items() if _understood(how, value)]
    # The fact's own fields stand under our names, or, in a collection of others, under the plain ones.
    own = name.removeprefix(_OURS)
    names = [own, _OURS + own] if own in {"title", "source", "version"} else [name]
    found = [_together("$and", [{each: {how: value}} for how, value in kept]) for each in names]
    # What stands as JSON is left to the predicate.
    return {"$or": [*found, {_OURS + "has_more": True}]} if kept else None


def _together(how: str, tests: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Several tests as one; `None` of none."""
    return {how: tests} if len(tests) > 1 else tests[0] if tests else None


def _understood(how: str, value: object) -> bool:
    # An empty title or source does not stand in a record.
    if "" in (value if isinstance(value, list) else [value]):
        return False
    # Chroma orders numbers alone.
    compares = how in _COMPARED and _scalar(value) and (how == "$eq" or not isinstance(value, str | bool))
    return compares or (how == "$in" and _is_uniform(value))


def _scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)  # JSON, in which servers are asked, has no others.
    return isinstance(value, str | bool) or (isinstance(value, int) and -_LARGEST <= value < _LARGEST)


def _holds(name: str, value: object) -> bool:
    # Names that begin with `$` or `#` are no names to Chroma.
    if not name or name.startswith((_OURS, "chroma:", "$", "#")):
        return False
    return _scalar(value) or _is_uniform(value)


def _is_uniform(value: object) -> bool:
    """Whether it is a list of scalars of one type."""
    return isinstance(value, list) and len({type(each) for each in value}) == 1 and all(map(_scalar, value))


@contextmanager
def told(where: str) -> Iterator[None]:
    """Turn whatever Chroma raises into `FactError`, which names the database."""
    try:
        yield
    except KnowledgePackError:
        raise
    except Exception as error:
        # Chroma's own errors, SQLite's through Rust, the HTTP client's, ValueError: it depends on what is wrong.
        raise FactError(
            f"{where}: Chroma failed ({type(error).__name__}: {error}). What was acknowledged before is kept; look at "
            "the disk, or at the server, and try again."
        ) from error


class QueriedCollection:
    """What reading a collection takes, ours or not: records as facts of `namespace`; `fact` makes them."""

    def __init__(
        self,
        collection: Any,  # noqa: ANN401 - a chromadb.Collection
        namespace: str,
        where: str,
        fact: Callable[[str, str, Mapping[str, Any] | None, str], Fact] = from_record,
        space: str = "cosine",
    ) -> None:
        self.collection, self.namespace, self.where = collection, namespace, where
        self._fact, self._space = fact, space

    def call(self, name: str, **arguments: Any) -> Any:  # noqa: ANN401
        """A method of the collection; raises `FactError` where that fails."""
        with told(self.where):
            return getattr(self.collection, name)(**arguments)

    def __len__(self) -> int:
        return int(self.call("count"))

    def ids(self) -> list[str]:
        return list(self.call("get", include=[])["ids"])

    def rows(self, ids: Sequence[str], *, vectors: bool = False) -> list[Row]:
        ids = list(dict.fromkeys(ids))  # Chroma refuses an id that is named twice.
        found = [self._get(vectors, ids=list(ids[at : at + _PAGE])) for at in range(0, len(ids), _PAGE)]
        return [row for page in found for row in page]

    def page(self, start: int, count: int, *, vectors: bool = False, where: Filter | None = None) -> list[Row]:
        return self._get(vectors, limit=count, offset=start, **_narrowed(where))

    def expired(self, now: float) -> list[str]:
        return list(self.call("get", where={_OURS + "expires": {"$lte": now}}, include=[])["ids"])

    def nearest(self, vectors: Vectors, count: int, where: Filter | None = None) -> list[list[Hit]]:
        test, asked = predicate(where or {}), count
        while True:
            which = {"query_embeddings": vectors, "n_results": asked, **_narrowed(where)}
            found = self.call("query", include=[*_BASIC, "distances"], **which)
            parts = zip(found["ids"], found["documents"], found["metadatas"], found["distances"], strict=True)
            hits = [[hit for hit in self._hits(*part) if alive(hit.fact) and test(hit.fact)] for part in parts]
            if all(len(each) >= count for each in hits) or all(len(ids) < asked for ids in found["ids"]):
                return [each[:count] for each in hits]
            asked *= _GROWTH

    def _get(self, vectors: bool, **which: Any) -> list[Row]:  # noqa: ANN401, FBT001
        found = self.call("get", include=[*_BASIC, *["embeddings"] * vectors], **which)
        held = found["embeddings"] if vectors else [_NO_VECTOR] * len(found["ids"])
        parts = zip(found["ids"], found["documents"], found["metadatas"], held, strict=True)
        return [
            Row(self._fact(fact_id, text, about, self.namespace), np.asarray(row, np.float32), (about or {}).get(_BANK))
            for fact_id, text, about, row in parts
            if text and text.strip()
        ]

    def _hits(self, ids: list[str], texts: list[str], about: list[Any], distances: list[float]) -> Iterator[Hit]:
        scale = 2 if self._space == "l2" else 1  # Of vectors of length 1, half the squared distance is 1 - cosine.
        for fact_id, text, metadata, distance in zip(ids, texts, about, distances, strict=True):
            if text and text.strip():
                yield Hit(self._fact(fact_id, text, metadata, self.namespace), 1 - distance / scale)


class ChromaTable(QueriedCollection):
    """A `Table` in a collection of ours. The number of a fact's bank is metadata; centroids are a second collection.

    How many banks there are is metadata of the collection of facts, written last.
    """

    def __init__(self, client: Any, collection: Any, namespace: str, where: str) -> None:  # noqa: ANN401
        super().__init__(collection, namespace, where)
        self._client = client
        self._centroids: QueriedCollection | None = None

    def holding(self, texts: Sequence[str]) -> dict[str, str]:
        digests = list({content_id(text) for text in texts})
        if not digests:
            return {}
        found = self.call("get", where={_OURS + "digest": {"$in": digests}}, include=["documents"])
        held = dict(zip(found["documents"], found["ids"], strict=True))
        return {text: held[text] for text in texts if text in held}

    def put(self, facts: Sequence[Fact], vectors: Vectors, banks: Sequence[int] | None = None) -> None:
        ids = [fact.id for fact in facts]
        held = self.call("get", ids=ids, include=["metadatas"])
        # Chroma merges metadata; a field that is gone has to be said.
        old = {i: dict.fromkeys(about or {}) for i, about in zip(held["ids"], held["metadatas"], strict=True)}
        about = [old.get(fact.id, {}) | to_record(fact) for fact in facts]
        if banks is not None:
            about = [record | {_BANK: number} for record, number in zip(about, banks, strict=True)]
        self.call("upsert", ids=ids, embeddings=vectors, documents=[fact.text for fact in facts], metadatas=about)

    def remove(self, ids: Sequence[str]) -> None:
        for at in range(0, len(ids), _PAGE):
            self.call("delete", ids=list(ids[at : at + _PAGE]))

    def bank_count(self) -> int | None:
        # Another process may have made some since.
        count = self._metadata().get(_BANKS)
        return count if isinstance(count, int) and count > 0 else None

    def bank(self, number: int, *, vectors: bool = False) -> list[Row]:
        return self._get(vectors, where={_BANK: number})

    def nearest_banks(self, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        banks = self.bank_count()
        if banks is None:
            return [[] for _ in vectors]
        asked = {"query_embeddings": vectors, "n_results": min(count, banks), "include": ["distances"]}
        found = self._bank_collection().call("query", **asked)
        parts = zip(found["ids"], found["distances"], strict=True)
        return [[(int(i), 1 - distance) for i, distance in zip(*part, strict=True)] for part in parts]

    def set_banks(self, numbers: Mapping[str, int], centroids: Vectors) -> None:
        self.drop_banks()
        ids, banks = list(numbers), self._bank_collection()
        for at in range(0, len(ids), _PAGE):
            page = ids[at : at + _PAGE]
            self.call("update", ids=page, metadatas=[{_BANK: numbers[fact_id]} for fact_id in page])
        for at in range(0, len(centroids), _PAGE):
            rows = centroids[at : at + _PAGE]
            banks.call("upsert", ids=[str(at + row) for row in range(len(rows))], embeddings=rows)
        if others := [number for number in banks.ids() if int(number) >= len(centroids)]:
            banks.call("delete", ids=others)
        self._count_banks(len(centroids))

    def drop_banks(self) -> None:
        self._count_banks(0)

    def _count_banks(self, count: int) -> None:
        with told(self.where):
            self.collection.modify(metadata={**self._metadata(), _BANKS: count})

    def _bank_collection(self) -> QueriedCollection:
        if self._centroids is None:
            name, about = bank_name(self.namespace), {"kind": "banks", "namespace": self.namespace}
            made = own_collection(self._client, self.where, name, about, {"space": "cosine"})
            self._centroids = QueriedCollection(made, self.namespace, self.where)
        return self._centroids

    def _metadata(self) -> dict[str, Any]:
        with told(self.where):
            return dict(self._client.get_collection(self.collection.name, embedding_function=None).metadata or {})


def bank_name(namespace: str) -> str:
    """The name of the collection of a namespace's centroids."""
    return f"kp-{namespace}-banks"


def own_collection(client: Any, where: str, name: str, about: Mapping[str, Any], hnsw: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The collection of ours of this name, made with `about` as its marker where there is none.

    Raises `FactError` for a collection that is not ours.
    """
    with told(where):
        held = {each.name: each.metadata or {} for each in client.list_collections()}
        if name not in held:
            metadata = {_OURS + key: value for key, value in about.items()}
            made = {"metadata": metadata, "configuration": {"hnsw": hnsw}, "embedding_function": None}
            return client.get_or_create_collection(name, **made)
        if _OURS + "kind" not in held[name]:
            raise FactError(
                f"{where}: the collection {name!r} is not ours (it lacks our marker), and stays as it is. Use another "
                "namespace or database, or read it with `ChromaFactStore.from_collection`."
            )
        return client.get_collection(name, embedding_function=None)


def _narrowed(where: Filter | None) -> dict[str, Any]:
    kept = pushed_down(where)
    return {} if kept is None else {"where": kept}
