"""`KnowledgePackStore`: a fact store as LangGraph's long-term memory. Its items come back as handles."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias, cast
from urllib.parse import quote

from langgraph.store.base import (
    BaseStore,
    GetOp,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    get_text_at_path,
    validate_op_namespace,
)
from langgraph.store.memory import InMemoryStore

from kp_core import Embedder, Fact, FactStore, Hit, Packs, Session
from kp_core.banks import Filter
from kp_core.banks.compiling import open_facts
from kp_core.banks.delivery import KV, Delivery, Found
from kp_core.errors import FactError
from kp_core.packs.codec import Compression
from kp_core.packs.store import open_packs
from kp_core.plan.request import CompiledFor

_PREFIX, _LONGEST = "lg-", 64
_ABOUT, _UNSEARCHED = "langgraph", "unsearched"
_GROWTH = 4  # As in `kp_core.banks.delivery`.
_FOREVER = 1e12  # Minutes.

Labels: TypeAlias = tuple[str, ...]


def namespace_of(labels: Labels) -> str:
    """The namespace of packs for LangGraph's namespace `labels`, for a model's `namespaces`; no two share one.

    A label keeps its letters a-z and digits; each other byte of its UTF-8 becomes `_` and two hexadecimal digits.
    Labels are joined by `-`. A name that would be too long becomes `_h` and a digest of 256 bits.
    """
    encoded = (re.sub(rb"[^a-z0-9]", lambda byte: b"_%02x" % byte[0][0], _utf8(label)) for label in labels)
    name = b"-".join(encoded).decode()
    if len(name) > _LONGEST - len(_PREFIX):
        digest = hashlib.blake2b(name.encode(), digest_size=32).digest()
        name = "_h" + base64.b32encode(digest).decode().rstrip("=").lower()
    return _PREFIX + name


class PackItem(SearchItem):
    """An item, the `handle` of its text's pack (`None` for a short text), and the `content` for a model: either one."""

    __slots__ = ("content", "handle")

    def __init__(self, fact: Fact, found: Found, score: float | None = None) -> None:
        item = _about(fact)
        times = {"created_at": item["created"], "updated_at": item["updated"]}
        super().__init__(tuple(item["namespace"]), item["key"], item["value"], **times, score=score)
        self.handle = None if found.handle is None else str(found.handle)
        self.content = found.content

    def dict(self) -> dict[str, Any]:
        """As `SearchItem.dict`, with the handle."""
        return {**super().dict(), "handle": self.handle}


