"""The reference store: everything in memory, found by comparing with everything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kp_core.facts.banking import Bank, Vectors
from kp_core.facts.base import Fact, Filter, Hit
from kp_core.facts.filters import predicate
from kp_core.facts.living import LivingFacts
from kp_core.facts.table import Row, Table, alive

__all__ = ["MemoryFactStore"]


class MemoryFactStore(LivingFacts):
    """A `FactStore` in memory, gone with the process; what `ChromaFactStore` is compared with."""

    def _open(self, namespace: str) -> Table:
        return _MemoryTable(namespace)


class _MemoryTable:
    """A `Table` of dictionaries."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._rows: dict[str, Row] = {}
        self._banks: dict[int, Bank] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self) -> list[str]:
        return list(self._rows)

    def rows(self, ids: Sequence[str], *, vectors: bool = False) -> list[Row]:  # noqa: ARG002 - they are at hand
        asked = set(ids)
        return [row for fact_id, row in self._rows.items() if fact_id in asked]

    def page(self, start: int, count: int, **_: object) -> list[Row]:
        return list(self._rows.values())[start : start + count]

    def holding(self, texts: Sequence[str]) -> dict[str, str]:
        asked = set(texts)
        return {row.fact.text: fact_id for fact_id, row in self._rows.items() if row.fact.text in asked}

    def put(self, facts: Sequence[Fact], vectors: Vectors) -> None:
        self._rows = self._rows | {fact.id: Row(fact, vector) for fact, vector in zip(facts, vectors, strict=True)}

    def remove(self, ids: Sequence[str]) -> None:
        self._rows = {fact_id: row for fact_id, row in self._rows.items() if fact_id not in set(ids)}

    def expired(self, now: float) -> list[str]:
        return [i for i, row in self._rows.items() if row.fact.expires is not None and row.fact.expires <= now]

    def nearest(self, vectors: Vectors, count: int, where: Filter | None = None) -> list[list[Hit]]:
        test = predicate(where or {})
        rows = [row for row in self._rows.values() if alive(row.fact) and test(row.fact)]
        if not rows:
            return [[] for _ in vectors]
        scores = vectors @ np.stack([row.vector for row in rows]).T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return [[Hit(rows[at].fact, float(each[at])) for at in best] for each, best in zip(scores, order, strict=True)]

    def numbers(self) -> list[int] | None:
        return None if self._banks is None else list(self._banks)

    def banks(self, numbers: Sequence[int] | None = None) -> list[Bank]:
        held = sorted((self._banks or {}).items())
        return [bank for number, bank in held if numbers is None or number in numbers]

    def banks_with(self, ids: Sequence[str]) -> list[Bank]:
        return [bank for bank in self.banks() if not set(ids).isdisjoint(bank.ids)]

    def nearest_banks(self, vectors: Vectors, count: int) -> list[list[Bank]]:
        banks = self.banks()
        if not banks:
            return [[] for _ in vectors]
        scores = vectors @ np.stack([bank.centroid for bank in banks]).T
        return [[banks[at] for at in np.argsort(-each, kind="stable")[:count]] for each in scores]

    def change_banks(self, banks: Sequence[Bank], gone: Sequence[int] = ()) -> None:
        kept = {number: bank for number, bank in (self._banks or {}).items() if number not in gone}
        self._banks = kept | {bank.number: bank for bank in banks}

    def switch_banks(self, banks: Sequence[Bank] | None) -> None:
        self._banks = None if banks is None else {bank.number: bank for bank in banks}
