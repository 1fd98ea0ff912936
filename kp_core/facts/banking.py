"""Banks: groups of about twenty similar facts, by k-means over their vectors (§2.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kp_core.bundled import needing

__all__ = ["BANK_SIZE", "LARGEST", "Vectors", "cluster"]

Vectors = NDArray[np.float32]

BANK_SIZE = 20
"""Default number of facts in a bank, as in the paper."""

LARGEST = 2
"""A new bank with more than this many times the bank size is split in half."""

_PLUS_PLUS_UP_TO = 5000
_ROUNDS = 20
_SEED = 0


def cluster(vectors: Vectors, bank_size: int) -> tuple[NDArray[np.int32], Vectors]:
    """Cluster `vectors`, `(n, dimensions)`; returns the bank of each, and the centroids, `(banks, dimensions)`.

    Banks are numbered from 0 and hold about `bank_size` vectors, at most `LARGEST` times that. A centroid is the
    normalised mean. Raises `MissingDependencyError` if scikit-learn is not installed.
    """
    with needing("Making banks needs scikit-learn", "chroma"):
        from sklearn.cluster import KMeans
    count = -(-len(vectors) // bank_size)
    labels = np.zeros(len(vectors), np.int32)
    if count > 1:
        # For thousands of vectors, k-means++ takes most of the time and changes little.
        begin = "k-means++" if len(vectors) <= _PLUS_PLUS_UP_TO else "random"
        means = KMeans(count, init=begin, n_init=1, max_iter=_ROUNDS, random_state=_SEED)
        labels = np.asarray(means.fit_predict(vectors), np.int32)
    largest = LARGEST * bank_size
    while (sizes := np.bincount(labels)).max() > largest:
        for label in np.flatnonzero(sizes > largest).tolist():
            rows = np.flatnonzero(labels == label)
            labels[rows[_half(vectors[rows])]] = labels.max() + 1
    labels = np.unique(labels, return_inverse=True)[1].astype(np.int32)
    sums = np.zeros((labels.max() + 1, vectors.shape[1]), np.float32)
    np.add.at(sums, labels, vectors)
    return labels, _normalised(sums)


def _half(vectors: Vectors) -> NDArray[np.intp]:
    """Return the rows of one of two groups; for identical vectors, every second row."""
    from sklearn.cluster import KMeans

    spread = float(np.ptp(vectors, axis=0).max())
    labels = KMeans(2, n_init=1, random_state=_SEED).fit_predict(vectors) if spread > 0 else None
    rows = np.arange(len(vectors))[1::2] if labels is None else np.flatnonzero(labels == 1)
    return rows if 0 < len(rows) < len(vectors) else np.arange(len(vectors))[1::2]


def _normalised(sums: Vectors) -> Vectors:
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    # Vectors that cancel out have no mean direction; any direction will do.
    first_axis = np.eye(1, sums.shape[1], dtype=np.float32)
    return np.where(lengths > 1e-6, sums / np.maximum(lengths, 1e-6), first_axis).astype(np.float32)
