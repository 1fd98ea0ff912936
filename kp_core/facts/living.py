"""A fact store but for where it is kept: facts come and go, and stand in banks."""

from __future__ import annotations

import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kp_core.errors import FactError
from kp_core.facts.banking import BANK_SIZE, LARGEST, Vectors, cluster
from kp_core.facts.base import LATEST, Added, Fact, NearDuplicate
from kp_core.facts.embed import Embedder, checked_vectors
from kp_core.facts.reading import SearchedFacts, pages
from kp_core.facts.table import Row, Table, next_versions

__all__ = ["LivingFacts"]

logger = logging.getLogger(__name__)

_BATCH, _SAMPLE = 512, 32
# Cosine of a text's vector in the store and its vector made anew: models round, and batches pad.
_SAME = 0.999


class LivingFacts(SearchedFacts):
    """A fact store over tables, which a subclass opens.

    `bank_size` facts make a bank, about. From a cosine of `near_duplicate` on, two facts are reported to say the same;
    `None` does not look. The number of a fact's bank is written with the fact.
    """

    def __init__(self, embedder: Embedder, *, bank_size: int = BANK_SIZE, near_duplicate: float | None = 0.97) -> None:
        super().__init__(embedder)
        if bank_size < 1:
            raise FactError(f"Got bank_size={bank_size}; expected at least 1.")
        self.bank_size, self.near_duplicate = bank_size, near_duplicate
        self._opened: dict[str, Table] = {}

    @abstractmethod
    def _open(self, namespace: str) -> Table:
        """The table of a namespace, made when there is none."""

    def _check_writes(self) -> None:
        """Raise `FactError` where nothing may be changed."""

    def _tables(self, namespace: str | None) -> list[Table]:
        return [table for name, table in sorted(self._opened.items()) if namespace in (None, name)]

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
            raise FactError(f"Got ttl={ttl}; expected seconds above 0, or None for never.")
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
                raise FactError(f"Got the text of another fact for {fact.id!r}: {fact.text!r}. Delete one of the two.")
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

    def _add(self, batch: Sequence[Fact], vectors: Vectors | None, overwrite: bool) -> Added:  # noqa: FBT001
        if wrong := next((each for each in batch if not isinstance(each, Fact)), None):
            raise FactError(f"Got {wrong!r} ({type(wrong).__name__}); expected a Fact, e.g. `Fact(text)`.")
        report, todo = Added(), list[tuple[Table, list[Fact], Vectors]]()
        vectors = None if vectors is None else self._checked(vectors, len(batch))
        for space in dict.fromkeys(fact.namespace for fact in batch):
            table = self._opened.get(space) or self._opened.setdefault(space, self._open(space))
            if expired := table.expired(time.time()):
                table.remove(expired)
            given = [(at, fact) for at, fact in enumerate(batch) if fact.namespace == space]
            new, superseded = (next_versions(table, given), ()) if overwrite else self._new(table, given)
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
        rows = list(pages(table, vectors=True))
        if not rows:
            table.drop_banks()
            return
        labels, centroids = cluster(_stacked(rows), self.bank_size)
        table.set_banks({row.fact.id: int(label) for row, label in zip(rows, labels, strict=True)}, centroids)
        # Another process may have added facts while there were no banks to put them into.
        if others := [row.fact.id for row in pages(table) if row.bank is None]:
            late = table.rows(others, vectors=True)
            vectors = _stacked(late)
            table.put([row.fact for row in late], vectors, _nearest_banks(table, vectors))
        logger.info("Made %d banks of %d facts of %r.", len(centroids), len(rows), table.namespace)

    def _renew(self, table: Table) -> None:
        """Embed all facts of a table anew."""
        rows = pages(table)
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
        lost = [row.fact.id for row in pages(table) if row.bank is None or row.bank >= banks]
        if lost:
            yield f"{len(lost)} facts stand in none of its {banks} banks, e.g. {lost[0]}."


def _nearest_banks(table: Table, vectors: Vectors) -> list[int] | None:
    """The number of the bank nearest to each of `vectors`; `None` where there are no banks."""
    if table.bank_count() is None:
        return None
    return [number for [(number, _)] in table.nearest_banks(vectors, 1)]


def _stacked(rows: Sequence[Row]) -> Vectors:
    return np.array([row.vector for row in rows], np.float32)


def _alike(held: Vectors, made: Vectors) -> bool:
    return held.shape == made.shape and float(held @ made) >= _SAME


def _conflict(fact: Fact, held: Fact) -> FactError:
    return FactError(
        f"Got the id {fact.id!r} for {fact.text!r}; {fact.namespace!r} holds it for {held.text!r}. "
        "Use `update`, or give another id."
    )
