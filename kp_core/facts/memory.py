"""The reference store: everything in memory, found by comparing with everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kp_core.facts.banking import Vectors
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
        self._centroids: Vectors | None = None

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

    def put(self, facts: Sequence[Fact], vectors: Vectors, banks: Sequence[int] | None = None) -> None:
        numbers: Sequence[int | None] = [None] * len(facts) if banks is None else banks
        rows = zip(facts, vectors, numbers, strict=True)
        self._rows = self._rows | {fact.id: Row(fact, vector, bank) for fact, vector, bank in rows}

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

    def bank_count(self) -> int | None:
        return None if self._centroids is None else len(self._centroids)

    def bank(self, number: int, *, vectors: bool = False) -> list[Row]:  # noqa: ARG002 - they are at hand
        return [row for row in self._rows.values() if row.bank == number]

    def nearest_banks(self, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        if self._centroids is None:
            return [[] for _ in vectors]
        cosines = vectors @ self._centroids.T
        order = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
        return [[(int(at), float(each[at])) for at in best] for each, best in zip(cosines, order, strict=True)]

    def set_banks(self, numbers: Mapping[str, int], centroids: Vectors) -> None:
        self._rows = {i: row._replace(bank=numbers.get(i, row.bank)) for i, row in self._rows.items()}
        self._centroids = centroids

    def drop_banks(self) -> None:
        self._centroids = None
