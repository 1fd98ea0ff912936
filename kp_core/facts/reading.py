"""All that only looks at the facts of a store: searching, listing, banks as they are."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from kp_core.errors import FactError
from kp_core.facts.banking import Vectors
from kp_core.facts.base import Fact, Filter, Hit, Reranker
from kp_core.facts.embed import Embedder, as_embedder, checked_vectors
from kp_core.facts.filters import predicate
from kp_core.facts.rerank import hits_wanted, reranked
from kp_core.facts.table import Row, Table, alive

__all__ = ["SearchedFacts", "pages"]

_PAGE = 1000
_FIRST, _GROWTH = 8, 4


class SearchedFacts(ABC):
    """The reading half of a `FactStore` over tables; see there."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = as_embedder(embedder)
        self._writing = threading.RLock()

    @abstractmethod
    def _tables(self, namespace: str | None) -> list[Table]:
        """The tables of a namespace, or of all, in the order of their names; those that there are."""

    @abstractmethod
    def _with_banks(self, table: Table) -> Table:
        """`table`, with banks, unless it holds no facts."""

    def __len__(self) -> int:
        """See `FactStore`."""
        return sum(len(table) - len(table.expired(time.time())) for table in self._tables(None))

    def facts(
        self, *, ids: Sequence[str] | None = None, where: Filter | None = None, namespace: str | None = None
    ) -> Iterator[Fact]:
        """See `FactStore.facts`; read page by page, so what changes meanwhile may be seen or not."""
        test = predicate({} if where is None else where)
        for table in self._tables(namespace):
            rows = pages(table, where=where) if ids is None else table.rows(ids)
            yield from (row.fact for row in rows if alive(row.fact) and test(row.fact))

    def get(self, fact_id: str, *, namespace: str | None = None) -> Fact:
        """See `FactStore.get`."""
        for table in self._tables(namespace):
            for row in table.rows([fact_id]):
                if alive(row.fact):
                    return row.fact
        raise FactError(f"There is no fact with the id {fact_id!r}{_within(namespace)}.")

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
        """See `FactStore.search`."""
        wanted = hits_wanted(k, rerank)
        if probes is not None and (not isinstance(probes, int) or probes < 1):
            raise FactError(f"Got probes={probes!r}; expected at least 1.")
        predicate({} if where is None else where)
        query, tables = self._query(question), self._tables(namespace)
        if probes is None:
            found = [hit for table in tables for hit in table.nearest(query[None], wanted, where)[0]]
        else:
            found = self._probed(tables, query, wanted, probes, where)
        if not found:
            self._check_filled()
        best = sorted(found, key=lambda hit: (-hit.score, hit.fact.id))[:wanted]
        return reranked(question, best, rerank)[:k]

    def namespaces(self) -> tuple[str, ...]:
        """See `FactStore.namespaces`."""
        return tuple(table.namespace for table in self._tables(None) if len(table))

    def banks(self, namespace: str | None = None) -> tuple[str, ...]:
        """See `FactStore.banks`."""
        with self._writing:
            tables = [self._with_banks(table) for table in self._tables(namespace)]
            living = {(table.namespace, row.bank) for table in tables for row in pages(table) if alive(row.fact)}
        return tuple(_name(space, bank) for space, bank in sorted((s, b) for s, b in living if b is not None))

    def bank_facts(self, bank: str) -> tuple[Fact, ...]:
        """See `FactStore.bank_facts`."""
        space, _, number = bank.rpartition("/")
        with self._writing:
            for table in self._tables(space) if space and number.isdecimal() else ():
                if living := _living(self._with_banks(table), int(number)):
                    return tuple(row.fact for row in living)
        raise FactError(f"Got the bank {bank!r}; expected one of `banks()`, e.g. 'default/0'.")

    def bank_of(self, facts: Sequence[Fact]) -> list[str]:
        """See `FactStore.bank_of`."""
        names: dict[tuple[str, str], str] = {}
        for space in dict.fromkeys(fact.namespace for fact in facts):
            ids = [fact.id for fact in facts if fact.namespace == space]
            with self._writing:
                for table in self._tables(space):
                    rows = self._with_banks(table).rows(ids)
                    names |= {(space, row.fact.id): _name(space, row.bank) for row in rows if row.bank is not None}
        if missing := [fact.id for fact in facts if (fact.namespace, fact.id) not in names]:
            raise FactError(
                f"The facts {missing} stand in no bank: they were removed, never were in this store, or came while "
                "another process made banks. `rebuild()` puts all facts into banks."
            )
        return [names[fact.namespace, fact.id] for fact in facts]

    def route(self, question: str, *, namespace: str | None = None) -> str:
        """See `FactStore.route`."""
        query = self._query(question)
        with self._writing:
            for table, number in self._ranked(self._tables(namespace), query):
                if _living(table, number):
                    return _name(table.namespace, number)
        self._check_filled()
        raise FactError(f"There are no facts{_within(namespace)}.")

    def _probed(self, tables: list[Table], query: Vectors, wanted: int, probes: int, where: Filter | None) -> list[Hit]:
        """Hits in the `probes` nearest banks, and in further ones, nearest first, until there are enough."""
        test, found, looked = predicate({} if where is None else where), list[Hit](), 0
        with self._writing:
            for table, number in self._ranked(tables, query):
                if looked >= probes and len(found) >= wanted:
                    break
                rows = _living(table, number, vectors=True)
                bank, looked = _name(table.namespace, number), looked + bool(rows)
                found += [Hit(row.fact, float(np.dot(row.vector, query)), bank) for row in rows if test(row.fact)]
        return found

    def _ranked(self, tables: list[Table], query: Vectors) -> Iterator[tuple[Table, int]]:
        """The banks of all these tables, those with the nearest centroids first."""
        tables, count, given = [self._with_banks(table) for table in tables], _FIRST, 0
        while True:
            near = [(cosine, table, n) for table in tables for n, cosine in table.nearest_banks(query[None], count)[0]]
            ranked = sorted(near, key=lambda bank: -bank[0])[:count]
            yield from ((table, number) for _, table, number in ranked[given:])
            if len(ranked) < count:
                return
            count, given = _GROWTH * count, count

    def _check_filled(self) -> None:
        if not any(len(table) for table in self._tables(None)):
            raise FactError("The store holds no facts yet. Call `add(facts)` with at least one first.")

    def _query(self, question: str) -> Vectors:
        if not question.strip():
            raise FactError(f"Got the blank question {question!r}; expected words to search for.")
        if any("\ud800" <= letter <= "\udfff" for letter in question):
            raise FactError(f"Got the question {question!r}, which is not Unicode. Decode it with errors='replace'.")
        vector = np.asarray(self.embedder.embed_query(question))[None]
        found: Vectors = checked_vectors(vector, (1, vector.shape[-1]), self.embedder)[0]
        return found


def pages(table: Table, *, vectors: bool = False, where: Filter | None = None) -> Iterator[Row]:
    """The rows of `table`, read page by page; those alone that match `where`, as far as the table can tell."""
    start = 0
    while page := table.page(start, _PAGE, vectors=vectors, where=where):
        yield from page
        start += len(page)


def _living(table: Table, number: int, *, vectors: bool = False) -> list[Row]:
    return [row for row in table.bank(number, vectors=vectors) if alive(row.fact)]


def _name(namespace: str, number: int) -> str:
    return f"{namespace}/{number}"


def _within(namespace: str | None) -> str:
    return "" if namespace is None else f" in the namespace {namespace!r}"
