"""Vectors of facts, row by row: as floats, or in one byte per dimension.

A row is never changed. Cosines to a query of length 1 are computed fast over many rows, and again in a fixed order of
summation over the few that may be best, so that equal vectors get equal scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteRows", "FloatRows", "Rows", "Vectors", "quantise"]

Vectors = NDArray[np.float32]
"""Rows of length 1, shape `(facts, dimensions)`."""

_LARGEST = 127
# Rows that are scored at a time: their floats fit in a processor's cache.
_BLOCK = 2048
# More than two ways of summing the same products in float32 can differ.
_ROUNDING = 1e-5


def quantise(vectors: Vectors) -> NDArray[np.int8]:
    """Directions of `vectors` in a signed byte per dimension, the largest of each row at ±127.

    What they stand for is the row divided by its length: its cosine to the vector is above 0.9999 in 384 dimensions.
    """
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=np.finfo(np.float32).tiny)
    codes: NDArray[np.int8] = np.rint(vectors * (_LARGEST / largest)).astype(np.int8)
    return codes


class Rows(ABC):
    """An append-only table of vectors."""

    def __init__(self, dtype: type[np.float32 | np.int8]) -> None:
        self._dtype, self._count = dtype, 0
        self._table: NDArray[np.float32 | np.int8] = np.zeros((0, 0), dtype)

    def __len__(self) -> int:
        return self._count

    @property
    def dimensions(self) -> int:
        """Length of a vector; 0 before the first row."""
        return int(self._table.shape[1])

    @abstractmethod
    def append(self, vectors: Vectors) -> None:
        """Add rows."""

    def truncate(self, count: int) -> None:
        """Forget the rows from `count` on."""
        self._count = count

    @abstractmethod
    def take(self, rows: NDArray[np.intp]) -> Self:
        """A new table of these rows."""

    @abstractmethod
    def vectors(self, rows: NDArray[np.intp] | slice) -> Vectors:
        """These rows, each of length 1."""

    @abstractmethod
    def _products(self, rows: NDArray[np.intp], query: NDArray[np.float32]) -> NDArray[np.float32]:
        """Cosines of rows to a query, summed in any order."""

    def scores(self, rows: NDArray[np.intp], query: NDArray[np.float32]) -> NDArray[np.float32]:
        """Cosines of `rows` to `query`, up to rounding."""
        scores = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            scores[block] = self._products(rows[block], query)
        return scores

    def best(
        self, rows: NDArray[np.intp], query: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """The `k` of `rows` with the highest cosine, and whatever equals the last of them, in no order."""
        if len(rows) > k:
            scores = self.scores(rows, query)
            last = np.partition(scores, len(rows) - k)[len(rows) - k]
            rows = rows[scores >= last - _ROUNDING]
        return rows, np.einsum("fd,d->f", self.vectors(rows), query).clip(-1.0, 1.0)

    def _extend(self, table: NDArray[np.float32 | np.int8]) -> None:
        stop = self._count + len(table)
        if stop > len(self._table):
            # A third more than is needed, so that facts coming one by one do not copy everything each time.
            larger = np.empty((stop + stop // 3, table.shape[1]), self._dtype)
            if self._count:
                larger[: self._count] = self._table[: self._count]
            self._table = larger
        self._table[self._count : stop] = table
        self._count = stop


class FloatRows(Rows):
    """Vectors as they are: four bytes per dimension."""

    def __init__(self) -> None:
        super().__init__(np.float32)

    def append(self, vectors: Vectors) -> None:
        """See `Rows.append`."""
        self._extend(vectors)

    def take(self, rows: NDArray[np.intp]) -> Self:
        """See `Rows.take`."""
        taken = type(self)()
        taken.append(self.vectors(rows))
        return taken

    def vectors(self, rows: NDArray[np.intp] | slice) -> Vectors:
        """See `Rows.vectors`."""
        return np.asarray(self._table[: self._count][rows], np.float32)

    def _products(self, rows: NDArray[np.intp], query: NDArray[np.float32]) -> NDArray[np.float32]:
        products: NDArray[np.float32] = self.vectors(rows) @ query
        return products


class ByteRows(Rows):
    """Vectors rounded to one byte per dimension."""

    def __init__(self) -> None:
        super().__init__(np.int8)
        self._lengths = np.zeros(0, np.float32)

    def append(self, vectors: Vectors) -> None:
        """See `Rows.append`; what is kept is `quantise(vectors)`."""
        self.append_codes(quantise(vectors))

    def append_codes(self, codes: NDArray[np.int8]) -> None:
        """Add rows that were rounded before."""
        start = self._count
        self._extend(codes)
        if len(self._lengths) < len(self._table):
            self._lengths = np.concatenate([self._lengths[:start], np.ones(len(self._table) - start, np.float32)])
        for at in range(0, len(codes), _BLOCK):
            block = codes[at : at + _BLOCK].astype(np.float32)
            lengths = np.sqrt(np.einsum("fd,fd->f", block, block))
            self._lengths[start + at : start + at + len(block)] = np.where(lengths > 0, lengths, 1)

    def take(self, rows: NDArray[np.intp]) -> Self:
        """See `Rows.take`."""
        taken = type(self)()
        taken.append_codes(self.codes(rows))
        return taken

    def codes(self, rows: NDArray[np.intp] | slice) -> NDArray[np.int8]:
        """These rows as they are kept."""
        return np.asarray(self._table[: self._count][rows], np.int8)

    def vectors(self, rows: NDArray[np.intp] | slice) -> Vectors:
        """See `Rows.vectors`."""
        floats = self._table[: self._count][rows].astype(np.float32)
        floats /= self._lengths[: self._count][rows][:, None]
        return floats

    def _products(self, rows: NDArray[np.intp], query: NDArray[np.float32]) -> NDArray[np.float32]:
        # `take` copies short rows in half the time that an index does.
        products: NDArray[np.float32] = self._table.take(rows, axis=0).astype(np.float32) @ query
        products /= self._lengths[rows]
        return products
