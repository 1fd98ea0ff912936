"""Agents' memory over LangGraph: hostile namespaces, keys, values and calls, a dictionary being the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from langgraph.store.base import InvalidNamespaceError

from kp_core import Fact, MemoryFactStore, PackStore, find_handles
from kp_langchain.store import KnowledgePackStore, namespace_of
from tests.attack.harness import Case, LostError, WrongError, refused
from tests.attack.mutate import number, text, value
from tests.conftest import roomy_engine
from tests.kits import HashEmbedder

SHORT = 15

_LABELS = (
    "a",
    "b",
    "a-b",
    "a_2db",
    "A",
    "_h",
    "é",
    "e\u0301",
    "x" * 61,
    "x" * 62,
    "a.b",
    "langgraph",
    "lg-a",
    "default",
    "*",
)
_COUNTS = (0, -1, 2**31, 2**63, 10**400)


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    packs, facts = PackStore(folder / "packs"), MemoryFactStore(HashEmbedder())
    memory = KnowledgePackStore(roomy_engine(), packs, facts, kv="lazy")
    facts.add([Fact("What others know.", namespace="bo"), Fact("What nobody put.", namespace=namespace_of(("a",)))])
    held: dict[tuple[tuple[str, ...], str], Any] = {}

    def label(draw: Random) -> str:
        return draw.choice(_LABELS) if draw.random() < 0.7 else text(draw)

    def case(draw: Random) -> None:
        labels = tuple(label(draw) for _ in range(draw.choice((0, 1, 1, 2, 3))))
        key = draw.choice(("k", "K", "k/", "", text(draw)))
        before = held.get((labels, key))
        with refused(InvalidNamespaceError):
            if draw.random() < 0.2:
                memory.delete(labels, key)
                held.pop((labels, key), None)
            else:
                put = {
                    draw.choice(("text", text(draw))): draw.choice((text(draw), value(draw)))
                    for _ in range(draw.choice((1, 1, 2)))
                }
                ttl = draw.choice((None, None, number(draw)))
                memory.put(labels, key, put, draw.choice((None, None, False, [text(draw)])), ttl=ttl)
                held[labels, key] = json.loads(json.dumps(put))
                if ttl is not None and ttl < 0.1:  # It is over by now.
                    del held[labels, key]
        with refused(InvalidNamespaceError):
            item = memory.get(labels, key)
            if (item and item.value) != (now := held.get((labels, key))):
                raise (LostError if before == now else WrongError)(
                    f"{labels!r} {key!r}: {item and item.value!r} for {now!r}"
                )
            prefix = labels[: draw.randrange(len(labels) + 1)]
            query = draw.choice((None, text(draw)))
            page = {"limit": draw.choice((1, 5, 1000, *_COUNTS)), "offset": draw.choice((0, 0, *_COUNTS))}
            where = draw.choice((None, None, value(draw)))
            asked = {text(draw): where, "text": draw.choice(({"$gt": 1}, where))} if where else None
            for found in memory.search(prefix, query=query, filter=asked, **page):
                spaces = {handle.namespace for _, _, handle in find_handles(found.handle or "")}
                right = (
                    found.namespace[: len(prefix)] == prefix and held.get((found.namespace, found.key)) == found.value
                )
                if not right or spaces - {namespace_of(found.namespace)}:
                    raise WrongError(f"{prefix!r} finds {found!r}")
        with refused(InvalidNamespaceError):
            spaces = memory.list_namespaces(prefix=labels or None, limit=draw.choice((10, *_COUNTS)))
            below = {space for space, _ in held if len(space) >= len(labels)}
            if wrong := [
                s for s in spaces if s not in below or any(a not in (b, "*") for a, b in zip(labels, s, strict=False))
            ]:
                raise WrongError(f"below {labels!r} there is {wrong!r}")

    yield case
