"""A living fact bank but for where it is kept: facts come and go, banks follow, questions find them."""

from __future__ import annotations

import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import BankError
from kp_core.facts.base import Added, Fact, NearDuplicate
from kp_core.facts.clusters import cluster
from kp_core.facts.index import Calibration, Index
from kp_core.facts.journal import Change, Deletion
from kp_core.facts.reading import SearchedBank
from kp_core.facts.rows import Rows

__all__ = ["RoutedBank"]

logger = logging.getLogger(__name__)

_BATCH = 1024
# Facts put into banks before searches get a turn.
_TURN = 64
_CALIBRATED_K = 5


class RoutedBank(SearchedBank):
    """A fact bank but for its storage: a subclass says what a table of vectors is and how changes are kept.

    Changes come one at a time; searches go on beside them, and see facts and banks before or after a change.
    """

    @abstractmethod
    def _keep(self, changes: Sequence[Change], first_row: int) -> None:
        """Make changes lasting before they are seen; the vectors of the facts are the rows from `first_row` on."""

    @abstractmethod
    def _settled(self) -> None:
        """All of a change is seen now."""

    @abstractmethod
    def _switched(self, *, compacted: bool) -> None:
        """All banks are new; `compacted`: and so are the rows."""

    def build(self, facts: Iterable[Fact]) -> Added:
        """See `FactBank.build`. `bank_size` and `random_state` are those of this object, whatever was used before."""
        with self._writing:
            self._refresh()
            new, held = self._table.new(facts)
            index = self._index
            same = index and (index.banks.bank_size, index.banks.random_state) == (self.bank_size, self.random_state)
            if not new and (same or not len(self._table)):
                return Added(0, held)
            first = self._append(new)
            try:
                index = self._clustered(self._rows, np.append(self._table.rows(), np.arange(first, len(self._rows))))
                if new:
                    self._keep(new, first)
            except BaseException:
                self._rows.truncate(first)
                raise
            with self._lock:
                self._table.extend(new)
                self._index = index
            self._followed(range(first, len(self._rows)), ())
            self._switched(compacted=False)
            logger.info("Built %d banks of %d facts.", len(index.banks), len(self._table))
            return Added(len(new), held, self._near(first))

    def add(self, facts: Iterable[Fact], *, ttl: float | None = None) -> Added:
        """See `FactBank.add`."""
        if ttl is not None and not ttl > 0:
            raise BankError(f"Got ttl={ttl}; expected seconds above 0, or None for never.")
        report, source = Added(), iter(facts)
        while batch := list(itertools.islice(source, _BATCH)):
            if ttl is not None:
                batch = [replace(fact, expires=time.time() + ttl) if fact.expires is None else fact for fact in batch]
            with self._writing:
                # Where most facts are new to the bank, its banks are best made anew.
                anew = len(batch) >= len(self)
                report += self.build(batch) if anew else self._add(batch)
        return report

    def _add(self, facts: Sequence[Fact]) -> Added:
        self._refresh()
        new, held = self._table.new(facts)
        if new:
            first = self._append(new)
            self._change(new, first)
            return Added(len(new), held, self._near(first))
        return Added(0, held)

    def update(self, fact: Fact) -> Fact:
        """See `FactBank.update`."""
        with self._writing:
            self._refresh()
            held = self.get(fact.id)
            fact = replace(fact, version=held.version + 1)
            self._table.check_update(fact)
            self._change([fact], self._append([fact]))
            return fact

    def delete(self, ids: Iterable[str]) -> int:
        """See `FactBank.delete`."""
        with self._writing:
            self._refresh()
            gone = tuple(fact_id for fact_id in dict.fromkeys(ids) if fact_id in self._table)
            if gone:
                self._change([Deletion(gone)], len(self._rows))
            return len(gone)

    def rebuild(self) -> None:
        """Cluster and calibrate anew beside the live banks, then switch to the new ones in one step.

        The room of facts that were deleted is given back.
        """
        with self._writing:
            self._refresh()
            alive = self._table.rows()
            if not len(alive):
                return
            rows = self._rows.take(alive)
            index = self._clustered(rows, np.arange(len(rows)))
            with self._lock:
                self._table = self._table.compacted()
                self._rows, self._index = rows, index
            self._switched(compacted=True)

    def calibrate(self, recall: float | None = None, k: int = _CALIBRATED_K) -> Calibration:
        """Measure anew how many banks a search has to look at for `recall` of the `k` best; kept with the bank."""
        with self._writing:
            if recall is not None:
                self.recall = recall
            index = self._built()
            calibration = index.calibrate(self.recall, k, self.random_state)
            with self._lock:
                index.calibration = calibration
            self._switched(compacted=False)
            return calibration

    def _clustered(self, rows: Rows, which: NDArray[np.intp]) -> Index:
        labels = np.full(len(rows), -1, np.int32)
        labels[which] = cluster(rows, which, self.bank_size, self.random_state)
        index = Index(rows, labels, self.bank_size, self.random_state)
        index.calibration = index.calibrate(self.recall, _CALIBRATED_K, self.random_state)
        return index

    def _append(self, facts: Sequence[Fact]) -> int:
        """Embed facts and append their vectors, which no search sees yet; gives the first of their rows."""
        vectors = self._embed(facts)
        with self._lock:
            first = len(self._rows)
            if len(vectors):
                self._rows.append(vectors)
            return first

    def _change(self, changes: Sequence[Change], first: int) -> None:
        """Keep changes, then let them be seen."""
        try:
            self._keep(changes, first)
        except BaseException:
            self._rows.truncate(first)
            raise
        removed: list[Fact] = []
        for at in range(0, len(changes), _TURN):
            with self._lock:
                for change in changes[at : at + _TURN]:
                    removed += self._table.apply(change, self._index)
        self._followed(range(first, len(self._rows)), removed)
        self._settled()

    def _near(self, first: int) -> tuple[NearDuplicate, ...]:
        """Which of the facts from row `first` on nearly repeat an earlier one of their bank."""
        found = list[NearDuplicate]()
        with self._lock:
            index = self._built()
            labels = index.banks.labels
            for bank in np.unique(labels[first:][labels[first:] >= 0]).tolist():
                rows = np.sort(index.banks.members[bank])
                vectors, new = self._rows.vectors(rows), np.flatnonzero(rows >= first)
                cosines = vectors[new] @ vectors.T
                cosines[np.arange(len(rows))[None] >= new[:, None]] = -1.0
                best = cosines.argmax(axis=1)
                for at in np.flatnonzero(cosines[np.arange(len(new)), best] >= self.near_duplicate).tolist():
                    this, earlier = self._table[int(rows[new[at]])], self._table[int(rows[best[at]])]
                    found.append(NearDuplicate(this.id, earlier.id, min(1.0, float(cosines[at, best[at]]))))
        return tuple(found)
