"""The facts of a bank by row: found by id, by text and by filter, and gone when they expire."""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import BankError
from kp_core.facts.base import Fact, Filter
from kp_core.facts.filters import predicate
from kp_core.facts.index import Index
from kp_core.facts.journal import Change, Deletion

__all__ = ["FactTable"]

_FILTERS_KEPT = 8


class FactTable:
    """Facts in the order they came in, a row each; rows of facts that went stay empty. Not safe for threads."""

    def __init__(self) -> None:
        self.all: list[Fact | None] = []
        self._rows: dict[str, int] = {}
        self._texts: dict[tuple[str, str], int] = {}
        self._expiring: list[tuple[float, int]] = []
        self._masks: OrderedDict[str, NDArray[np.bool_]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, fact_id: object) -> bool:
        return fact_id in self._rows

    def __getitem__(self, row: int) -> Fact:
        fact = self.all[row]
        if fact is None:
            raise BankError(f"Row {row} of the bank holds no fact.")
        return fact

    def row(self, fact_id: str) -> int:
        """The row of the fact with this id; raises `BankError` when there is none."""
        row = self._rows.get(fact_id)
        if row is None:
            raise BankError(f"Got the fact id {fact_id!r}; none of the {len(self)} facts has it.")
        return row

    def rows(self) -> NDArray[np.intp]:
        """The rows that hold facts, ascending."""
        return np.sort(np.fromiter(self._rows.values(), np.intp, len(self._rows)))

    def new(self, facts: Iterable[Fact]) -> tuple[list[Fact], int]:
        """Those of `facts` whose text their namespace does not hold, each once; and how many are left out.

        Raises `BankError` for an id that stands for another text, and for what is no fact.
        """
        new, ids, texts, held = list[Fact](), set[str](), set[tuple[str, str]](), 0
        for fact in facts:
            if not isinstance(fact, Fact):
                raise BankError(f"Got {fact!r}; expected a Fact, e.g. `Fact(text)`.")
            text = (fact.namespace, fact.text)
            if text in texts or text in self._texts:
                held += 1
                continue
            if fact.id in ids or fact.id in self._rows:
                raise BankError(
                    f"Got the id {fact.id!r} for two texts; the second is {fact.text[:60]!r}. Ids are unique: to "
                    f"replace the first text, call `update` (in the shell, `kp add --replace`)."
                )
            ids.add(fact.id)
            texts.add(text)
            new.append(fact)
        return new, held

    def check_update(self, fact: Fact) -> None:
        """Raise `BankError` when another fact of its namespace has the text of `fact`."""
        other = self._texts.get((fact.namespace, fact.text))
        if other is not None and self[other].id != fact.id:
            raise BankError(
                f"Got the text of the fact {self[other].id!r} as the new one of {fact.id!r}; a text is held once. "
                f"Delete one of the two."
            )

    def extend(self, facts: Sequence[Fact]) -> None:
        """Append facts that `new` has passed."""
        for fact in facts:
            row = len(self.all)
            self.all.append(fact)
            self._rows[fact.id] = self._texts[fact.namespace, fact.text] = row
            if fact.expires is not None:
                heapq.heappush(self._expiring, (fact.expires, row))

    def apply(self, change: Change, index: Index | None = None) -> list[Fact]:
        """Apply a change of a journal, to the banks of `index` too; the facts that went.

        Raises `BankError` for a change that cannot have been written: an id or text that stands for another fact.
        """
        gone = list[tuple[int, Fact]]()
        if isinstance(change, Deletion):
            gone = [self._drop(self._rows[fact_id]) for fact_id in change.ids if fact_id in self._rows]
        else:
            held = self._rows.get(change.id)
            if held is not None and change.version > self[held].version:
                gone.append(self._drop(held))
            if change.id in self._rows or (change.namespace, change.text) in self._texts:
                raise BankError("its id or text stands in an earlier line too")
            self.extend([change])
            if index:
                index.add(len(self.all) - 1)
        if index:
            # After the new row has come, so that a bank of one fact that is updated never is empty.
            for row, _ in gone:
                index.banks.remove(row)
        return [fact for _, fact in gone]

    def expire(self, now: float) -> list[tuple[int, Fact]]:
        """Drop the facts that have expired; they, with their rows."""
        gone = list[tuple[int, Fact]]()
        while self._expiring and self._expiring[0][0] <= now:
            _, row = heapq.heappop(self._expiring)
            if self.all[row] is not None:
                gone.append(self._drop(row))
        return gone

    def compacted(self) -> FactTable:
        """The same facts without the rows of those that went."""
        table = FactTable()
        table.extend([fact for fact in self.all if fact is not None])
        return table

    def allowed(self, where: Filter | None, namespace: str | None) -> NDArray[np.bool_] | None:
        """Which rows a search may find, as a mask over all rows; `None` when it may find any.

        The masks of the last filters are kept, so asking again costs only what came since.
        """
        if where is None and namespace is None:
            return None
        inside = predicate({} if where is None else where)

        def matches(fact: Fact) -> bool:
            # Not through the filter, where a field of the metadata called `namespace` would come first.
            return (namespace is None or fact.namespace == namespace) and inside(fact)

        key = json.dumps([where, namespace], sort_keys=True, default=repr)
        mask = self._masks.pop(key, np.zeros(0, np.bool_))
        if len(mask) < len(self.all):
            more = [fact is not None and matches(fact) for fact in self.all[len(mask) :]]
            mask = np.concatenate([mask, np.array(more, np.bool_)])
        self._masks[key] = mask
        if len(self._masks) > _FILTERS_KEPT:
            self._masks.popitem(last=False)
        return mask

    def _drop(self, row: int) -> tuple[int, Fact]:
        fact = self[row]
        self.all[row] = None
        del self._rows[fact.id], self._texts[fact.namespace, fact.text]
        return row, fact
