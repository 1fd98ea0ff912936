"""Sketches: one bit per dimension, to see which few of many facts are worth their full score.

A sketch holds on which side of the bank's centre a vector lies in each dimension. Vectors that differ in few bits tend
to have a high cosine (Charikar 2002, "Similarity estimation techniques from rounding algorithms"), and counting bits
reads an eighth of what a score from bytes reads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kp_core.banks.rows import Rows, Vectors

__all__ = ["Sketches"]

_BLOCK = 8192
_WORD = 64
_NEVER = int(np.iinfo(np.uint16).max)


class Sketches:
    """The sketches of all rows of a table; they live in memory, and are made anew from the rows whenever needed."""

    def __init__(self, rows: Rows, which: NDArray[np.intp]) -> None:
        self._rows = rows
        total = np.zeros(rows.dimensions)
        for at in range(0, len(which), _BLOCK):
            total += rows.vectors(which[at : at + _BLOCK]).sum(axis=0, dtype=np.float64)
        self._centre = (total / max(1, len(which))).astype(np.float32)
        self._words = -(-rows.dimensions // _WORD)
        # A column per row, so that all first words lie side by side, then all second ones: read in one sweep each.
        self._table = np.zeros((self._words, 0), np.uint64)
        self._count = 0
        self.extend()

    def extend(self) -> None:
        """Sketch the rows that the table has got since."""
        if len(self._rows) > self._table.shape[1]:
            larger = np.zeros((self._words, len(self._rows) + len(self._rows) // 3), np.uint64)
            larger[:, : self._count] = self._table[:, : self._count]
            self._table = larger
        for at in range(self._count, len(self._rows), _BLOCK):
            block = slice(at, min(at + _BLOCK, len(self._rows)))
            self._table[:, block] = self._sketch(self._rows.vectors(block)).T
        self._count = len(self._rows)

    def distances(self, rows: NDArray[np.intp] | slice, query: NDArray[np.float32]) -> NDArray[np.uint16]:
        """In how many bits the sketches of `rows` differ from that of `query`."""
        words = self._sketch(query[None])[0]
        columns = self._table[:, : self._count]
        distances: NDArray[np.uint16] = np.bitwise_count(columns[0][rows] ^ words[0]).astype(np.uint16)
        for column, word in zip(columns[1:], words[1:], strict=True):
            distances += np.bitwise_count(column[rows] ^ word)
        return distances

    def nearest(self, rows: NDArray[np.intp], query: NDArray[np.float32], count: int) -> NDArray[np.intp]:
        """The `count` of `rows` that differ least from `query`, and whatever equals the last of them, in order."""
        return rows[_least(self.distances(rows, query), count)]

    def nearest_of_all(self, query: NDArray[np.float32], count: int, inside: NDArray[np.bool_]) -> NDArray[np.intp]:
        """As `nearest` of the rows that are `inside` (a mask, from the first row on); fast where most of them are."""
        distances = self.distances(slice(0, len(inside)), query)
        distances[~inside] = _NEVER
        return _least(distances, count)

    def _sketch(self, vectors: Vectors) -> NDArray[np.uint64]:
        bits = np.packbits(vectors > self._centre, axis=1)
        padded = np.zeros((len(vectors), self._words * 8), np.uint8)
        padded[:, : bits.shape[1]] = bits
        return padded.view(np.uint64)


def _least(distances: NDArray[np.uint16], count: int) -> NDArray[np.intp]:
    """The places of the `count` least distances but `_NEVER`, and of whatever equals the last of them, in order."""
    # Counting beats sorting: there are only as many distances as dimensions.
    until = np.cumsum(np.bincount(distances))
    last = min(int(np.searchsorted(until, count)), _NEVER - 1)
    return np.flatnonzero(distances <= last)
