"""Sketches: one bit per dimension, to see which few of many facts are worth their full score.

A sketch holds on which side of the bank's centre a vector lies in each dimension. Vectors that differ in few bits tend
to have a high cosine (Charikar 2002, "Similarity estimation techniques from rounding algorithms"), and counting bits
reads an eighth of what a score from bytes reads. Half of the bits are enough to leave out most of many facts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kp_core.facts.rows import Rows, Vectors

__all__ = ["Sketches"]

_BLOCK = 8192
_WORD = 64
# Distances that are looked at to tell how large the least of many are.
_SAMPLE = 8192

Words = NDArray[np.uint64]
Distances = NDArray[np.uint8 | np.uint16]


class Sketches:
    """The sketches of all rows of a table; they live in memory, and are made anew from the rows whenever needed."""

    def __init__(self, rows: Rows, which: NDArray[np.intp]) -> None:
        self._rows = rows
        total = np.zeros(rows.dimensions)
        for at in range(0, len(which), _BLOCK):
            total += rows.vectors(which[at : at + _BLOCK]).sum(axis=0, dtype=np.float64)
        self._centre = (total / max(1, len(which))).astype(np.float32)
        self._words = -(-rows.dimensions // _WORD)
        self._half = -(-self._words // 2)
        # First halves word by word: all of them are read, in one sweep per word. Second halves row by row: few of them
        # are read, each from one place.
        self._first = np.zeros((self._half, 0), np.uint64)
        self._second = np.zeros((0, self._words - self._half), np.uint64)
        self._count = 0
        self.extend()

    def extend(self) -> None:
        """Sketch the rows that the table has got since."""
        if len(self._rows) > len(self._second):
            room, held = len(self._rows) + len(self._rows) // 3, slice(0, self._count)
            first = np.zeros((self._half, room), np.uint64)
            second = np.zeros((room, self._words - self._half), np.uint64)
            first[:, held], second[held] = self._first[:, held], self._second[held]
            self._first, self._second = first, second
        for at in range(self._count, len(self._rows), _BLOCK):
            block = slice(at, min(at + _BLOCK, len(self._rows)))
            words = self._sketch(self._rows.vectors(block))
            self._first[:, block], self._second[block] = words[:, : self._half].T, words[:, self._half :]
        self._count = len(self._rows)

    def halves(self, rows: NDArray[np.intp] | slice, query: NDArray[np.float32]) -> Distances:
        """In how many bits of their first half the sketches of `rows` differ from that of `query`."""
        words = self._sketch(query[None])[0]
        columns = self._first[:, : self._count]
        distances: Distances = np.bitwise_count(columns[0][rows] ^ words[0])
        if self._half * _WORD > np.iinfo(np.uint8).max:
            distances = distances.astype(np.uint16)
        for column, word in zip(columns[1:], words[1 : self._half], strict=True):
            distances += np.bitwise_count(column[rows] ^ word)
        return distances

    def distances(
        self, rows: NDArray[np.intp] | slice, query: NDArray[np.float32], halves: Distances | None = None
    ) -> NDArray[np.uint16]:
        """In how many bits the sketches of `rows` differ from that of `query`; `halves`: in their first half."""
        words = self._sketch(query[None])[0, self._half :]
        distances = (self.halves(rows, query) if halves is None else halves).astype(np.uint16)
        # `take` copies short rows in a third of the time that an index does.
        second = self._second[rows] if isinstance(rows, slice) else self._second.take(rows, axis=0)
        for counts in np.bitwise_count(second ^ words).T:
            distances += counts
        return distances

    def nearest(self, rows: NDArray[np.intp], query: NDArray[np.float32], count: int) -> NDArray[np.intp]:
        """The `count` of `rows` that differ least from `query`, and whatever equals the last of them, in order."""
        return rows[_least(self.distances(rows, query), count)]

    def nearest_of_all(
        self, query: NDArray[np.float32], count: int, longlist: int, inside: NDArray[np.bool_]
    ) -> NDArray[np.intp]:
        """As `nearest` of the rows that are `inside` (a mask, from the first row on); fast where most of them are.

        Looks at the second half of the bits of only about the `longlist` rows that differ least in the first.
        """
        halves = self.halves(slice(0, len(inside)), query)
        # One distance in `step` tells how large the least of them are.
        step = max(1, len(inside) // _SAMPLE)
        reach = _last(halves[::step][inside[::step]], -(-longlist // step))
        rows = np.flatnonzero((halves <= reach) & inside)
        if len(rows) < max(count, longlist // 2):
            # Those looked at were no picture of the rest.
            rows = np.flatnonzero(inside)
        return rows[_least(self.distances(rows, query, halves[rows]), count)]

    def _sketch(self, vectors: Vectors) -> Words:
        bits = np.packbits(vectors > self._centre, axis=1)
        padded = np.zeros((len(vectors), self._words * 8), np.uint8)
        padded[:, : bits.shape[1]] = bits
        return padded.view(np.uint64)


def _last(distances: Distances, count: int) -> int:
    """The greatest of the `count` least distances."""
    # Counting beats sorting: there are only as many distances as dimensions.
    return int(np.searchsorted(np.cumsum(np.bincount(distances)), count))


def _least(distances: Distances, count: int) -> NDArray[np.intp]:
    """The places of the `count` least distances, and of whatever equals the last of them, in order."""
    return np.flatnonzero(distances <= _last(distances, count))
