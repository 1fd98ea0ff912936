"""The reference bank: everything in memory, scored by one matrix product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kp_core.banks.base import Fact
from kp_core.banks.routing import Clustering, RoutedBank, Vectors
from kp_core.embed import Embedder

__all__ = ["MemoryFactBank"]


class MemoryFactBank(RoutedBank):
    """A `FactBank` in memory, gone with the process; what `ChromaFactBank` is compared with."""

    def __init__(self, embedder: Embedder, *, bank_size: int = 20, random_state: int = 0) -> None:
        super().__init__(embedder, bank_size=bank_size, random_state=random_state)
        self._matrix: Vectors = np.zeros((0, 0), np.float32)

    def _vectors(self) -> Vectors:
        return self._matrix

    def _store(self, new: Sequence[Fact], vectors: Vectors, clustering: Clustering) -> None:  # noqa: ARG002
        self._matrix = vectors

    def _scores(self, query: NDArray[np.float32], banks: Sequence[int]) -> Iterable[tuple[int, float]]:
        rows = self._built().rows(banks)
        # einsum sums every row in the same order, so equal vectors get equal scores; BLAS does not promise that.
        scores = np.einsum("fd,d->f", self._matrix[rows], query)
        return zip(rows.tolist(), scores.tolist(), strict=True)
