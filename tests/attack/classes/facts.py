"""A fact store against a dictionary, and filters against the predicate alone.

After any sequence of changes, refusals, full disks, reopenings and jumps of the clock each fact is found by its own
text, in one bank, and nothing else is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kp_core import ChromaFactStore, Fact, MemoryFactStore
from kp_core.banks.filters import predicate
from kp_core.errors import FactError
from tests.attack.harness import Case, LostError, WrongError, refused
from tests.attack.machines import StoreMachine, walk
from tests.attack.mutate import text, value
from tests.attack.trouble import full_disk
from tests.kits import HashEmbedder

SHORT = 10

_SPACES = st.sampled_from(("default", "guests"))
_TEXTS = st.integers(0, 30).map(lambda number: f"fact number {number}")
_TTLS = st.sampled_from((None, None, 300.0, 1e7))
_ANCIENT = 1e9
"""Seconds: before anything that was added, wherever the clock jumped."""


class Facts(StoreMachine):
    """`held`: all facts by namespace and id, those too that have expired and are not swept yet."""

    chroma = False

    @initialize()
    def open(self) -> None:
        self.held: dict[tuple[str, str], Fact] = {}
        self.store: Any = MemoryFactStore(HashEmbedder(), bank_size=3)
        if self.chroma:
            self.store = None
            self.reopen()
            self.around.callback(self._close)

    @precondition(lambda self: self.chroma)
    @rule()
    def reopen(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = ChromaFactStore(self.folder / "f", HashEmbedder(), bank_size=3)

    @rule(
        texts=st.lists(_TEXTS, min_size=1, max_size=6),
        space=_SPACES,
        ttl=_TTLS,
        full=st.sampled_from((False,) * 5 + (True,)),
    )
    def add(self, texts, space, ttl, full) -> None:
        facts = [Fact(each, namespace=space, metadata={"at": place}) for place, each in enumerate(texts)]
        expires = None if ttl is None else time.time() + ttl
        before, came = self.held, self._coming(space, facts)
        full, failed = full and self.chroma, None
        with full_disk(0) if full else nullcontext():
            try:
                self.store.add(facts, ttl=ttl)
            except FactError as error:
                failed = error
        if failed is not None:
            if not full:
                raise failed
            self._learn(before, came)
            return
        for fact in came:
            # The clock runs on between two looks.
            found = self.store.get(fact.id, namespace=space)
            if abs((expires or 0) - (found.expires or 0)) > 30 or replace(found, expires=None) != fact:
                raise WrongError(f"{fact} was added, {found} is there")
            self.held[space, fact.id] = found

    def _coming(self, space: str, facts: list[Fact]) -> list[Fact]:
        """Those of `facts` that are new; what has expired goes first. Of a text that was corrected the later one stays."""
        self.held = {key: fact for key, fact in self.held.items() if key[0] != space or _alive(fact)}
        mine = {fact_id: fact.text for (name, fact_id), fact in self.held.items() if name == space}
        new: dict[str, Fact] = {}
        for fact in facts:
            if fact.id not in mine and fact.text not in {*mine.values(), *(each.text for each in new.values())}:
                new[fact.id] = fact
        return list(new.values())

    @precondition(lambda self: self._living())
    @rule(data=st.data(), text=_TEXTS)
    def update(self, data, text) -> None:
        old = data.draw(st.sampled_from(self._living()))
        new = self.store.update(Fact(text, id=old.id, namespace=old.namespace))  # Also to the text of another.
        if new.version != old.version + 1:
            raise WrongError(f"{old.id} became version {new.version}, after version {old.version}")
        self.held[old.namespace, old.id] = new

    @precondition(lambda self: self._living())
    @rule(data=st.data())
    def delete(self, data) -> None:
        gone = data.draw(
            st.lists(st.sampled_from(self._living()), min_size=1, max_size=4, unique_by=lambda f: (f.namespace, f.id))
        )
        for space in {fact.namespace for fact in gone}:
            ids = [fact.id for fact in gone if fact.namespace == space]
            if self.store.delete([*ids, "unknown"], namespace=space) != len(ids):
                raise WrongError("another number of facts was deleted")
            for fact_id in ids:
                del self.held[space, fact_id]

    @rule()
    def rebuild(self) -> None:
        self.store.rebuild()

    @invariant()
    def each_fact_is_found_by_its_own_text(self) -> None:
        if not hasattr(self, "store"):
            return
        living = {(fact.namespace, fact.id): fact for fact in self._living()}
        there = {(fact.namespace, fact.id): fact for fact in self.store.facts()}
        if there != living:
            gone, come = living.keys() - there.keys(), there.keys() - living.keys()
            raise (LostError if gone else WrongError)(f"{gone} are gone, {come} came, others are different")
        if len(self.store) != len(living):
            raise WrongError(f"it counts {len(self.store)} of {len(living)}")
        inside = [fact for bank in self.store.banks() for fact in self.store.bank_facts(bank)]
        if sorted((f.namespace, f.id) for f in inside) != sorted(living):
            raise WrongError("banks do not hold each fact once")
        for fact in list(living.values())[:3]:
            for probes in (None, 99):
                hit = self.store.search(fact.text, 1, namespace=fact.namespace, probes=probes)[0]
                same = living.get((hit.fact.namespace, hit.fact.id)) == hit.fact  # Another fact may have this text.
                if (hit.fact.namespace, hit.fact.text) != (fact.namespace, fact.text) or not same or hit.score < 0.999:
                    raise WrongError(f"{fact.text} finds {hit.fact.text} at {hit.score}")

    def teardown(self) -> None:
        try:
            if hasattr(self, "store") and (wrong := self.store.verify()):
                raise WrongError(f"verify: {wrong}")
        finally:
            super().teardown()

    def _close(self) -> None:
        self.store.close()

    def _living(self) -> list[Fact]:
        return [fact for _, fact in sorted(self.held.items()) if _alive(fact)] if hasattr(self, "held") else []

    def _learn(self, before: dict[tuple[str, str], Fact], came: list[Fact]) -> None:
        """Behind a full disk: what is there now, when it is a part of what was to come beside what was there."""
        self.reopen()
        living = self._living()
        # What has expired is shown where the clock goes back; it may have been swept, or not.
        self.jump(-_ANCIENT)
        there = {(fact.namespace, fact.id): fact for fact in self.store.facts()}
        self.jump(_ANCIENT)
        if lost := [fact.text for fact in living if (fact.namespace, fact.id) not in there]:
            raise LostError(f"a full disk cost {lost}")
        if strange := [key for key in there.keys() - before.keys() if key[1] not in {fact.id for fact in came}]:
            raise WrongError(f"a full disk brought {strange}")
        self.held = there


class ChromaFacts(Facts):
    """The same in a folder, which may be full, and is opened again."""

    chroma = True


def _alive(fact: Fact) -> bool:
    return fact.expires is None or fact.expires > time.time()


_FIELDS = (
    "year",
    "lang",
    "tags",
    "more",
    "title",
    "source",
    "id",
    "namespace",
    "version",
    "digest",
    "kp:title",
    "none",
    "$or",
    "",
)
_OPERATORS = (
    "$eq",
    "$ne",
    "$gt",
    "$gte",
    "$lt",
    "$lte",
    "$in",
    "$nin",
    "$contains",
    "$near",
)
_WANTED = (
    1999,
    2000.0,
    "en",
    "de",
    "a",
    "EN",
    True,
    2**70,
    "1999",
    "",
    [1999, "en"],
    ["en", "de"],
    [1999, 2000],
    [],
    None,
    -0.0,
)


def _filter(draw: Random, depth: int = 0) -> Any:
    if draw.random() < 0.05:
        return value(draw)
    if depth < 3 and draw.random() < 0.3:
        parts = [_filter(draw, depth + 1) for _ in range(draw.randrange(1, 4))]
        return {draw.choice(("$and", "$or")): parts}
    return {draw.choice(_FIELDS): _condition(draw) for _ in range(draw.choice((1, 1, 2)))}


def _condition(draw: Random) -> Any:
    if draw.random() < 0.3:
        return draw.choice(_WANTED)
    return {draw.choice(_OPERATORS): draw.choice(_WANTED) for _ in range(draw.choice((1, 1, 2)))}


def _filtered(draw: Random, stores: list[Any], facts: list[Fact]) -> None:
    """What a store finds under a filter is what the filter lets through of all facts; or both refuse it."""
    where = _filter(draw)
    try:
        test = predicate(where)
    except FactError:
        test = None
    for store in stores:
        try:
            found = {fact.id for fact in store.facts(where=where)}
            hits = {hit.fact.id for hit in store.search("fact", len(facts), where=where)}
        except FactError:
            if test is not None:
                raise
            continue
        if test is None:
            raise WrongError(f"{type(store).__name__} took the filter {where!r}")
        expected = {fact.id for fact in facts if test(fact)}
        if found != expected or hits != expected:
            raise WrongError(f"{type(store).__name__}: {where!r} lets {found ^ expected} and {hits ^ expected} differ")


def _stranger(draw: Random, store: Any) -> None:
    """A fact of strange fields comes back as it was, or is refused."""
    given = {"text": f"Strange. {text(draw)}", "id": "strange", "metadata": {text(draw): value(draw) for _ in range(3)}}
    for name in draw.sample(
        ("title", "source", "id", "namespace", "expires", "version", "metadata", "text"), draw.randrange(3)
    ):
        given[name] = value(draw)
    with refused(TypeError) if not isinstance(given["metadata"], dict) else refused():
        fact = Fact(**given)
        store.add([fact])
        try:
            [back] = store.facts(ids=[fact.id], namespace=fact.namespace) if _alive(fact) else [fact]
            if (back.text, back.title, back.source, back.expires) != (fact.text, fact.title, fact.source, fact.expires):
                raise WrongError(f"{fact!r} came back as {back!r}")
            if _plain(dict(back.metadata)) != _plain(dict(fact.metadata)):
                raise WrongError(f"{dict(fact.metadata)!r} came back as {dict(back.metadata)!r}")
        finally:
            store.delete([fact.id], namespace=fact.namespace)


def _plain(data: Any) -> Any:
    """Lists for tuples, as JSON has no others."""
    if isinstance(data, dict):
        return {key: _plain(each) for key, each in data.items()}
    return [_plain(each) for each in data] if isinstance(data, list | tuple) else data


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""
    years = (1999, 2000, 1999.5, "1999", None, True, 2**70)
    facts = [
        Fact(f"fact {number}", title=("", "en")[number % 2], source=f"{number % 3}.md", metadata={
            key: each for key, each in {
                "year": years[number % 7], "lang": ("en", "de", "EN")[number % 3], "tags": (["en", "a"], [1999], [], [1, "a"])[number % 4],
                "more": {"a": [1]} if number % 5 == 0 else "x", "$or": 3,
            }.items() if (number >> len(key)) % 2 or key in {"year", "lang"}
        })
        for number in range(24)
    ]  # fmt: skip
    with (
        ChromaFactStore(folder / "facts", HashEmbedder()) as chroma,
        ChromaFactStore(folder / "own", HashEmbedder()) as own,
    ):
        stores = [MemoryFactStore(HashEmbedder()), chroma]
        for store in stores:
            store.add(facts)

        def case(draw: Random) -> int | None:
            kind = draw.random()
            if kind < 0.02:
                return walk(ChromaFacts, draw)
            if kind < 0.06:
                return walk(Facts, draw)
            if kind < 0.6:
                return _filtered(draw, stores, facts)
            return _stranger(draw, draw.choice((MemoryFactStore(HashEmbedder()), own)))

        yield case
