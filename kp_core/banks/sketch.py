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


class Sketches:
    """The sketches of all rows of a table; they live in memory, and are made anew from the rows whenever needed."""

    def __init__(self, rows: Rows, which: NDArray[np.intp]) -> None:
        self._rows = rows
        total = np.zeros(rows.dimensions)
        for at in range(0, len(which), _BLOCK):
            total += rows.vectors(which[at : at + _BLOCK]).sum(axis=0, dtype=np.float64)
        self._centre = (total / max(1, len(which))).astype(np.float32)
        self._words = -(-rows.dimensions // _WORD)
        self._table = np.zeros((0, self._words), np.uint64)
        self._count = 0
        self.extend()

    def extend(self) -> None:
        """Sketch the rows that the table has got since."""
        if len(self._rows) > len(self._table):
            larger = np.zeros((len(self._rows) + len(self._rows) // 3, self._words), np.uint64)
            larger[: self._count] = self._table[: self._count]
            self._table = larger
        for at in range(self._count, len(self._rows), _BLOCK):
            block = slice(at, min(at + _BLOCK, len(self._rows)))
            self._table[block] = self._sketch(self._rows.vectors(block))
        self._count = len(self._rows)

    def distances(self, rows: NDArray[np.intp] | slice, query: NDArray[np.float32]) -> NDArray[np.uint16]:
        """In how many bits the sketches of `rows` differ from that of `query`."""
        differing = np.bitwise_count(self._table[: self._count][rows] ^ self._sketch(query[None])[0])
        distances: NDArray[np.uint16] = differing.sum(axis=1, dtype=np.uint16)
        return distances

    def nearest(self, rows: NDArray[np.intp], query: NDArray[np.float32], count: int) -> NDArray[np.intp]:
        """The `count` of `rows` that differ least from `query`, and whatever equals the last of them, in order."""
        distances = self.distances(rows, query)
        nearest: NDArray[np.intp] = rows[distances <= np.partition(distances, count - 1)[count - 1]]
        return nearest

    def _sketch(self, vectors: Vectors) -> NDArray[np.uint64]:
        bits = np.packbits(vectors > self._centre, axis=1)
        padded = np.zeros((len(vectors), self._words * 8), np.uint8)
        padded[:, : bits.shape[1]] = bits
        return padded.view(np.uint64)
