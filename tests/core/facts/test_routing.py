"""Routing: what probing finds against what flat search finds, sketches, calibration, filters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kp_core.errors import BankError
from kp_core.facts import Calibration, ChromaFactBank, Fact, MemoryFactBank
from kp_core.facts.clusters import cluster
from kp_core.facts.filters import predicate
from kp_core.facts.index import Index
from kp_core.facts.rows import ByteRows, FloatRows, Rows
from kp_core.facts.sketch import Sketches
from tests.core.facts.test_facts import HashEmbedder, facts_of

Floats = NDArray[np.float32]


def topics(count: int, dimensions: int = 64, seed: int = 0) -> Floats:
    """Unit vectors around a few hundred topics, as those of real text are."""
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((max(2, count // 30), dimensions))
    vectors = centres[draw.integers(len(centres), size=count)] + 0.7 * draw.standard_normal((count, dimensions))
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def index_of(rows: Rows, vectors: Floats, bank_size: int = 20) -> Index:
    rows.append(vectors)
    return Index(rows, cluster(rows, np.arange(len(rows)), bank_size, 0), bank_size, 0)


def found(index: Index, question: Floats, k: int, probes: int | None = None) -> list[int]:
    rows, scores = index.search(question, k, probes)
    return [row for _, row in sorted(zip(-scores, rows.tolist(), strict=True))][:k]


@pytest.mark.parametrize("kind", [FloatRows, ByteRows])
def test_all_banks_are_flat_search(kind: type[Rows]) -> None:
    index = index_of(kind(), topics(3000))
    exact = index.rows.vectors(slice(None))
    for question in topics(20, seed=1):
        scores = np.einsum("fd,d->f", exact, question)
        expected = sorted(range(3000), key=lambda row: (-scores[row], row))[:9]
        assert found(index, question, 9, probes=len(index.banks)) == expected


@pytest.mark.parametrize("target", [0.9, 0.99])
def test_calibrated_probes_reach_the_target_on_other_questions(target: float) -> None:
    vectors = topics(4200)
    index = index_of(ByteRows(), vectors[:4000])
    index.calibration = index.calibrate(target, 5, 0)
    about = index.calibration
    assert about.recall >= target
    assert 1 <= about.probes < len(index.banks)
    assert about.shortlist < 4000
    shares = []
    for question in vectors[4000:]:
        flat = found(index, question, 5, probes=len(index.banks))
        shares.append(len(set(flat) & set(found(index, question, 5))) / 5)
    assert np.mean(shares) >= target


def test_where_most_banks_are_asked_for_all_are_searched() -> None:
    def of(probes: int, banks: int) -> Calibration:
        return Calibration(0.99, 1.0, probes, 512, 512, 5, 256, banks, 20 * banks)

    assert [of(3, 100).probes_of(banks) for banks in (1, 100, 150, 200)] == [1, 3, 5, 6]
    assert [of(50, 100).probes_of(banks) for banks in (1, 100, 150)] == [1, 100, 150]


def test_a_higher_target_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(FloatRows(), topics(2000))
    low, high = (index.calibrate(target, 5, 0) for target in (0.8, 0.999))
    assert low.probes < high.probes
    everything = index.calibrate(1.0, 5, 0)
    assert everything.recall == 1.0


@pytest.mark.parametrize(("target", "k"), [(0, 5), (1.1, 5), (0.9, 0)])
def test_senseless_targets_are_refused(target: float, k: int) -> None:
    with pytest.raises(BankError, match="expected a target"):
        index_of(FloatRows(), topics(50)).calibrate(target, k, 0)


def test_probes_keep_their_share_as_a_bank_grows() -> None:
    about = Calibration(0.99, 0.995, probes=10, longlist=512, shortlist=256, k=5, sample=256, banks=100, facts=2000)
    assert [about.probes_of(banks) for banks in (1, 5, 50, 100, 101, 1000)] == [1, 1, 5, 10, 11, 100]


def test_lists_grow_with_a_bank_that_was_calibrated_before(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(FloatRows(), topics(3000))
    index.calibration = Calibration(
        0.99, 1.0, probes=9, longlist=700, shortlist=600, k=5, sample=256, banks=9, facts=90
    )
    assert index._lists(5) == (700, 600)
    monkeypatch.setattr("kp_core.facts.index._LISTED_OF", 2)
    monkeypatch.setattr("kp_core.facts.index._SCORED_OF", 4)
    assert index._lists(5) == (1500, 750)
    assert index._lists(100) == (1500, 800)


def test_calibration_is_kept_and_may_be_asked_for_again(tmp_path) -> None:
    with ChromaFactBank(tmp_path, HashEmbedder(), mirror=False, recall=0.9) as bank:
        assert bank.calibration is None
        bank.build(facts_of(200))
        about = bank.calibration
        assert about is not None
        assert (about.target, about.banks, about.facts) == (0.9, 10, 200)
    with ChromaFactBank(tmp_path, HashEmbedder(), mirror=False) as bank:
        assert bank.calibration == about
        new = bank.calibrate(1.0, k=3)
        assert (new.target, new.k) == (1.0, 3)
    with ChromaFactBank(tmp_path, HashEmbedder(), mirror=False) as bank:
        assert bank.calibration == new
    with pytest.raises(BankError, match="recall=0"):
        MemoryFactBank(HashEmbedder(), recall=0)


def test_sketches_differ_in_as_many_bits_as_signs_do() -> None:
    rows, vectors = FloatRows(), topics(300, dimensions=70)
    rows.append(vectors[:200])
    sketches = Sketches(rows, np.arange(200))
    rows.append(vectors[200:])
    sketches.extend()
    centre = vectors[:200].mean(0, dtype=np.float64).astype(np.float32)
    signs, question = vectors > centre, topics(1, dimensions=70, seed=3)[0]
    expected = (signs != (question > centre)).sum(1)
    assert sketches.distances(np.arange(300), question).tolist() == expected.tolist()
    chosen = sketches.nearest(np.arange(300), question, 20)
    assert chosen.tolist() == np.flatnonzero(expected <= np.sort(expected)[19]).tolist()


@pytest.mark.parametrize("dimensions", [40, 70, 384, 1024])
@pytest.mark.parametrize("sample", [8192, 64])
def test_half_sketches_leave_out_what_the_longlist_has_no_room_for(
    dimensions: int, sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kp_core.facts.sketch._SAMPLE", sample)
    rows, vectors = FloatRows(), topics(600, dimensions)
    rows.append(vectors)
    sketches = Sketches(rows, np.arange(600))
    inside, question = np.arange(600) % 7 > 0, topics(1, dimensions, seed=3)[0]
    everything = sketches.nearest(np.flatnonzero(inside), question, 9)
    assert sketches.nearest_of_all(question, 9, 600, inside).tolist() == everything.tolist()
    centre = vectors.mean(0, dtype=np.float64).astype(np.float32)
    bits = (vectors > centre) != (question > centre)
    half = bits[:, : 64 * -(-dimensions // 128)].sum(1)
    assert sketches.halves(slice(0, 600), question).tolist() == half.tolist()
    listed = sketches.nearest_of_all(question, 9, 60, inside)
    assert inside[listed].all()
    assert len(listed) >= 9
    # None is left out that differs less in the first half than one that was looked at, and less over all.
    better = inside & (half < half[listed].max()) & (bits.sum(1) < bits.sum(1)[listed].max())
    assert set(np.flatnonzero(better)) <= set(listed.tolist())


def test_a_sample_that_misleads_costs_time_and_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kp_core.facts.sketch._SAMPLE", 60)
    rows, question = FloatRows(), topics(1)[0]
    near, far = topics(540, seed=1), question + 0.01 * topics(60, seed=2)
    # One in ten is as the question is, and these are all that is looked at.
    vectors = np.concatenate([np.concatenate([far[at : at + 1], near[9 * at : 9 * at + 9]]) for at in range(60)])
    rows.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    sketches = Sketches(rows, np.arange(600))
    inside = np.ones(600, np.bool_)
    found = sketches.nearest_of_all(question, 100, 100, inside)
    assert found.tolist() == sketches.nearest(np.arange(600), question, 100).tolist()


def test_large_banks_are_divided_before_they_are_clustered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kp_core.facts.clusters._AT_ONCE", 500)
    monkeypatch.setattr("kp_core.facts.clusters._PART", 300)
    rows = FloatRows()
    rows.append(topics(3000))
    labels = cluster(rows, np.arange(3000), 20, 0)
    assert set(labels.tolist()) == set(range(labels.max() + 1))
    assert 140 <= labels.max() + 1 <= 165
    assert np.array_equal(labels, cluster(rows, np.arange(3000), 20, 0))


# Filters

FACTS = [
    Fact("a", source="x.md", metadata={"year": 1990, "lang": "en"}),
    Fact("b", source="x.md", metadata={"year": 2000, "lang": "de"}),
    Fact("c", source="y.md", metadata={"year": 2010, "public": True}),
    Fact("d", metadata={"year": "2010", "tags": '["sea", 3]'}, namespace="n"),
]


@pytest.mark.parametrize(
    ("where", "texts"),
    [
        ({}, "abcd"),
        ({"year": 2000}, "b"),
        ({"year": {"$gte": 2000}}, "bc"),
        ({"year": {"$gt": 1990, "$lt": 2010}}, "b"),
        ({"year": {"$lte": "2010"}}, "d"),
        ({"lang": {"$ne": "en"}}, "bcd"),
        ({"lang": {"$in": ["en", "de"]}}, "ab"),
        ({"lang": {"$nin": ["en", "de"]}}, "cd"),
        ({"source": "x.md", "lang": "de"}, "b"),
        ({"$or": [{"lang": "en"}, {"source": "y.md"}]}, "ac"),
        ({"$and": [{"source": "x.md"}, {"year": {"$lt": 1995}}]}, "a"),
        ({"public": True}, "c"),
        ({"public": 1}, ""),
        ({"namespace": "n"}, "d"),
        ({"nothing": "x"}, ""),
        ({"$not": {"lang": "de"}}, "acd"),
        ({"lang": {"$exists": True}}, "ab"),
        ({"lang": {"$exists": False}}, "cd"),
        ({"source": {"$contains": ".m"}}, "abc"),
        ({"source": {"$icontains": "X.M"}}, "ab"),
        ({"year": {"$contains": 2010}}, ""),
        ({"tags": {"$contains": "sea"}}, "d"),
        ({"tags": {"$contains": "se"}}, ""),
        ({"tags": {"$contains": 3}}, "d"),
        ({"year": {"$number": {"$gte": 2010}}}, "cd"),
        ({"year": {"$number": {"$in": [1990, 2010.0]}}}, "acd"),
        ({"public": {"$number": {"$eq": 1}}}, "c"),
        ({"lang": {"$number": {"$ne": 1}}}, "abcd"),
    ],
)
def test_filters(where: dict[str, object], texts: str) -> None:
    assert "".join(fact.text for fact in FACTS if predicate(where)(fact)) == texts
    bank = MemoryFactBank(HashEmbedder(), bank_size=1)
    bank.build(FACTS)
    assert sorted(hit.fact.text for hit in bank.search("q", 9, where=where)) == list(texts)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("x", "expected a dictionary"),
        ({"$not": []}, "expected a dictionary"),
        ({"$near": []}, "name of a field"),
        ({"year": {"$number": 3}}, "no condition"),
        ({"year": {"$number": {"$near": 3}}}, "operator '\\$near'"),
        ({"$or": {}}, "list of filters"),
        ({"$and": []}, "list of filters"),
        ({"year": {}}, "no condition"),
        ({"year": {"$near": 3}}, "operator '\\$near'"),
        ({"year": {"$in": "abc"}}, "list of values"),
        ({"year": {"$gt": None}}, "expected a string"),
        ({"year": [1]}, "expected a string"),
    ],
)
def test_senseless_filters_are_refused(where: object, words: str) -> None:
    with pytest.raises(BankError, match=words):
        predicate(where)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 80),
    every=st.integers(1, 20),
    k=st.integers(1, 30),
    probes=st.integers(1, 9),
    gone=st.integers(0, 20),
)
def test_a_filtered_search_is_a_search_among_those_it_lets_through(
    count: int, every: int, k: int, probes: int, gone: int
) -> None:
    embedder = HashEmbedder()
    bank = MemoryFactBank(embedder, bank_size=6)
    facts = [Fact(f"{number}", metadata={"rest": number % every}) for number in range(count)]
    bank.build(facts)
    bank.search("q", 1, where={"rest": 0})
    bank.delete(fact.id for fact in facts[:gone])
    bank.add([Fact("new", metadata={"rest": 0})])
    held = [fact for fact in bank.facts() if fact.metadata["rest"] == 0]
    hits = bank.search("q", k, probes=probes, where={"rest": 0})
    assert len(hits) == min(k, len(held))
    assert all(hit.fact in held for hit in hits)
    query = embedder.embed_query("q")
    order = sorted(held, key=lambda fact: (-float(np.einsum("d,d", embedder.embed_query(fact.text), query)), fact.id))
    flat = bank.search("q", k, probes=bank.banks, where={"rest": 0})
    assert [hit.fact for hit in flat] == order[:k]
    # The nearest `probes` banks that hold any are looked at, however far they are.
    nearest = bank._index.banks.order(query) if bank._index else []
    inside = list(dict.fromkeys(int(b) for b in nearest if any(bank.bank_of(fact.id) == b for fact in held)))
    sure = set(itertools.islice(inside, probes))
    best = [fact for fact in order if bank.bank_of(fact.id) in sure][: min(k, len(hits))]
    assert min(hit.score for hit in hits) <= 1
    if len(best) == k:
        assert [hit.fact for hit in hits] == best
