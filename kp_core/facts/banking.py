"""Banks: groups of about twenty facts that say similar things, by k-means over their vectors (§2.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kp_core.bundled import needing

__all__ = ["BANK_SIZE", "Bank", "Vectors", "cluster", "make_banks", "split_bank"]

Vectors = NDArray[np.float32]

BANK_SIZE = 20
"""Facts in a bank where nothing is said, as in the paper."""

_PLUS_PLUS_UP_TO = 5000
_ROUNDS = 20
_SEED = 0
# A bank this many times larger than asked for is split.
_LARGEST = 2


@dataclass(frozen=True)
class Bank:
    """One bank of a namespace: its number, the ids of its facts, and their normalised mean, shape `(dimensions,)`."""

    number: int
    ids: tuple[str, ...]
    centroid: Vectors = field(compare=False, repr=False)

    def without(self, ids: Iterable[str]) -> Bank:
        """The bank, less these facts; its centroid stays."""
        gone = set(ids)
        return Bank(self.number, tuple(each for each in self.ids if each not in gone), self.centroid)

    def joined(self, ids: Sequence[str], vectors: Vectors) -> Bank:
        """The bank with further facts; the centroid moves as if it had been the mean of as many vectors."""
        total = self.centroid * len(self.ids) + vectors.sum(axis=0)
        return Bank(self.number, (*self.ids, *ids), _unit(total))


def cluster(vectors: Vectors, bank_size: int) -> NDArray[np.int32]:
    """A label from 0 on for each of `vectors`, so that groups are of about `bank_size`, none above twice that.

    Raises `MissingDependencyError` where scikit-learn is absent.
    """
    with needing("Making banks needs scikit-learn", "chroma"):
        from sklearn.cluster import KMeans
    count = -(-len(vectors) // bank_size)
    if count < 2:
        return np.zeros(len(vectors), np.int32)
    # Choosing centres far apart takes longer than all else where there are thousands, and changes little there.
    begin = "k-means++" if len(vectors) <= _PLUS_PLUS_UP_TO else "random"
    means = KMeans(count, init=begin, n_init=1, max_iter=_ROUNDS, random_state=_SEED)
    labels = np.asarray(means.fit_predict(vectors), np.int32)
    largest = _LARGEST * bank_size
    while (sizes := np.bincount(labels)).max() > largest:
        for label in np.flatnonzero(sizes > largest).tolist():
            rows = np.flatnonzero(labels == label)
            labels[rows[_halves(vectors[rows])]] = labels.max() + 1
    return np.unique(labels, return_inverse=True)[1].astype(np.int32)


def make_banks(ids: Sequence[str], vectors: Vectors, bank_size: int, first: int = 0) -> list[Bank]:
    """Banks of the facts with these ids and vectors, numbered from `first` on."""
    if not ids:
        return []
    labels = cluster(vectors, bank_size)
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return [
        Bank(first + number, tuple(ids[row] for row in rows), _unit(vectors[rows].sum(axis=0)))
        for number, rows in enumerate(groups)
    ]


def split_bank(bank: Bank, vectors: Vectors, bank_size: int, first: int) -> list[Bank]:
    """The banks that `bank`, whose facts have these vectors, falls into: one under its number, the others from `first`.

    A bank that is not too large stays as it is.
    """
    if len(bank.ids) <= _LARGEST * bank_size:
        return [bank]
    kept, *others = make_banks(bank.ids, vectors, bank_size, first - 1)
    return [Bank(bank.number, kept.ids, kept.centroid), *others]


def _halves(vectors: Vectors) -> NDArray[np.intp]:
    """The rows of one of two groups; of vectors that are all alike, every second."""
    from sklearn.cluster import KMeans

    spread = float(np.ptp(vectors, axis=0).max())
    labels = KMeans(2, n_init=1, random_state=_SEED).fit_predict(vectors) if spread > 0 else None
    rows = np.arange(len(vectors))[1::2] if labels is None else np.flatnonzero(labels == 1)
    return rows if 0 < len(rows) < len(vectors) else np.arange(len(vectors))[1::2]


def _unit(vector: Vectors) -> Vectors:
    # Vectors that point everywhere have no mean direction; any will do.
    length = float(np.linalg.norm(vector))
    made = vector / length if length > 1e-6 else np.eye(1, len(vector), dtype=np.float32)[0]
    return np.asarray(made, np.float32)
