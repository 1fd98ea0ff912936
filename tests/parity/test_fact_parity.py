"""Facts in Chroma are found as the store in memory finds them, with the real embedder and the demo's facts."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kp_core.banks import ChromaFactStore, Fact, MemoryFactStore
from kp_core.banks.embed import SentenceTransformerEmbedder

DEMO = Path(__file__).parents[2] / "cookbooks" / "demo"
FACTS = 200


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def facts() -> list[Fact]:
    return [Fact(row["text"], title=row["title"], id=row["id"]) for row in rows_of("facts.jsonl")[:FACTS]]


QUESTIONS = [row["question"] for row in rows_of("questions.jsonl")]


class RememberingEmbedder(SentenceTransformerEmbedder):
    """The bundled model, embedding each question and each list of facts once for all tests."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_query = functools.cache(super().embed_query)  # type: ignore[method-assign]
        self._of_texts = functools.cache(super().embed)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._of_texts(tuple(texts))


@pytest.fixture(scope="module")
def memory() -> MemoryFactStore:
    store = MemoryFactStore(RememberingEmbedder())
    store.add(facts())
    return store


@pytest.fixture(scope="module")
def chroma(memory: MemoryFactStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChromaFactStore]:
    with ChromaFactStore(tmp_path_factory.mktemp("facts"), memory.embedder) as store:
        store.add(facts())
        yield store


@pytest.mark.parametrize(("k", "probes"), [(4, None), (50, None), (4, 1), (10, 3), (50, 1), (4, 99)])
def test_the_same_hits(chroma: ChromaFactStore, memory: MemoryFactStore, k: int, probes: int | None) -> None:
    assert len(QUESTIONS) == 40
    for question in QUESTIONS:
        hits, expected = (store.search(question, k, probes=probes) for store in (chroma, memory))
        assert [(hit.fact, hit.bank) for hit in hits] == [(hit.fact, hit.bank) for hit in expected], question
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        assert len(hits) == k


def test_the_same_banks(chroma: ChromaFactStore, memory: MemoryFactStore) -> None:
    assert chroma.banks() == memory.banks()
    assert len(chroma.banks()) >= FACTS / 20
    assert chroma.bank_of(facts()) == memory.bank_of(facts())
