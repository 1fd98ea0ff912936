"""From a question to banks: clustering, and the part of a bank that does not depend on where vectors are kept."""

from __future__ import annotations

import heapq
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kp_core.banks.base import Fact, Hit
from kp_core.embed import Embedder
from kp_core.errors import BankError, MissingDependencyError

__all__ = ["Clustering", "RoutedBank", "Vectors", "cluster"]

logger = logging.getLogger(__name__)

Vectors = NDArray[np.float32]
"""Rows of length 1, shape `(facts, dimensions)`."""

# Where k-means starts decides where it ends; of this many starts the tightest clustering is kept.
_STARTS = 4
_UNIT_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Clustering:
    """Which fact stands in which bank.

    `labels`: int64, shape `(facts,)`, the bank of each fact. `centroids`: shape `(banks, dimensions)`, the normalised
    mean of each bank. `bank_size` and `random_state` are what it was made with.
    """

    labels: NDArray[np.int64]
    centroids: Vectors
    bank_size: int
    random_state: int

    @property
    def banks(self) -> int:
        """Number of banks, none of them empty."""
        return len(self.centroids)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Facts per bank, shape `(banks,)`."""
        return np.bincount(self.labels, minlength=self.banks)

    def rows(self, banks: Sequence[int]) -> NDArray[np.intp]:
        """The facts of these banks, ascending."""
        return np.flatnonzero(np.isin(self.labels, banks))

    def order(self, query: NDArray[np.float32]) -> NDArray[np.intp]:
        """All banks, nearest to `query` first; of equals the lower number first."""
        return np.argsort(-(self.centroids @ query), kind="stable")

    def probe(self, query: NDArray[np.float32], k: int, probes: int) -> list[int]:
        """The `probes` nearest banks, and as many more as it takes to have `k` facts."""
        order = self.order(query)
        enough = int(np.searchsorted(np.cumsum(self.sizes[order]), k)) + 1
        return [int(bank) for bank in order[: max(probes, enough)]]


def cluster(vectors: Vectors, bank_size: int, random_state: int) -> Clustering:
    """`vectors` in `ceil(facts / bank_size)` banks by k-means (fewer when there are fewer different vectors).

    Raises `MissingDependencyError` where scikit-learn is absent.
    """
    try:
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError(
            'Building a fact bank needs scikit-learn: `pip install "knowledge-packs[embed]"`.'
        ) from error
    banks = min(math.ceil(len(vectors) / bank_size), len({row.tobytes() for row in vectors}))
    means = KMeans(banks, n_init=_STARTS, tol=0.0, random_state=random_state)
    # One thread adds up in one order: the same facts get the same banks on any number of cores. And where other work
    # keeps the cores busy, threads that wait for each other take ten times as long.
    with threadpool_limits(1):
        means.fit(vectors)
    _, labels = np.unique(means.labels_, return_inverse=True)
    sums = np.zeros((int(labels.max()) + 1, vectors.shape[1]))
    np.add.at(sums, labels, vectors)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    # Opposite vectors may cancel out; such a bank is near to nothing and is found last.
    centroids = np.divide(sums, lengths, out=np.zeros_like(sums), where=lengths > 0).astype(np.float32)
    return Clustering(labels.astype(np.int64), centroids, bank_size, random_state)


class RoutedBank(ABC):
    """A fact bank but for its vectors: a subclass says where they are kept and how they are scored."""

    def __init__(self, embedder: Embedder, *, bank_size: int = 20, random_state: int = 0) -> None:
        if bank_size < 1:
            raise BankError(f"Got bank_size={bank_size}; expected at least 1.")
        self.embedder, self.bank_size, self.random_state = embedder, bank_size, random_state
        self._lock = threading.RLock()
        self._clustering: Clustering | None = None
        self._set_facts(())

    @abstractmethod
    def _vectors(self) -> Vectors:
        """The vectors of the facts held."""

    @abstractmethod
    def _store(self, new: Sequence[Fact], vectors: Vectors, clustering: Clustering) -> None:
        """Keep `new` facts, and vectors and banks of all."""

    @abstractmethod
    def _scores(self, query: NDArray[np.float32], banks: Sequence[int]) -> Iterable[tuple[int, float]]:
        """Every fact of `banks` with its cosine to `query`."""

    def build(self, facts: Iterable[Fact]) -> None:
        """See `FactBank.build`. `bank_size` and `random_state` are those of this object, whatever was used before."""
        with self._lock:
            new, held = self._new(facts), self._clustering
            same = held and (held.bank_size, held.random_state) == (self.bank_size, self.random_state)
            if not new and (same or not self._facts):
                return
            vectors = self._embed(new)
            if self._facts:
                vectors = np.concatenate([self._vectors(), vectors]) if new else self._vectors()
            clustering = cluster(vectors, self.bank_size, self.random_state)
            self._store(new, vectors, clustering)
            self._set_facts((*self._facts, *new))
            self._clustering = clustering
            logger.info("Built %d banks of %d facts.", clustering.banks, len(self._facts))

    @property
    def banks(self) -> int:
        """See `FactBank.banks`."""
        return self._clustering.banks if self._clustering else 0

    def __len__(self) -> int:
        return len(self._facts)

    def facts(self) -> Iterator[Fact]:
        """See `FactBank.facts`."""
        return iter(self._facts)

    def get(self, fact_id: str) -> Fact:
        """See `FactBank.get`."""
        with self._lock:
            self._built()
            return self._facts[self._row(fact_id)]

    def bank_of(self, fact_id: str) -> int:
        """See `FactBank.bank_of`."""
        with self._lock:
            return int(self._built().labels[self._row(fact_id)])

    def bank_facts(self, bank: int) -> tuple[Fact, ...]:
        """See `FactBank.bank_facts`."""
        with self._lock:
            clustering = self._built()
            if not 0 <= bank < clustering.banks:
                raise BankError(f"Got bank {bank}; expected 0 to {clustering.banks - 1}.")
            return tuple(self._facts[row] for row in clustering.rows([bank]))

    def route(self, question: str) -> int:
        """See `FactBank.route`."""
        query = self._query(question)
        with self._lock:
            return int(self._built().order(query)[0])

    def search(self, question: str, k: int = 4, *, probes: int = 1) -> list[Hit]:
        """See `FactBank.search`."""
        for name, value in (("k", k), ("probes", probes)):
            if value < 1:
                raise BankError(f"Got {name}={value}; expected at least 1.")
        query = self._query(question)
        with self._lock:
            clustering = self._built()
            scores = self._scores(query, clustering.probe(query, k, probes))
            best = heapq.nsmallest(k, ((-score, self._facts[row].id, row) for row, score in scores))
            return [
                Hit(self._facts[row], min(1.0, max(-1.0, -score)), int(clustering.labels[row]))
                for score, _, row in best
            ]

    def _built(self) -> Clustering:
        if self._clustering is None:
            raise BankError("The bank is empty: bank not built. Call `build(facts)` with at least one fact first.")
        return self._clustering

    def _row(self, fact_id: str) -> int:
        row = self._rows.get(fact_id)
        if row is None:
            raise BankError(f"Got the fact id {fact_id!r}; none of the {len(self._facts)} facts has it.")
        return row

    def _set_facts(self, facts: tuple[Fact, ...]) -> None:
        self._facts = facts
        self._rows = {fact.id: row for row, fact in enumerate(facts)}
        self._texts = {fact.text for fact in facts}

    def _new(self, facts: Iterable[Fact]) -> list[Fact]:
        """Those of `facts` whose text is not held, each once."""
        texts, ids, new = set(self._texts), set(self._rows), list[Fact]()
        for fact in facts:
            if not isinstance(fact, Fact):
                raise BankError(f"Got {fact!r}; expected a Fact, e.g. `Fact(text)`.")
            if fact.text in texts:
                continue
            if fact.id in ids:
                raise BankError(
                    f"Got the id {fact.id!r} for two texts; the second is {fact.text[:60]!r}. Ids are unique."
                )
            texts.add(fact.text)
            ids.add(fact.id)
            new.append(fact)
        return new

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
        # An embedder is the user's code; what it returns goes into an index that would take anything.
        vectors = np.ascontiguousarray(vectors, np.float32)
        width = self._clustering.centroids.shape[1] if self._clustering else vectors.shape[-1]
        if vectors.shape != (count, width):
            raise BankError(
                f"The embedder {self.embedder.name!r} gave an array of shape {vectors.shape}; "
                f"expected {(count, width)}."
            )
        lengths = np.linalg.norm(vectors, axis=1)
        if not np.allclose(lengths, 1.0, atol=_UNIT_TOLERANCE):
            worst = lengths[np.argmax(np.abs(lengths - 1.0))]
            raise BankError(f"The embedder {self.embedder.name!r} gave a row of length {worst:.4g}; expected length 1.")
        return vectors
