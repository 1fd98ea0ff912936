"""Fact stores against their contract: what is found, how banks stand, how facts come and go."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kp_core.banks import Added, ChromaFactStore, Fact, FactStore, MemoryFactStore
from kp_core.banks.filters import predicate
from kp_core.errors import FactError
from tests.kits import HashEmbedder

Floats = NDArray[np.float32]
MakeStore = Callable[..., FactStore]


def facts_of(count: int, start: int = 0) -> list[Fact]:
    return [Fact(f"fact number {number}") for number in range(start, start + count)]


def build(store: FactStore, facts: Iterable[Fact]) -> Added:
    """Add facts, and make the banks."""
    report = store.add(facts)
    store.rebuild()
    return report


def flat(store: FactStore, embedder: HashEmbedder, question: str) -> list[str]:
    """The ids of all facts, nearest first: what a search is compared with."""
    query = embedder.embed_query(question)
    scores = {fact.id: float(embedder.embed_query(fact.text) @ query) for fact in store.facts()}
    return sorted(scores, key=lambda fact_id: (-round(scores[fact_id], 6), fact_id))


def check(store: FactStore, facts: Sequence[Fact]) -> None:
    """The store holds these facts, each in one bank that is not empty, and finds each by its own text."""
    assert {fact.id: fact for fact in store.facts()} == {fact.id: fact for fact in facts}
    assert len(store) == len(facts)
    inside = {bank: [fact.id for fact in store.bank_facts(bank)] for bank in store.banks()}
    assert sorted(itertools.chain.from_iterable(inside.values())) == sorted(fact.id for fact in facts)
    for bank, ids in inside.items():
        assert ids
        assert set(store.bank_of([store.get(ids[0])])) == {bank}
    for fact in facts[::7]:
        assert store.search(fact.text, 1)[0].fact == fact
        assert store.search(fact.text, 1, probes=99)[0].fact == fact
    assert store.verify() == []


# Facts


def test_the_id_of_a_fact_is_a_digest_of_namespace_source_and_text_unless_given() -> None:
    assert Fact("a").id == Fact("a", title="t").id == hashlib.blake2b(b"a", digest_size=16).hexdigest()
    assert Fact("a", source="s").id == Fact("a", source="s", title="t").id
    texts, sources, spaces = ("a", "b", "s", "1:sa", "default\0a"), ("", "s", "sd", "1:s"), ("default", "n")
    ids = {Fact(*(text, "", source), namespace=space).id for text in texts for source in sources for space in spaces}
    assert len(ids) == len(texts) * len(sources) * len(spaces)
    assert Fact("a", source="s").moved("n") == Fact("a", source="s", namespace="n")
    assert Fact("a", id="mine").id == Fact("a", id="mine").moved("n").id == "mine"
    assert (Fact("a", id="mine").is_named, Fact("a", source="s").is_named) == (True, False)
    for odd in ("a\nb", "\t", "a\u200bb", "a\u00a0b", "\x1b[0m"):
        assert Fact("a", id=odd).id == odd


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ""},
        {"text": " \n"},
        {"text": "\ud800"},
        {"text": None},
        {"text": "a", "id": "a\ud800"},
        {"text": "a", "title": 3},
        {"text": "a", "metadata": {"years": {1999}}},
        {"text": "a", "metadata": ["year"]},
        {"text": "a", "metadata": {"deep": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}},
        {"text": "a", "metadata": {"score": float("nan")}},
        {"text": "a", "expires": "tomorrow"},
        {"text": "a", "expires": float("inf")},
        {"text": "a", "expires": 10**400},
        {"text": "a", "version": 0},
    ],
)
def test_bad_facts_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FactError, match=r"expected|no file can hold"):
        Fact(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float32(1.5), 1.5),
        (np.float64(1.5), 1.5),
        (np.float16(0.5), 0.5),
        (np.int64(-3), -3),
        (np.int8(3), 3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),  # noqa: FBT003 - numpy's
        (np.str_("a"), "a"),
        (np.array(3), 3),
        (np.array([1, 2]), [1, 2]),
        (np.array([0.5], np.float32), [0.5]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.ones((2, 1)), [[1.0], [1.0]]),
        (np.array([]), []),
        ([np.int8(1), np.float32(2)], [1, 2.0]),
        ((np.int64(1), "a"), (1, "a")),
        ({"a": [np.int32(1), {"b": np.bool_(False)}]}, {"a": [1, {"b": False}]}),  # noqa: FBT003 - numpy's
    ],
    ids=repr,
)
def test_numbers_of_numpy_are_numbers_of_python(given: object, expected: object, tmp_path: Path) -> None:
    fact = Fact("a", metadata={"v": given, "n": 1})  # type: ignore[dict-item]
    assert (fact.metadata["v"], type(fact.metadata["v"])) == (expected, type(expected))
    json.dumps(dict(fact.metadata))
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        store.add([fact])
        listed = list(expected) if isinstance(expected, tuple) else expected
        assert dict(store.get(fact.id).metadata) == {"v": listed, "n": 1}
        where = {"n": 1} if isinstance(listed, list | dict) else {"v": listed}
        assert [hit.fact.id for hit in store.search("a", where=where)] == [fact.id]


@pytest.mark.parametrize(
    "given", [np.float32("nan"), np.array([np.inf]), np.datetime64("2026-01-01"), np.complex64(1), np.array([b"a"])]
)
def test_values_of_numpy_that_json_cannot_say_are_refused(given: object) -> None:
    with pytest.raises(FactError, match="expected what JSON can say"):
        Fact("a", metadata={"v": given})  # type: ignore[dict-item]


def test_a_fact_is_an_immutable_value() -> None:
    metadata = {"year": "1999"}
    fact = Fact("a", metadata=metadata)
    metadata["year"] = "2000"
    assert fact.metadata == {"year": "1999"}
    with pytest.raises(TypeError):
        fact.metadata["year"] = "2000"  # type: ignore[index]
    with pytest.raises(AttributeError):
        fact.text = "b"  # type: ignore[misc]
    assert len({fact, Fact("a", metadata={"year": "1999"})}) == 1
    assert pickle.loads(pickle.dumps(fact)) == fact  # noqa: S301 - our own bytes


# Searching


def test_no_banks_are_smaller_than_a_fact() -> None:
    with pytest.raises(FactError, match="bank_size=0"):
        MemoryFactStore(HashEmbedder(), bank_size=0)


def test_a_search_finds_what_comparing_with_everything_finds(make_store: MakeStore) -> None:
    embedder = HashEmbedder()
    store = make_store(embedder, bank_size=12)
    store.add(facts_of(90))
    for number, k in itertools.product(range(5), (1, 4, 90, 200)):
        question = f"question {number}"
        hits, truth = store.search(question, k), flat(store, embedder, question)
        assert [hit.fact.id for hit in hits] == truth[:k]
        assert all(hit.bank is None for hit in hits)
        cosines = [float(embedder.embed_query(hit.fact.text) @ embedder.embed_query(question)) for hit in hits]
        assert [hit.score for hit in hits] == pytest.approx(cosines, abs=1e-5)
        assert [hit.fact.id for hit in store.search(question, k, probes=99)] == truth[:k]


def test_probes_search_the_nearest_banks_and_no_more_than_needed(make_store: MakeStore) -> None:
    embedder = HashEmbedder()
    store = make_store(embedder, bank_size=6)
    store.add(facts_of(90))
    members = {bank: store.bank_facts(bank) for bank in store.banks()}
    for number in range(5):
        question = f"question {number}"
        query = embedder.embed_query(question)
        means = {bank: np.mean([embedder.embed_query(fact.text) for fact in of], 0) for bank, of in members.items()}
        order = sorted(members, key=lambda bank: -float(means[bank] @ query / np.linalg.norm(means[bank])))
        assert store.search(question, 1, probes=1)[0].bank == order[0]
        for probes in (1, 3):
            inside = {fact.id for bank in order[:probes] for fact in members[bank]}
            count = min(3, len(inside))
            hits = store.search(question, count, probes=probes)
            truth = [fact_id for fact_id in flat(store, embedder, question) if fact_id in inside]
            assert [hit.fact.id for hit in hits] == truth[:count]
            assert {hit.bank for hit in hits} <= set(order[:probes])
        # A bank that holds too few is no reason to give fewer.
        assert len(store.search(question, 60, probes=1)) == 60


# Filters

FACTS = [
    Fact("a", source="x.md", metadata={"year": 1990, "lang": "en"}),
    Fact("b", source="x.md", metadata={"year": 2000, "lang": "de"}),
    Fact("c", source="y.md", metadata={"year": 2010, "public": True}),
    Fact("d", metadata={"year": "2010", "tags": [1, True, "air"]}, namespace="n"),
    Fact("e", metadata={"tags": ["sea", "air"], "year": None, "source": "z.md"}),
    Fact("f", source="z.md", metadata={"tags": [], "year": 2**70, "kp:odd": 1}),
]


@pytest.fixture(scope="module", params=["memory", "folder"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FactStore]:
    if request.param == "memory":
        memory = MemoryFactStore(HashEmbedder(), bank_size=1)
        memory.add(FACTS)
        yield memory
        return
    with ChromaFactStore(tmp_path_factory.mktemp("filled"), HashEmbedder(), bank_size=1) as store:
        store.add(FACTS)
        yield store


@pytest.mark.parametrize(
    ("where", "texts"),
    [
        ({}, "abcdef"),
        ({"year": 2000}, "b"),
        ({"year": {"$gte": 2000}}, "bcf"),
        ({"year": {"$gt": 1990, "$lt": 2010}}, "b"),
        ({"lang": {"$ne": "en"}}, "bcdef"),
        ({"lang": {"$in": ["en", "de"]}}, "ab"),
        ({"lang": {"$nin": ["en", "de"]}}, "cdef"),
        ({"source": "x.md", "lang": "de"}, "b"),
        ({"$or": [{"lang": "en"}, {"source": "y.md"}]}, "ac"),
        ({"$and": [{"source": "x.md"}, {"year": {"$lt": 1995}}]}, "a"),
        ({"public": True}, "c"),
        ({"public": 1}, ""),
        ({"namespace": "n"}, "d"),
        ({"nothing": "x"}, ""),
        ({"source": {"$contains": "x.md"}}, ""),
        ({"year": {"$contains": 2010}}, ""),
        ({"tags": {"$contains": "sea"}}, "e"),
        ({"tags": {"$contains": "se"}}, ""),
        ({"tags": {"$contains": 1}}, "d"),
        ({"year": {"$in": [1990, 2010.0]}}, "ac"),
        ({"source": "z.md"}, "ef"),
        ({"kp:source": "z.md"}, "f"),
        ({"kp:odd": 1}, "f"),
        ({"id": next(fact.id for fact in FACTS if fact.text == "c")}, "c"),
        ({"$or": [{"year": {"$in": (1990, 2010)}}, {"version": {"$gt": 1}}]}, "ac"),
    ],
)
def test_filters(filled: FactStore, where: dict[str, object], texts: str) -> None:
    assert "".join(fact.text for fact in FACTS if predicate(where)(fact)) == texts
    assert sorted(hit.fact.text for hit in filled.search("q", 9, where=where)) == list(texts)
    assert sorted(hit.fact.text for hit in filled.search("q", 9, where=where, probes=1)) == list(texts)
    assert sorted(fact.text for fact in filled.facts(where=where)) == list(texts)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("x", "expected a dictionary"),
        (0, "expected a dictionary"),
        ({"$and": [[]]}, "expected a dictionary"),
        ({"$not": {"lang": "de"}}, "name of a field"),
        ({"lang": {"$exists": True}}, "operator '\\$exists'"),
        ({"$or": {}}, "list of filters"),
        ({"$and": []}, "list of filters"),
        ({"year": {}}, "no condition"),
        ({"year": {"$near": 3}}, "operator '\\$near'"),
        ({"year": {"$in": "abc"}}, "list of values"),
        ({"year": {"$gt": None}}, "expected a string"),
        ({"year": {"$lte": "2010"}}, "expected a number"),
        ({"year": {"$lte": True}}, "expected a number"),
        ({"year": [1]}, "expected a string"),
    ],
)
def test_senseless_filters_are_refused(where: object, words: str) -> None:
    with pytest.raises(FactError, match=words):
        predicate(where)  # type: ignore[arg-type]
    with pytest.raises(FactError, match=words):
        MemoryFactStore(HashEmbedder()).search("q", where=where)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 80), every=st.integers(1, 20), k=st.integers(1, 30), gone=st.integers(0, 20))
def test_a_filtered_search_is_a_search_among_those_it_lets_through(count: int, every: int, k: int, gone: int) -> None:
    embedder = HashEmbedder()
    store = MemoryFactStore(embedder, bank_size=6)
    facts = [Fact(f"{number}", metadata={"rest": number % every}) for number in range(count)]
    store.add(facts)
    store.delete(fact.id for fact in facts[:gone])
    store.add([Fact("new", metadata={"rest": 0})])
    held = {fact.id for fact in store.facts() if fact.metadata["rest"] == 0}
    order = [fact_id for fact_id in flat(store, embedder, "q") if fact_id in held]
    for probes in (None, 99):
        hits = store.search("q", k, probes=probes, where={"rest": 0})
        assert [hit.fact.id for hit in hits] == order[:k]


# Adding, updating, deleting


@pytest.mark.parametrize(("count", "bank_size", "banks"), [(1, 20, 1), (20, 20, 1), (21, 20, 2), (9, 1, 9)])
def test_every_fact_stands_in_one_of_the_banks(make_store: MakeStore, count: int, bank_size: int, banks: int) -> None:
    store, facts = make_store(bank_size=bank_size), facts_of(count)
    assert build(store, iter(facts)).added == count
    assert list(store.facts()) == facts
    assert len(store.banks()) == banks
    assert all(len(store.bank_facts(bank)) <= 2 * bank_size for bank in store.banks())
    check(store, facts)


def test_facts_of_one_kind_stand_in_one_bank(make_store: MakeStore) -> None:
    class Topics(HashEmbedder):
        def embed_query(self, text: str) -> Floats:
            vector = super().embed_query(text.partition(" ")[0]) + 0.05 * super().embed_query(text)
            return np.asarray(vector / np.linalg.norm(vector), np.float32)

    store = make_store(Topics(), bank_size=5)
    store.add(Fact(f"{topic} {number}") for number in range(5) for topic in ("sea", "war", "tax"))
    for topic in ("sea", "war", "tax"):
        [hit] = store.search(f"{topic} ?", 1, probes=1)
        assert {fact.text.partition(" ")[0] for fact in store.bank_facts(hit.bank)} == {topic}


def test_a_source_has_a_text_once_and_an_id_stands_for_one_text(make_store: MakeStore) -> None:
    embedder = HashEmbedder()
    store = make_store(embedder)
    first = store.add([Fact("a", title="first"), Fact("b"), Fact("a", title="second")])
    again = store.add([Fact("b", title="later"), Fact("a")])
    assert (first.added, first.duplicates, again.added, again.duplicates) == (2, 1, 0, 2)
    assert embedder.embedded == 2
    assert [(fact.text, fact.title) for fact in store.facts()] == [("a", "first"), ("b", "")]
    with pytest.raises(FactError, match="Use `update`"):
        store.add([Fact("c"), Fact("d", id=Fact("a").id)])
    with pytest.raises(FactError, match="Use `update`"):
        store.add([Fact("c", id="x"), Fact("d", id="x")])
    with pytest.raises(FactError, match="expected a Fact"):
        store.add(["text"])  # type: ignore[list-item]
    assert len(store) == 2


SAME = "Return the key before nine."
TWO = [Fact(SAME, source=source) for source in ("a.md", "b.md")]


def test_equal_texts_of_two_sources_are_two_facts(make_store: MakeStore) -> None:
    embedder = HashEmbedder()
    store = make_store(embedder)
    reports = [store.add([*TWO, *TWO[:1]]) for _ in range(2)]
    assert [(report.added, report.duplicates) for report in reports] == [(2, 1), (0, 3)]
    assert embedder.embedded == 1
    assert store.add(TWO, overwrite=True).added == 0
    assert sorted(hit.fact.source for hit in store.search(SAME, 9)) == ["a.md", "b.md"]
    # An id of its own is another fact; without one, the source has the text already.
    assert store.add([Fact(SAME, source="c.md", id="c"), Fact(SAME, source="c.md")]).added == 1
    for number, fact in enumerate(TWO, 2):
        assert store.update(replace(fact, text=f"By {number}.")).version == 2
    assert [fact.text for fact in store.facts()] == ["By 2.", "By 3.", SAME]
    assert store.add(TWO).superseded == tuple(fact.id for fact in TWO)
    assert store.update(replace(TWO[0], text=SAME)).version == 3  # the text of the fact `c`
    assert store.delete(["c"]) == 1
    assert [fact.text for fact in store.facts(where={"source": "a.md"})] == [SAME]
    assert store.verify() == []  # type: ignore[attr-defined]


def test_a_search_in_banks_does_not_wait_for_the_embedding_of_new_facts(make_store: MakeStore) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(HashEmbedder):
        def embed(self, texts: Sequence[str]) -> Floats:
            if "slow" in texts:
                begun.set()
                assert go.wait(60)
            return super().embed(texts)

    store = make_store(Slow())
    store.add(facts_of(8))
    store.rebuild()
    with ThreadPoolExecutor(2) as pool:
        adding = pool.submit(store.add, [Fact("slow"), Fact("more")])
        assert begun.wait(60)
        try:
            hits = pool.submit(store.search, "q", 3, probes=1).result(timeout=30)
            # What others have added meanwhile is looked at again.
            assert store.add([Fact("more")]).added == 1
        finally:
            go.set()
        report = adding.result()
    assert (len(hits), report.added, report.duplicates, len(store)) == (3, 1, 1, 10)


def test_what_comes_later_joins_the_nearest_bank(make_store: MakeStore) -> None:
    embedder = HashEmbedder()
    store, facts = make_store(embedder, bank_size=5), facts_of(30)
    build(store, facts[:20])
    before = {bank: store.bank_facts(bank) for bank in store.banks()}
    vectors = {bank: embedder.embed([fact.text for fact in members]).sum(axis=0) for bank, members in before.items()}
    for fact in facts[20:]:
        assert store.add([fact]).added == 1
    changed = store.update(Fact("changed", id=facts[0].id))
    for fact in [*facts[20:], changed]:
        cosines = {
            bank: vectors[bank] @ embedder.embed_query(fact.text) / np.linalg.norm(vectors[bank]) for bank in before
        }
        assert store.bank_of([fact]) == [max(cosines, key=lambda bank: cosines[bank])]
    for bank, members in before.items():
        assert {fact for fact in members if fact.id != changed.id} <= set(store.bank_facts(bank))
    check(store, [changed, *facts[1:]])


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 200])
def test_banks_that_came_to_hold_twice_their_size_are_made_anew(make_store: MakeStore, at_once: int) -> None:
    store, facts = make_store(bank_size=5), facts_of(230)
    build(store, facts[:30])
    banks = len(store.banks())
    last = 10 * banks - 30
    store.add(facts[30 : 30 + last])
    assert len(store.banks()) <= banks
    for start in range(30 + last, 30 + last + at_once, at_once):
        store.add(facts[start : start + at_once])
    held = facts[: min(230, 30 + last + at_once)]
    assert len(store.banks()) >= len(held) / 10
    assert all(len(store.bank_facts(bank)) <= 10 for bank in store.banks())
    check(store, held)


def test_facts_that_go_leave_the_others_in_their_banks(make_store: MakeStore) -> None:
    store, facts = make_store(bank_size=8), facts_of(60)
    build(store, facts)
    before = {bank: store.bank_facts(bank) for bank in store.banks()}
    [emptied, *_] = before
    gone = {fact.id: fact for fact in [*facts[::2], *facts[1:40:2], *before[emptied]]}
    for fact in gone.values():
        assert store.delete([fact.id, "unknown"]) == 1
    left = {bank: tuple(fact for fact in members if fact.id not in gone) for bank, members in before.items()}
    assert {bank: store.bank_facts(bank) for bank in store.banks()} == {
        bank: held for bank, held in left.items() if held
    }
    # A question whose nearest bank is empty goes to the next one.
    assert emptied not in {store.search(fact.text, 1, probes=1)[0].bank for fact in before[emptied]}
    assert {hit.bank for hit in store.search(before[emptied][0].text, 99, probes=1)} == set(store.banks())
    with pytest.raises(FactError, match="expected one of `banks"):
        store.bank_facts(emptied)
    check(store, [fact for fact in facts if fact.id not in gone])
    assert store.delete(fact.id for fact in facts) == 60 - len(gone)
    assert (len(store), store.banks()) == (0, ())
    with pytest.raises(FactError, match="no facts yet"):
        store.search("q", probes=1)
    store.add(facts[:3])
    check(store, facts[:3])


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_changes_leaves_what_a_dictionary_holds(make_store: MakeStore, seed: int) -> None:
    draw, held = random.Random(seed), dict[str, Fact]()
    store = make_store(bank_size=4)
    for step in range(50):
        kind = draw.choice(["add", "add", "update", "delete", "banks"])
        if kind == "add":
            facts = [Fact(f"{step}/{number}", metadata={"step": step}) for number in range(draw.randint(1, 4))]
            store.add(facts)
            held.update({fact.id: fact for fact in facts})
        elif held and kind == "update":
            fact = Fact(f"update {step}", id=draw.choice(list(held)))
            held[fact.id] = store.update(fact)
            assert held[fact.id].text == f"update {step}"
        elif held and kind == "delete":
            ids = draw.sample(list(held), min(3, len(held)))
            assert store.delete(ids) == len(ids)
            held = {fact_id: fact for fact_id, fact in held.items() if fact_id not in ids}
        elif step % 3:
            assert sum(len(store.bank_facts(bank)) for bank in store.banks()) == len(held)
        else:
            store.rebuild()
    check(store, list(held.values()))
    store.rebuild()
    assert all(len(store.bank_facts(bank)) <= 2 * store.bank_size for bank in store.banks())
    check(store, list(held.values()))


def test_facts_expire(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    store = make_store(bank_size=3)
    build(store, facts_of(9))
    store.add([Fact("soon"), Fact("sooner", expires=1005.0)], ttl=60)
    assert store.search("soon", 1)[0].fact == Fact("soon", expires=1060.0)
    now[0] = 1005.0
    assert len(store) == 10
    with pytest.raises(FactError, match="no fact with the id"):
        store.get(Fact("sooner").id)
    now[0] = 1060.0
    assert Fact("soon").id not in {hit.fact.id for hit in store.search("soon", 99)}
    assert Fact("soon").id not in {hit.fact.id for hit in store.search("soon", 99, probes=1)}
    # What has expired may come again.
    assert store.add([Fact("soon")]).added == 1
    check(store, [*facts_of(9), Fact("soon")])
    for never in (0, 10**400, float("nan")):
        with pytest.raises(FactError, match="ttl="):
            store.add([Fact("x")], ttl=never)


def test_a_fact_is_renewed_if_it_is_still_the_same(make_store: MakeStore) -> None:
    store, now = make_store(embedder := HashEmbedder(), bank_size=3), time.time()
    build(store, facts_of(9))
    read = [Fact(f"{i}.", id=i, metadata={"n": [1, "a"]}, expires=now + 60) for i in ("same", "changed", "gone")]
    late = Fact("late.", id="late", expires=now - 1)
    store.add([*read, late])
    changed = store.update(replace(read[1], text="Changed."))
    store.delete(["gone"])
    count = embedder.embedded
    store.renew([replace(fact, expires=now + 99) for fact in (*read, late)])
    assert embedder.embedded == count
    check(store, [*facts_of(9), replace(read[0], expires=now + 99), changed])


def test_expired_facts_are_purged_by_namespace(make_store: MakeStore) -> None:
    store = make_store()
    store.add([Fact("a", namespace="my-a", expires=1.0), Fact("b", namespace="my-b"), Fact("c", expires=1.0)])
    for _ in range(2):
        assert store.purge("my-") == ["my-a", "my-b"]
        assert [fact.text for fact in store.stored()] == ["c", "b"]
    assert [fact.text for fact in store.facts()] == ["b"]


@pytest.mark.parametrize(
    "harm", [lambda rows: rows * 2, lambda rows: rows * np.nan, lambda rows: rows[:-1], lambda rows: rows[0]]
)
def test_an_embedder_that_breaks_its_word_is_named(harm: Callable[[Floats], Floats]) -> None:
    class Broken(HashEmbedder):
        def embed(self, texts: Sequence[str]) -> Floats:
            return harm(super().embed(texts))

    store = MemoryFactStore(Broken("the broken one"))
    with pytest.raises(FactError, match="the broken one"):
        store.add(facts_of(5))
    assert len(store) == 0


def test_threads_search_while_facts_are_added(make_store: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    store, done = make_store(bank_size=5), threading.Event()
    build(store, facts_of(30))

    def search() -> set[int]:
        sizes = set[int]()
        while not done.is_set():
            sizes.add(len(store.search("q", 7)))
            sizes.add(len(store.search("q", 7, probes=2)))
            assert store.search("fact number 3", 1)[0].fact.text == "fact number 3"
        return sizes

    with ThreadPoolExecutor(3) as pool:
        searches = [pool.submit(search) for _ in range(3)]
        try:
            for count in (40, 50, 60):
                store.add(facts_of(count))
            store.rebuild()
        finally:
            done.set()
        assert {size for result in searches for size in result.result()} == {7}
    check(store, facts_of(60))
    assert not caplog.text
