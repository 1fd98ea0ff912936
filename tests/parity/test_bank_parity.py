"""The Chroma bank finds what the memory bank finds, with the real embedder and the demo facts."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kp_core.facts import ChromaFactBank, Fact, FactBank, MemoryFactBank
from kp_core.facts.embed import SentenceTransformerEmbedder
from kp_core.facts.rows import ByteRows

DEMO = Path(__file__).parents[2] / "cookbooks" / "demo"
FACTS = 300


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def facts() -> list[Fact]:
    return [Fact(row["text"], title=row["title"], id=row["id"]) for row in rows_of("facts.jsonl")[:FACTS]]


QUESTIONS = [row["question"] for row in rows_of("questions.jsonl")]


class RememberingEmbedder(SentenceTransformerEmbedder):
    """The bundled model, embedding each question once for all tests; facts are embedded whenever a bank asks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_query = functools.cache(super().embed_query)  # type: ignore[method-assign]


class RoundingEmbedder:
    """Another embedder, but for facts with vectors rounded as a bank on disk rounds them."""

    def __init__(self, embedder: SentenceTransformerEmbedder) -> None:
        self.name, self.dimensions, self._embedder = embedder.name, embedder.dimensions, embedder
        self.embed_query = embedder.embed_query

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = ByteRows()
        rows.append(self._embedder.embed(texts))
        return rows.vectors(slice(None))


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    return RememberingEmbedder()


@pytest.fixture(scope="module")
def memory(embedder: SentenceTransformerEmbedder) -> MemoryFactBank:
    bank = MemoryFactBank(RoundingEmbedder(embedder))
    bank.build(facts())
    return bank


@pytest.fixture(scope="module")
def folder(embedder: SentenceTransformerEmbedder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bank")
    with ChromaFactBank(path, embedder) as bank:
        bank.build(facts())
    return path


@pytest.fixture
def chroma(folder: Path, embedder: SentenceTransformerEmbedder) -> Iterator[ChromaFactBank]:
    with ChromaFactBank(folder, embedder) as bank:
        yield bank


def check_same(bank: FactBank, reference: FactBank, k: int, probes: int) -> None:
    for question in QUESTIONS:
        hits, expected = (each.search(question, k, probes=probes) for each in (bank, reference))
        assert [(hit.fact, hit.bank) for hit in hits] == [(hit.fact, hit.bank) for hit in expected], question
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        assert len(hits) == k
        assert bank.route(question) == reference.route(question)


@pytest.mark.parametrize(("k", "probes"), [(4, 1), (10, 3), (50, 1), (4, 99)])
def test_the_same_hits(chroma: ChromaFactBank, memory: MemoryFactBank, k: int, probes: int) -> None:
    assert len(QUESTIONS) == 40
    check_same(chroma, memory, k, probes)


def test_the_same_banks(chroma: ChromaFactBank, memory: MemoryFactBank) -> None:
    assert chroma.banks == memory.banks == 15
    assert [chroma.bank_of(fact.id) for fact in facts()] == [memory.bank_of(fact.id) for fact in facts()]


def test_the_same_hits_after_chroma_was_deleted(
    folder: Path,
    memory: MemoryFactBank,
    embedder: SentenceTransformerEmbedder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (part,) = copy.glob("chroma-*")
    shutil.rmtree(part)
    with ChromaFactBank(copy, embedder) as bank:
        assert "Chroma has to be rebuilt (it is missing)" in caplog.text
        check_same(bank, memory, 4, 1)


def test_rounding_moves_scores_by_less_than_said(chroma: ChromaFactBank, embedder: SentenceTransformerEmbedder) -> None:
    texts = [fact.text for fact in chroma.facts()]
    vectors = embedder.embed(texts)
    for question in QUESTIONS:
        exact = dict(zip(texts, vectors @ embedder.embed_query(question), strict=True))
        hits = chroma.search(question, len(texts), probes=chroma.banks)
        assert max(abs(hit.score - exact[hit.fact.text]) for hit in hits) < 0.005