class KnowledgePackStore(BaseStore):
    """A LangGraph store over a fact store: each item is a fact, compiled into a pack of `store` when it is put.

    Items come back as `PackItem`, with the handle of their pack. The text of an item, which is searched and compiled,
    is that of its `fields` (paths as in LangGraph's `IndexConfig`), or of `index=[...]` of its put, one per line.
    Without `fields`, it is the value's only field if that is a string, else the whole value as JSON. With `index=False`
    a search by meaning returns the item last, without a score.

    `facts` is by default in Chroma at `path`, or in memory, with `embedder` (by default the bundled MiniLM). Each
    namespace of LangGraph is one of ours (`namespace_of`). `ttl` is LangGraph's: expired items are never returned, and
    `sweep_ttl` deletes them and their packs.

    In a filter, values that cannot be ordered do not match. Raises `FactError` for a value that JSON cannot express or
    a ttl of 0 minutes or less, `PackError` for a text longer than half of the model's positions.
    """

    supports_ttl = True

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        engine: Session,
        store: Packs,
        facts: FactStore | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        embedder: Embedder | Any | None = None,
        fields: Sequence[str] | None = None,
        kv: KV = "stored",
        compiled_for: CompiledFor = "system",
        compress: Compression = "none",
        ttl: TTLConfig | None = None,
    ) -> None:
        self._facts, self._packs = open_facts(facts, embedder, path), open_packs(store)
        self.fields, self.engine, self.ttl_config = None if fields is None else list(fields), engine, ttl
        self._deliver = partial(
            Delivery, self._facts, engine, self._packs, kv=kv, compiled_for=compiled_for, compress=compress
        )
        self._delivery, self._labels = self._deliver(), dict[str, Labels]()

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """See `BaseStore.batch`."""
        last_puts: dict[tuple[Labels, str], PutOp] = {}
        results: list[Result] = []
        for op in ops:
            validate_op_namespace(op)
            if isinstance(op, PutOp):
                last_puts[op.namespace, op.key] = op
                results.append(None)
            elif isinstance(op, GetOp):
                stored = self._read(namespace_of(op.namespace), op.key)
                results.append(next(iter(self._items([(fact, None) for fact in stored], op.refresh_ttl)), None))
            elif isinstance(op, SearchOp):
                results.append(self._items(self._search(op), op.refresh_ttl))
            elif isinstance(op, ListNamespacesOp):
                results.append(self._list(op))
            else:
                raise FactError(f"Got {op!r}; expected an operation of a LangGraph store.")
        self._put(list(last_puts.values()))
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`, in a thread."""
        return await asyncio.to_thread(self.batch, list(ops))

    def sweep_ttl(self) -> int:
        """Remove expired items, and packs whose items have expired or were deleted. Returns the number of packs."""
        held = {handle.namespace for handle in self._packs}
        return sum(len(self._deliver(namespace=name).gc()) for name in self._facts.purge(_PREFIX) if name in held)

    def _read(self, namespace: str, key: str) -> list[Fact]:
        return [fact for fact in self._facts.facts(ids=[_id(key)], namespace=namespace) if _is_item(fact)]

    def _items(self, found: Sequence[tuple[Fact, float | None]], refresh: bool) -> list[SearchItem]:
        """Facts as items. With `refresh`, those that expire start their ttl again."""
        facts_with_ttl = [(fact, _about(fact).get("ttl")) for fact, _ in found] if refresh else []
        renewed = [replace(fact, expires=time.time() + 60 * ttl) for fact, ttl in facts_with_ttl if ttl is not None]
        if renewed:
            self._facts.renew(renewed)
        packs = self._delivery.deliver([Hit(fact, score or 0.0) for fact, score in found])
        return [PackItem(fact, pack, score) for (fact, score), pack in zip(found, packs, strict=True)]

    def _put(self, ops: Sequence[PutOp]) -> None:
        new_facts = [self._fact(op) for op in ops if op.value is not None]
        for op in ops:
            namespace = namespace_of(op.namespace)
            if op.value is None and any(map(_is_item, self._facts.stored(ids=[_id(op.key)], namespace=namespace))):
                self._deliver(namespace=namespace).delete([_id(op.key)])
        if new_facts:
            # Refuse texts that cannot be packs; otherwise searches would find them again and again.
            self._delivery.refuse_unreadable(new_facts)
            self._delivery.compile(new_facts, stored=False, progress=False)
            self._delivery.add(new_facts, overwrite=True, progress=False)

    def _fact(self, op: PutOp) -> Fact:
        """The fact for a put. Raises `FactError`."""
        now, namespace = time.time(), namespace_of(op.namespace)
        if op.ttl is not None and not 0 < op.ttl < _FOREVER:
            raise FactError(f"Got ttl={op.ttl} for {op.key!r}; expected minutes above 0, or None for never.")
        created = next((_about(stored)["created"] for stored in self._read(namespace, op.key)), None)
        value, updated = dict(op.value or {}), datetime.fromtimestamp(now, UTC).isoformat()
        record = {"namespace": op.namespace, "key": op.key, "value": value, "ttl": op.ttl, "updated": updated}
        try:
            encoded_record = json.dumps({**record, "created": created or updated}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise FactError(f"Got {value!r} as {op.key!r}, which JSON cannot say ({error}).") from error
        text, searched = _text(value, op.index or self.fields)
        return Fact(
            text,
            id=_id(op.key),
            namespace=namespace,
            metadata={_ABOUT: encoded_record} | ({} if searched and op.index is not False else {_UNSEARCHED: True}),
            expires=None if op.ttl is None else now + 60 * op.ttl,
        )

    def _search(self, op: SearchOp) -> list[tuple[Fact, float | None]]:
        depth, conditions, stop = len(op.namespace_prefix), op.filter or {}, _stop(op)
        start = min(op.offset, stop)
        spaces = [name for name, labels in self._spaces() if labels[:depth] == tuple(op.namespace_prefix)]

        def passes(fact: Fact) -> bool:
            if fact.namespace not in spaces or not _is_item(fact):
                return False
            return not conditions or _matches(_about(fact)["value"], conditions)

        def held(where: Filter | None = None) -> Iterator[tuple[Fact, None]]:
            facts = (fact for name in spaces for fact in self._facts.facts(where=where, namespace=name))
            return ((fact, None) for fact in facts if passes(fact))

        if not (op.query or "").strip():
            return list(itertools.islice(held(), start, stop))
        hits: list[Hit] = []
        limit = stop + 1 if spaces and stop else 0
        while limit:
            # One namespace is searched alone; for several, all facts are.
            nearest = self._facts.search(op.query or "", limit, namespace=spaces[0] if len(spaces) == 1 else None)
            hits = [hit for hit in nearest if _UNSEARCHED not in hit.fact.metadata and passes(hit.fact)]
            # Equal scores have one order on every page once all of them are here.
            is_whole = len(nearest) < limit or (len(hits) >= stop and hits[stop - 1].score > nearest[-1].score)
            limit = 0 if is_whole else limit * _GROWTH
        first, last = (max(0, at - len(hits)) for at in (start, stop))
        unsearched = itertools.islice(held({_UNSEARCHED: True}), first, last)
        return [*((hit.fact, hit.score) for hit in hits[start:stop]), *unsearched]

    def _names(self) -> list[str]:
        return [name for name in self._facts.namespaces() if name.startswith(_PREFIX)]

    def _spaces(self) -> Iterator[tuple[str, Labels]]:
        """Our namespaces that hold items, each with its LangGraph namespace."""
        for name in self._names():
            if name not in self._labels:
                for fact in itertools.islice(filter(_is_item, self._facts.facts(namespace=name)), 1):
                    self._labels[name] = tuple(_about(fact)["namespace"])
            if name in self._labels:
                yield name, self._labels[name]

    def _list(self, op: ListNamespacesOp) -> list[Labels]:
        _stop(op)
        listed = InMemoryStore()
        for name, labels in self._spaces():
            if any(map(_is_item, self._facts.facts(namespace=name))):
                listed.put(labels, "item", {})
        return cast("list[Labels]", listed.batch([op])[0])


def _stop(op: SearchOp | ListNamespacesOp) -> int:
    """End of the page that `op` requests. Raises `FactError` for a negative offset or limit."""
    if op.offset < 0 or op.limit < 0:
        raise FactError(f"Got offset={op.offset} and limit={op.limit}; expected 0 or more.")
    return min(op.offset + op.limit, 1 << 31)


def _utf8(label: str) -> bytes:
    try:
        return label.encode()
    except UnicodeEncodeError as error:
        raise FactError(f"Got the name {label!r}, which is not Unicode ({error.reason}). Repair it.") from error


def _id(key: str) -> str:
    """The id of the item `key`: printable, and different for each key."""
    return f"item/{quote(_utf8(key))}"


def _is_item(fact: Fact) -> bool:
    return _ABOUT in fact.metadata


def _about(fact: Fact) -> dict[str, Any]:
    """What was put: namespace, key, value, times, and ttl in minutes."""
    record: dict[str, Any] = json.loads(str(fact.metadata[_ABOUT]))
    return record


def _text(value: Mapping[str, Any], fields: Sequence[str] | None) -> tuple[str, bool]:
    """The text of an item, and whether a search may find it by this text."""
    texts = [text for field in fields or () for text in get_text_at_path(value, field)]
    if fields is None and len(value) == 1:
        texts = [text for text in value.values() if isinstance(text, str)]
    text = "\n".join(texts)
    has_text = bool(text.strip())
    return text if has_text else json.dumps(value, ensure_ascii=False), has_text or fields is None


def _matches(value: dict[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Whether LangGraph's own store finds an item of this value. Raises `FactError` for an unknown operator."""
    asked = InMemoryStore()
    asked.put(("item",), "item", value)
    try:
        return bool(asked.search(("item",), filter=dict(conditions)))
    except (TypeError, ValueError, OverflowError) as error:
        if not str(error).startswith("Unsupported operator"):
            return False  # Values that cannot be ordered.
        raise FactError(f"{error}; expected one of $eq, $ne, $gt, $gte, $lt, $lte.") from error
