"""The reference store: keeps facts in memory and searches them exhaustively."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kp_core.banks.base import Fact, Filter, Hit
from kp_core.banks.embed import Embedder
from kp_core.banks.filters import predicate
from kp_core.banks.store import BANK_SIZE, FactStore, Row, Vectors, alive, ranked


class MemoryFactStore(FactStore):
    """A fact store in memory, lost when the process ends; the tests compare `ChromaFactStore` with it."""

    def __init__(self, embedder: Embedder, *, bank_size: int = BANK_SIZE) -> None:
        super().__init__(embedder, bank_size=bank_size)
        self._held = defaultdict[str, dict[str, Row]](dict)
        self._centroids: dict[str, Vectors] = {}

    def _spaces(self, namespace: str | None) -> list[str]:
        return [space for space in sorted(self._held) if namespace in (None, space)]

    def _count(self, space: str) -> int:
        return len(self._held[space])

    def _rows(
        self,
        space: str,
        *,
        ids: Sequence[str] | None = None,
        where: Filter | None = None,
        vectors: bool = False,  # noqa: ARG002 - they are at hand
    ) -> Iterator[Row]:
        held, digest = self._held[space], (where or {}).get("kp:digest")
        chosen = held.keys() if ids is None else set(ids)
        # The caller tests every row, too; but a digest is asked for with each fact that is compiled.
        of_text = (row for fact_id, row in held.items() if fact_id in chosen)
        yield from [row for row in of_text if not isinstance(digest, str) or row.fact.digest == digest]

    def _nearest(self, space: str, vector: Vectors, count: int, where: Filter | None = None) -> list[Hit]:
        test = predicate(where)
        rows = [row for row in self._held[space].values() if alive(row.fact) and test(row.fact)]
        if not rows:
            return []
        [ranking] = ranked(vector[None], np.stack([row.vector for row in rows]), count)
        return [Hit(rows[at].fact, cosine) for at, cosine in ranking]

    def _put(self, space: str, facts: Sequence[Fact], vectors: Vectors, banks: Sequence[int] | None = None) -> None:
        numbers: Sequence[int | None] = [None] * len(facts) if banks is None else banks
        rows = zip(facts, vectors, numbers, strict=True)
        self._held[space] = self._held[space] | {fact.id: Row(fact, vector, bank) for fact, vector, bank in rows}

    def _set_expires(self, space: str, times: Mapping[str, float | None]) -> None:
        held = self._held[space]
        renewed = {i: held[i]._replace(fact=replace(held[i].fact, expires=at)) for i, at in times.items()}
        self._held[space] = held | renewed

    def _remove(self, space: str, ids: Sequence[str]) -> None:
        removed = set(ids)
        self._held[space] = {fact_id: row for fact_id, row in self._held[space].items() if fact_id not in removed}

    def _bank_count(self, space: str) -> int | None:
        return len(self._centroids[space]) if space in self._centroids else None

    def _nearest_banks(self, space: str, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        return ranked(vectors, self._centroids[space], count) if space in self._centroids else [[] for _ in vectors]

    def _set_banks(self, space: str, numbers: Mapping[str, int], centroids: Vectors) -> None:
        self._centroids.pop(space, None)
        self._held[space] = {i: row._replace(bank=numbers.get(i, row.bank)) for i, row in self._held[space].items()}
        if len(centroids):
            self._centroids[space] = centroids
