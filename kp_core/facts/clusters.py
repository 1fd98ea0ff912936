"""Banks as clusters: k-means for all facts at once, and banks that split and merge as facts come and go."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp_core.errors import MissingDependencyError
from kp_core.facts.rows import Rows, Vectors

__all__ = ["Banks", "cluster"]

# Where k-means starts decides where it ends; of so many starts over few facts the tightest clustering is kept.
_STARTS, _FEW = 4, 1024
# Of more facts than this, k-means over all of them would take minutes: they are divided first, into about so many each.
_AT_ONCE, _PART = 8192, 4096
_SAMPLE = 32_768
# A bank is split above this many times its size and merged below this part of it.
_SPLIT, _MERGE = 2, 4
_ROUNDS = 10
_AHEAD = 64


def cluster(rows: Rows, which: NDArray[np.intp], bank_size: int, random_state: int) -> NDArray[np.int32]:
    """The bank of each of the rows `which`: `ceil(facts / bank_size)` banks by k-means, none of them empty.

    There are fewer banks where there are fewer different vectors. Many facts are divided into large parts first, by
    k-means over a sample, and each part into banks; the number of banks may then differ by one per part.

    Raises `MissingDependencyError` where scikit-learn is absent.
    """
    banks = math.ceil(len(which) / bank_size)
    with _one_thread():
        if len(which) <= _AT_ONCE:
            starts = _STARTS if len(which) <= _FEW else 1
            return _compact(_k_means(rows.vectors(which), banks, random_state, starts))
        draw = np.random.default_rng(random_state)
        sample = rows.vectors(which[np.sort(draw.choice(len(which), min(len(which), _SAMPLE), replace=False))])
        centres = _means(sample, _compact(_k_means(sample, math.ceil(len(which) / _PART), random_state, 1)))
        blocks = [which[at : at + _AT_ONCE] for at in range(0, len(which), _AT_ONCE)]
        nearest = np.concatenate([np.argmax(rows.vectors(block) @ centres.T, axis=1) for block in blocks])
        labels, made = np.zeros(len(which), np.int32), 0
        for part in tqdm(range(len(centres)), "Clustering", unit="part", delay=1, disable=None):
            inside = np.flatnonzero(nearest == part)
            if len(inside):
                wanted = math.ceil(len(inside) / bank_size)
                found = _compact(_k_means(rows.vectors(which[inside]), wanted, random_state, 1))
                labels[inside] = found + made
                made += int(found.max()) + 1
        return labels


class Banks:
    """Which row stands in which bank; changes in place as rows come and go.

    `centroids`: the normalised mean of each bank, shape `(banks, dimensions)`. `labels`: the bank of each row, -1 for
    rows that were removed. Not safe for threads.
    """

    def __init__(self, rows: Rows, labels: NDArray[np.int32], bank_size: int, random_state: int) -> None:
        self.rows, self.bank_size, self.random_state = rows, bank_size, random_state
        self._labels, self._count = labels.copy(), len(labels)
        # The first of some new rows, their cosines to all centroids, and the banks whose centroids moved since.
        self._ahead, self._changed = (0, np.zeros((0, 0), np.float32)), set[int]()
        present = np.flatnonzero(labels >= 0)
        order = present[np.argsort(labels[present], kind="stable")]
        sizes = np.bincount(labels[present])
        self.members: list[NDArray[np.intp]] = np.split(order, np.cumsum(sizes)[:-1]) if len(order) else []
        self._centroids = np.zeros((len(self.members), rows.dimensions), np.float32)
        self._sizes = np.zeros(len(self.members), np.intp)
        for bank in range(len(self.members)):
            self._recentre(bank)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def labels(self) -> NDArray[np.int32]:
        """See the class."""
        return self._labels[: self._count]

    @property
    def centroids(self) -> Vectors:
        """See the class."""
        return self._centroids[: len(self.members)]

    @property
    def sizes(self) -> NDArray[np.intp]:
        """Facts per bank, shape `(banks,)`."""
        return self._sizes[: len(self.members)]

    def order(self, query: NDArray[np.float32]) -> NDArray[np.intp]:
        """All banks, nearest to `query` first; of equals the lower number first."""
        return np.argsort(-(self.centroids @ query), kind="stable")

    def nearest(self, query: NDArray[np.float32], count: int) -> NDArray[np.intp]:
        """The first `count` of `order`, without sorting them all."""
        scores = -(self.centroids @ query)
        if count >= len(scores):
            return np.argsort(scores, kind="stable")
        # Ties at the border are settled as `order` does: whatever is as near as the last is sorted too.
        few = np.flatnonzero(scores <= np.partition(scores, count - 1)[count - 1])
        return few[np.argsort(scores[few], kind="stable")][:count]

    def of(self, banks: Sequence[int] | NDArray[np.intp]) -> NDArray[np.intp]:
        """The rows of these banks."""
        found = [self.members[bank] for bank in banks]
        return np.concatenate(found) if found else np.zeros(0, np.intp)

    def add(self, row: int) -> None:
        """Put `row`, the first after those counted, into the bank nearest to it; a bank too large is split."""
        self.skip()
        self._place(row, self._foreseen(row))

    def skip(self) -> None:
        """Count a row that stands in no bank."""
        if self._count == len(self._labels):
            self._labels = np.concatenate([self._labels, np.full(1024 + self._count // 2, -1, np.int32)])
        self._labels[self._count] = -1
        self._count += 1

    def remove(self, row: int) -> None:
        """Take a row out; what is left of a bank that shrank too far goes to the banks nearest to each."""
        bank = int(self._labels[row])
        if bank < 0:
            return
        self._labels[row] = -1
        rest = self.members[bank][self.members[bank] != row]
        if len(rest) and (len(rest) * _MERGE >= self.bank_size or len(self.members) == 1):
            self._put(bank, rest)
            return
        self._drop(bank)
        for moved in rest.tolist():
            self._place(moved, self.centroids @ self.rows.vectors(slice(moved, moved + 1))[0])

    def _foreseen(self, row: int) -> NDArray[np.float32]:
        """Cosines of all centroids to a new row.

        Those of the rows that come next are made with it, which reads the centroids once for all of them; what has
        changed since is made anew.
        """
        start, ahead = self._ahead
        if not start <= row < start + len(ahead):
            ahead = self.rows.vectors(slice(row, row + _AHEAD)) @ self.centroids.T
            start, self._changed = row, set()
            self._ahead = start, ahead
        cosines = np.full(len(self.members), -1.0, np.float32)
        known = min(len(cosines), ahead.shape[1])
        cosines[:known] = ahead[row - start, :known]
        changed = np.array([bank for bank in self._changed if bank < len(cosines)], np.intp)
        cosines[changed] = self._centroids[changed] @ self.rows.vectors(slice(row, row + 1))[0]
        return cosines

    def _place(self, row: int, cosines: NDArray[np.float32]) -> None:
        bank = int(np.argmax(cosines)) if self.members else self._new()
        self._put(bank, np.append(self.members[bank], row))
        if len(self.members[bank]) > _SPLIT * self.bank_size:
            self._split(bank)

    def _put(self, bank: int, rows: NDArray[np.intp]) -> None:
        self.members[bank] = rows
        self._labels[rows] = bank
        self._recentre(bank)

    def _new(self) -> int:
        bank = len(self.members)
        if bank >= len(self._centroids):
            more = np.zeros((16 + bank // 2, self.rows.dimensions), np.float32)
            self._centroids = np.concatenate([self._centroids, more]) if bank else more
            self._sizes = np.concatenate([self._sizes, np.zeros(len(more), np.intp)])
        self.members.append(np.zeros(0, np.intp))
        return bank

    def _drop(self, bank: int) -> None:
        """Remove an empty bank; the last one takes its number."""
        last = len(self.members) - 1
        if bank != last:
            self.members[bank] = self.members[last]
            self._labels[self.members[bank]] = bank
            self._centroids[bank], self._sizes[bank] = self._centroids[last], self._sizes[last]
            self._changed.add(bank)
        self.members.pop()

    def _split(self, bank: int) -> None:
        rows = np.sort(self.members[bank])
        halves = _halves(self.rows.vectors(rows))
        if not halves.any():
            return
        self._put(bank, rows[~halves])
        self._put(self._new(), rows[halves])

    def _recentre(self, bank: int) -> None:
        self._changed.add(bank)
        self._sizes[bank] = len(self.members[bank])
        # From the members each time, in one order: a running sum would depend on what came and went.
        self._centroids[bank] = _mean(self.rows.vectors(np.sort(self.members[bank])))


def _mean(vectors: Vectors) -> Vectors:
    """The normalised mean; opposite vectors may cancel out, and then it is near to nothing and found last."""
    total = vectors.sum(axis=0, dtype=np.float64)
    length = float(np.linalg.norm(total))
    mean: Vectors = (total / length if length > 0 else total).astype(np.float32)
    return mean


def _means(vectors: Vectors, labels: NDArray[np.int32]) -> Vectors:
    return np.stack([_mean(vectors[labels == label]) for label in range(int(labels.max()) + 1)])


def _compact(labels: NDArray[Any]) -> NDArray[np.int32]:
    """`labels` numbered without gaps."""
    _, compact = np.unique(labels, return_inverse=True)
    return compact.astype(np.int32)


def _k_means(vectors: Vectors, clusters: int, random_state: int, starts: int) -> NDArray[np.int32]:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    clusters = min(clusters, len(vectors))
    if clusters < 2:
        return np.zeros(len(vectors), np.int32)
    # Many facts need not be exactly at rest: banks are searched several at a time.
    exact = {"n_init": starts, "tol": 0.0} if starts > 1 else {"n_init": 1, "max_iter": 25}
    with warnings.catch_warnings():
        # It warns of fewer different vectors than clusters, which is no mistake here.
        warnings.simplefilter("ignore", ConvergenceWarning)
        labels: NDArray[np.int32] = KMeans(clusters, random_state=random_state, **exact).fit(vectors).labels_
    return labels


def _halves(vectors: Vectors) -> NDArray[np.bool_]:
    """k-means for two clusters, from the two ends of `vectors`; all on side `False` where all are equal.

    Of our own, since it runs for every few facts that are added: scikit-learn takes longer to load than to add
    thousands.
    """
    one = vectors[np.argmin(vectors @ _mean(vectors))]
    other = vectors[np.argmin(vectors @ one)]
    sides: NDArray[np.bool_] = np.zeros(len(vectors), np.bool_)
    for _ in range(_ROUNDS):
        nearer = vectors @ other > vectors @ one
        if not nearer.any() or nearer.all() or (nearer == sides).all():
            break
        sides, one, other = nearer, _mean(vectors[~nearer]), _mean(vectors[nearer])
    return sides


def _one_thread() -> AbstractContextManager[Any]:
    """One thread adds up in one order: the same facts get the same banks on any number of cores. And where other work
    keeps the cores busy, threads that wait for each other take ten times as long.
    """
    try:
        import sklearn.cluster  # noqa: F401 - loaded before its thread pools are counted
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError(
            'Building a fact bank needs scikit-learn: `pip install "knowledge-packs[embed]"`.'
        ) from error
    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits
