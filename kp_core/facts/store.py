"""A fact store over tables: finds facts, adds and removes them, and groups them into banks."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from kp_core.errors import BankError
from kp_core.facts.banking import BANK_SIZE, LARGEST, Vectors, cluster
from kp_core.facts.base import LATEST, Added, Fact, Filter, Hit, NearDuplicate, Reranker
from kp_core.facts.embed import Embedder, as_embedder, checked_vectors
from kp_core.facts.filters import predicate
from kp_core.facts.rerank import hits_wanted, reranked

__all__ = ["Row", "Table", "TableFactStore", "alive"]

logger = logging.getLogger(__name__)

_BATCH, _PAGE, _SAMPLE = 512, 1000, 32
# How many banks are ranked at first, and how many times more when those hold too few facts.
_FIRST, _GROWTH = 8, 4
# Cosine of a text's vector in the store and its vector made anew: models round, and batches pad.
_SAME = 0.999


class Row(NamedTuple):
    """A fact, its vector (without numbers where that was not asked for), and the number of its bank."""

    fact: Fact
    vector: Vectors
    bank: int | None = None


class Table(Protocol):
    """The facts and banks of one namespace. Facts come back in the order they came in, expired ones too."""

    namespace: str

    def __len__(self) -> int:
        """Number of facts."""

    def ids(self) -> list[str]:
        """The ids of all facts."""

    def rows(self, ids: Sequence[str], *, vectors: bool = False) -> list[Row]:
        """The facts with these ids, as far as there are any."""

    def page(self, start: int, count: int, *, vectors: bool = False, where: Filter | None = None) -> list[Row]:
        """`count` facts from number `start` on; of those that match `where`, where it can tell, else of all."""

    def holding(self, texts: Sequence[str]) -> dict[str, str]:
        """Of `texts`, those that a fact has, each with its id."""

    def put(self, facts: Sequence[Fact], vectors: Vectors, banks: Sequence[int] | None = None) -> None:
        """Keep facts, in the place of those with their ids, in banks of these numbers; lasting on return."""

    def remove(self, ids: Sequence[str]) -> None:
        """Remove the facts with these ids; lasting on return."""

    def expired(self, now: float) -> list[str]:
        """The ids of facts that have expired."""

    def nearest(self, vectors: Vectors, count: int, where: Filter | None = None) -> list[list[Hit]]:
        """For each of `vectors` (normalised, shape `(n, dimensions)`) the `count` nearest living facts that match."""

    def bank_count(self) -> int | None:
        """How many banks were made, numbered from 0 on, those included that lost all facts since; `None` for none."""

    def bank(self, number: int, *, vectors: bool = False) -> list[Row]:
        """The facts of one bank."""

    def nearest_banks(self, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        """For each of `vectors` the `count` banks with the nearest centroids: number and cosine, nearest first."""

    def set_banks(self, numbers: Mapping[str, int], centroids: Vectors) -> None:
        """Put each fact into the bank of its number; `centroids` has a row for each bank.

        Before it is done there are no banks, also where a process is killed meanwhile.
        """

    def drop_banks(self) -> None:
        """There are no banks any more."""


def alive(fact: Fact) -> bool:
    """Whether the fact has not expired."""
    return fact.expires is None or fact.expires > time.time()


class TableFactStore(ABC):
    """A `FactStore` over tables, one for each namespace, which a subclass opens.

    `bank_size` facts make a bank, about. From a cosine of `near_duplicate` on, two facts are reported to say the same;
    `None` does not look. The number of a fact's bank is written with the fact.
    """

    def __init__(self, embedder: Embedder, *, bank_size: int = BANK_SIZE, near_duplicate: float | None = 0.97) -> None:
        if bank_size < 1:
            raise BankError(f"Got bank_size={bank_size}; expected at least 1.")
        self.embedder = as_embedder(embedder)
        self.bank_size, self.near_duplicate = bank_size, near_duplicate
        self._opened: dict[str, Table] = {}
        self._writing = threading.RLock()

    @abstractmethod
    def _open(self, namespace: str) -> Table:
        """The table of a namespace, made when there is none."""

    def _check_writes(self) -> None:  # noqa: B027 - a store may always be written to
        """Raise `BankError` where nothing may be changed."""

    def _tables(self, namespace: str | None) -> list[Table]:
        """The tables of a namespace, or of all, in the order of their names; those that there are."""
        return [table for name, table in sorted(self._opened.items()) if namespace in (None, name)]

    def __len__(self) -> int:
        """See `FactStore`."""
        return sum(len(table) - len(table.expired(time.time())) for table in self._tables(None))

    def facts(
        self, *, ids: Sequence[str] | None = None, where: Filter | None = None, namespace: str | None = None
    ) -> Iterator[Fact]:
        """See `FactStore.facts`; read page by page, so what changes meanwhile may be seen or not."""
        test = predicate({} if where is None else where)
        for table in self._tables(namespace):
            rows = _pages(table, where=where) if ids is None else table.rows(ids)
            yield from (row.fact for row in rows if alive(row.fact) and test(row.fact))

    def get(self, fact_id: str, *, namespace: str | None = None) -> Fact:
        """See `FactStore.get`."""
        for table in self._tables(namespace):
            for row in table.rows([fact_id]):
                if alive(row.fact):
                    return row.fact
        raise BankError(f"There is no fact with the id {fact_id!r}{_within(namespace)}.")

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
            raise BankError(f"Got probes={probes!r}; expected at least 1.")
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

    def build(self, facts: Iterable[Fact]) -> Added:
        """Add `facts`, then make all banks anew."""
        report = self.add(facts)
        if report.added:
            self.rebuild()
        return report

    def add(
        self,
        facts: Iterable[Fact],
        *,
        ttl: float | None = None,
        vectors: Vectors | None = None,
        overwrite: bool = False,
    ) -> Added:
        """See `FactStore.add`."""
        if ttl is not None and not 0 < ttl <= LATEST:
            raise BankError(f"Got ttl={ttl}; expected seconds above 0, or None for never.")
        self._check_writes()
        report, source, start = Added(), iter(facts), 0
        while batch := list(itertools.islice(source, _BATCH)):
            given = None if vectors is None else np.asarray(vectors)[start : start + len(batch)]
            start += len(batch)
            if ttl is not None:
                batch = [replace(fact, expires=time.time() + ttl) if fact.expires is None else fact for fact in batch]
            with self._writing:
                report += self._add(batch, given, overwrite)
        return report

    def update(self, fact: Fact) -> Fact:
        """See `FactStore.update`."""
        self._check_writes()
        with self._writing:
            held = self.get(fact.id, namespace=fact.namespace)
            [table] = self._tables(fact.namespace)
            if table.holding([fact.text]).get(fact.text, fact.id) != fact.id:
                raise BankError(f"Got the text of another fact for {fact.id!r}: {fact.text!r}. Delete one of the two.")
            fact = replace(fact, version=held.version + 1)
            vectors = self._embed([fact], None)
            table.put([fact], vectors, _nearest_banks(table, vectors))
            return fact

    def delete(self, ids: Iterable[str], *, namespace: str | None = None) -> int:
        """See `FactStore.delete`."""
        self._check_writes()
        asked, count = list(dict.fromkeys(ids)), 0
        with self._writing:
            for table in self._tables(namespace):
                if gone := [row.fact.id for row in table.rows(asked)] if asked else []:
                    table.remove(gone)
                count += len(gone)
        return count

    def rebuild(self) -> None:
        """See `FactStore.rebuild`."""
        self._check_writes()
        with self._writing:
            for table in self._tables(None):
                self._make_banks(table)

    def verify(self, *, repair: bool = False) -> list[str]:
        """What is wrong, a sentence each; with `repair`, put right afterwards.

        Compares counts, the vectors of a sample of facts with their texts embedded again, and banks with facts.
        `repair` embeds all facts of a damaged namespace anew, whose banks are made anew when next asked for.
        """
        found = []
        with self._writing:
            for table in self._tables(None):
                wrong = list(self._problems(table))
                found += [f"Namespace {table.namespace!r}: {each}" for each in wrong]
                if wrong and repair:
                    self._check_writes()
                    self._renew(table)
        return found

    def banks(self, namespace: str | None = None) -> tuple[str, ...]:
        """See `FactStore.banks`."""
        with self._writing:
            tables = [self._with_banks(table) for table in self._tables(namespace)]
            living = {(table.namespace, row.bank) for table in tables for row in _pages(table) if alive(row.fact)}
        return tuple(_name(space, bank) for space, bank in sorted((s, b) for s, b in living if b is not None))

    def bank_facts(self, bank: str) -> tuple[Fact, ...]:
        """See `FactStore.bank_facts`."""
        space, _, number = bank.rpartition("/")
        with self._writing:
            for table in self._tables(space) if space and number.isdecimal() else ():
                if living := _living(self._with_banks(table), int(number)):
                    return tuple(row.fact for row in living)
        raise BankError(f"Got the bank {bank!r}; expected one of `banks()`, e.g. 'default/0'.")

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
            raise BankError(
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
        raise BankError(f"There are no facts{_within(namespace)}.")

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
            raise BankError("The store holds no facts yet. Call `add(facts)` with at least one first.")

    def _query(self, question: str) -> Vectors:
        if not question.strip():
            raise BankError(f"Got the blank question {question!r}; expected words to search for.")
        if any("\ud800" <= letter <= "\udfff" for letter in question):
            raise BankError(f"Got the question {question!r}, which is not Unicode. Decode it with errors='replace'.")
        vector = np.asarray(self.embedder.embed_query(question))[None]
        found: Vectors = checked_vectors(vector, (1, vector.shape[-1]), self.embedder)[0]
        return found

    def _add(self, batch: Sequence[Fact], vectors: Vectors | None, overwrite: bool) -> Added:  # noqa: FBT001
        if wrong := next((each for each in batch if not isinstance(each, Fact)), None):
            raise BankError(f"Got {wrong!r} ({type(wrong).__name__}); expected a Fact, e.g. `Fact(text)`.")
        report, todo = Added(), list[tuple[Table, list[Fact], Vectors]]()
        vectors = None if vectors is None else self._checked(vectors, len(batch))
        for space in dict.fromkeys(fact.namespace for fact in batch):
            table = self._opened.get(space) or self._opened.setdefault(space, self._open(space))
            if expired := table.expired(time.time()):
                table.remove(expired)
            given = [(at, fact) for at, fact in enumerate(batch) if fact.namespace == space]
            new, superseded = (_next_versions(table, given), ()) if overwrite else self._new(table, given)
            report += Added(len(new), len(given) - len(new) - len(superseded), superseded=superseded)
            facts, rows = [fact for _, fact in new], [at for at, _ in new]
            todo.append((table, facts, self._embed(facts, None if vectors is None else vectors[rows])))
        for table, facts, made in todo:
            if not facts:
                continue
            table.put(facts, made, _nearest_banks(table, made))
            report += Added(near_duplicates=tuple(self._near(table, facts, made)))
            # Banks that hold twice their size on average are best made anew.
            if (banks := table.bank_count()) is not None and len(table) > LARGEST * self.bank_size * banks:
                table.drop_banks()
        return report

    def _new(self, table: Table, given: Sequence[tuple[int, Fact]]) -> tuple[list[tuple[int, Fact]], tuple[str, ...]]:
        """Those of `given` that the table does not hold, and the ids under which it holds a later version."""
        seen = dict(table.holding([fact.text for _, fact in given]))
        new: dict[str, tuple[int, Fact]] = {}
        for at, fact in given:
            if fact.text in seen:
                continue
            seen[fact.text] = fact.id
            if fact.id in new:
                raise _conflict(fact, new[fact.id][1])
            new[fact.id] = (at, fact)
        superseded = []
        for row in table.rows(list(new)) if new else ():
            _, fact = new.pop(row.fact.id)
            if row.fact.version == 1:
                raise _conflict(fact, row.fact)
            superseded.append(fact.id)
            logger.warning("Version %d of fact %r stays; not added: %r.", row.fact.version, fact.id, fact.text)
        return list(new.values()), tuple(superseded)

    def _embed(self, facts: Sequence[Fact], given: Vectors | None) -> Vectors:
        if not facts:
            return np.zeros((0, 0), np.float32)
        return self._checked(self.embedder.embed([fact.text for fact in facts]), len(facts)) if given is None else given

    def _checked(self, vectors: Vectors, count: int) -> Vectors:
        vectors = np.asarray(vectors)
        return checked_vectors(vectors, (count, vectors.shape[-1] if vectors.ndim else 0), self.embedder)

    def _near(self, table: Table, facts: Sequence[Fact], vectors: Vectors) -> Iterator[NearDuplicate]:
        """Which of these facts, just added, nearly repeat an earlier one."""
        if self.near_duplicate is None:
            return
        places = {fact.id: place for place, fact in enumerate(facts)}
        for place, hits in enumerate(table.nearest(vectors, 3)):
            for hit in hits:
                if places.get(hit.fact.id, -1) < place and hit.score >= self.near_duplicate:
                    yield NearDuplicate(facts[place].id, hit.fact.id, min(1.0, hit.score))
                    break

    def _with_banks(self, table: Table) -> Table:
        with self._writing:
            if table.bank_count() is None and len(table):
                self._check_writes()
                self._make_banks(table)
        return table

    def _make_banks(self, table: Table) -> None:
        rows = list(_pages(table, vectors=True))
        if not rows:
            table.drop_banks()
            return
        labels, centroids = cluster(_stacked(rows), self.bank_size)
        table.set_banks({row.fact.id: int(label) for row, label in zip(rows, labels, strict=True)}, centroids)
        # Another process may have added facts while there were no banks to put them into.
        if others := [row.fact.id for row in _pages(table) if row.bank is None]:
            late = table.rows(others, vectors=True)
            vectors = _stacked(late)
            table.put([row.fact for row in late], vectors, _nearest_banks(table, vectors))
        logger.info("Made %d banks of %d facts of %r.", len(centroids), len(rows), table.namespace)

    def _renew(self, table: Table) -> None:
        """Embed all facts of a table anew."""
        rows = _pages(table)
        while batch := [row.fact for row in itertools.islice(rows, _BATCH)]:
            table.put(batch, self._embed(batch, None))
        table.drop_banks()

    def _problems(self, table: Table) -> Iterator[str]:
        ids = table.ids()
        if len(ids) != len(table):
            yield f"it counts {len(table)} facts and lists {len(ids)}."
        chosen = np.random.default_rng(0).permutation(len(ids))[:_SAMPLE]
        rows = table.rows([ids[at] for at in chosen.tolist()], vectors=True)
        facts, made = [row.fact for row in rows], self._embed([row.fact for row in rows], None)
        wrong = [f.id for f, row, own in zip(facts, rows, made, strict=True) if not _alike(row.vector, own)]
        if wrong:
            yield f"of {len(facts)} facts looked at, {len(wrong)} have the vector of another text, e.g. {wrong[0]}."
        if (banks := table.bank_count()) is None:
            return
        lost = [row.fact.id for row in _pages(table) if row.bank is None or row.bank >= banks]
        if lost:
            yield f"{len(lost)} facts stand in none of its {banks} banks, e.g. {lost[0]}."


def _nearest_banks(table: Table, vectors: Vectors) -> list[int] | None:
    """The number of the bank nearest to each of `vectors`; `None` where there are no banks."""
    if table.bank_count() is None:
        return None
    return [number for [(number, _)] in table.nearest_banks(vectors, 1)]


def _next_versions(table: Table, given: Sequence[tuple[int, Fact]]) -> list[tuple[int, Fact]]:
    """The last of `given` under each id, as the version that it is, unless the table holds just that."""
    new = {fact.id: (at, fact) for at, fact in given}
    for row in table.rows(list(new)):
        at, fact = new.pop(row.fact.id)
        version = row.fact.version
        if replace(fact, version=version) != row.fact:
            new[fact.id] = at, replace(fact, version=version + (fact.text != row.fact.text))
    return list(new.values())


def _pages(table: Table, *, vectors: bool = False, where: Filter | None = None) -> Iterator[Row]:
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


def _stacked(rows: Sequence[Row]) -> Vectors:
    return np.array([row.vector for row in rows], np.float32)


def _alike(held: Vectors, made: Vectors) -> bool:
    return held.shape == made.shape and float(held @ made) >= _SAME


def _conflict(fact: Fact, held: Fact) -> BankError:
    return BankError(
        f"Got the id {fact.id!r} for {fact.text!r}; {fact.namespace!r} holds it for {held.text!r}. "
        "Use `update`, or give another id."
    )
