"""What a fact bank answers: questions, facts by id, banks by number."""

from __future__ import annotations

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import BankError
from kp_core.facts.base import Fact, Filter, Hit, Reranker
from kp_core.facts.embed import Embedder, checked_vectors
from kp_core.facts.index import Calibration, Index
from kp_core.facts.rerank import hits_wanted, reranked
from kp_core.facts.rows import Rows, Vectors
from kp_core.facts.table import FactTable

__all__ = ["SearchedBank"]


class SearchedBank(ABC):
    """The facts of a bank, their vectors and banks, and all that only looks at them."""

    def __init__(
        self,
        embedder: Embedder,
        *,
        bank_size: int = 20,
        random_state: int = 0,
        recall: float = 0.99,
        near_duplicate: float = 0.97,
    ) -> None:
        if bank_size < 1:
            raise BankError(f"Got bank_size={bank_size}; expected at least 1.")
        if not 0 < recall <= 1:
            raise BankError(f"Got recall={recall}; expected a share in (0, 1], e.g. 0.99.")
        self.embedder, self.bank_size, self.random_state = embedder, bank_size, random_state
        self.recall, self.near_duplicate = recall, near_duplicate
        self._lock, self._writing = threading.RLock(), threading.RLock()
        self._table = FactTable()
        self._rows, self._index = self._new_rows(), None  # type: tuple[Rows, Index | None]

    @abstractmethod
    def _new_rows(self) -> Rows:
        """An empty table of vectors."""

    @abstractmethod
    def _followed(self, added: Sequence[int], removed: Sequence[Fact]) -> None:
        """The changes are seen now: rows that came and facts that went."""

    @property
    def calibration(self) -> Calibration | None:
        """What was measured when the banks were made; `None` before the first fact."""
        return self._index.calibration if self._index else None

    @property
    def banks(self) -> int:
        """See `FactBank.banks`."""
        with self._lock:
            self._refresh()
            return len(self._index.banks) if self._index and len(self._table) else 0

    @property
    def centroids(self) -> Vectors:
        """The normalised mean of each bank, shape `(banks, dimensions)`."""
        with self._lock:
            return self._built().banks.centroids.copy()

    def __len__(self) -> int:
        with self._lock:
            self._refresh()
            return len(self._table)

    def facts(self) -> Iterator[Fact]:
        """See `FactBank.facts`."""
        with self._lock:
            self._refresh()
            return iter([self._table[int(row)] for row in self._table.rows()])

    def get(self, fact_id: str) -> Fact:
        """See `FactBank.get`."""
        with self._lock:
            self._built()
            return self._table[self._table.row(fact_id)]

    def bank_of(self, fact_id: str) -> int:
        """See `FactBank.bank_of`."""
        with self._lock:
            return int(self._built().banks.labels[self._table.row(fact_id)])

    def bank_facts(self, bank: int) -> tuple[Fact, ...]:
        """See `FactBank.bank_facts`."""
        with self._lock:
            banks = self._built().banks
            if not 0 <= bank < len(banks):
                raise BankError(f"Got bank {bank}; expected 0 to {len(banks) - 1}.")
            return tuple(self._table[int(row)] for row in np.sort(banks.members[bank]))

    def route(self, question: str) -> int:
        """See `FactBank.route`."""
        query = self._query(question)
        with self._lock:
            return int(self._built().banks.nearest(query, 1)[0])

    def ranks(self, question: str) -> list[int]:
        """All banks in the order in which a search looks at them: nearest to `question` first."""
        query = self._query(question)
        with self._lock:
            return [int(bank) for bank in self._built().banks.order(query)]

    def search(  # noqa: PLR0913 - what may be asked for, each with a default that works
        self,
        question: str,
        k: int = 4,
        *,
        probes: int | None = None,
        where: Filter | None = None,
        namespace: str | None = None,
        rerank: Reranker | None = None,
    ) -> list[Hit]:
        """See `FactBank.search`."""
        wanted = hits_wanted(k, rerank)
        if probes is not None and probes < 1:
            raise BankError(f"Got probes={probes}; expected at least 1.")
        hits = self.search_vector(self._query(question), wanted, probes=probes, where=where, namespace=namespace)
        return reranked(question, hits, rerank)[:k]

    def search_vector(
        self,
        query: NDArray[np.float32],
        k: int = 4,
        *,
        probes: int | None = None,
        where: Filter | None = None,
        namespace: str | None = None,
    ) -> list[Hit]:
        """As `search`, for a question that was embedded already: a vector of length 1."""
        with self._lock:
            index = self._built()
            rows, scores = index.search(query, k, probes, self._table.allowed(where, namespace))
            found = (
                (-score, self._table[row].id, row) for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
            )
            labels = index.banks.labels
            return [Hit(self._table[row], -score, int(labels[row])) for score, _, row in heapq.nsmallest(k, found)]

    def _refresh(self) -> None:
        """Drop what has expired."""
        with self._lock:
            gone = self._table.expire(time.time())
            for row, _ in gone:
                if self._index:
                    self._index.banks.remove(row)
        if gone:
            self._followed((), [fact for _, fact in gone])

    def _built(self) -> Index:
        self._refresh()
        if self._index is None or not len(self._table):
            raise BankError("The bank is empty: bank not built. Call `build(facts)` with at least one fact first.")
        return self._index

    def _query(self, question: str) -> NDArray[np.float32]:
        self._built()
        if not question.strip():
            raise BankError(f"Got the blank question {question!r}; expected words to search for.")
        vector: NDArray[np.float32] = self._checked(np.asarray(self.embedder.embed_query(question))[None], 1)[0]
        return vector

    def _embed(self, facts: Sequence[Fact]) -> Vectors:
        """Vectors of `facts`; the embedder is not asked when there are none."""
        if not facts:
            return np.zeros((0, 0), np.float32)
        return self._checked(self.embedder.embed([fact.text for fact in facts]), len(facts))

    def _checked(self, vectors: NDArray[np.float32], count: int) -> Vectors:
        return checked_vectors(np.asarray(vectors), (count, self._rows.dimensions or vectors.shape[-1]), self.embedder)
