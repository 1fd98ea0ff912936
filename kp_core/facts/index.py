"""From a question's vector to the rows nearest to it: banks, sketches, scores; and how much of each it takes.

A search looks at the `probes` banks with the nearest centroids. Where these hold many facts, sketches choose the
`shortlist` that is scored; where these are all banks, half sketches choose the `longlist` whose whole sketches are
looked at. The numbers are measured on the bank's own facts: see `Index.calibrate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import BankError
from kp_core.facts.clusters import Banks
from kp_core.facts.rows import Rows
from kp_core.facts.sketch import Sketches

__all__ = ["Calibration", "Index"]

_SAMPLE = 256
_BLOCK = 8192
_ALIKE = 1e-3
# Part of its bank's centroid that a fact is asked for without: how hard questions are taken to be.
_COMMON = 0.7
# So many facts are scored at least, and one of so many: fewer save no time, and questions are harder than facts that
# serve as such. Likewise those whose whole sketches are looked at.
_ALWAYS_SCORED, _SCORED_OF, _LISTED_OF = 512, 200, 24
# Part of the banks, or of the facts, above which going through all sketches is faster than collecting some of them.
_CHOSEN = 1 / 8
# Ties at the border are settled among more than the k asked for.
_PER_HIT = 8


@dataclass(frozen=True)
class Calibration:
    """How many banks to search, and of how many facts what, so that flat search would find hardly more.

    `recall` is the mean share of the `k` nearest facts, over `sample` facts of the bank taken as questions (each left
    out of its own answer), that searching `probes` of `banks` banks, looking at the whole sketches of `longlist` facts
    and scoring `shortlist` of these finds. `target` is what was asked for. `probes` is as many as those facts need
    without most of what their banks have in common, which is more. Made when the bank had `facts` facts.
    """

    target: float
    recall: float
    probes: int
    longlist: int
    shortlist: int
    k: int
    sample: int
    banks: int
    facts: int

    def probes_of(self, banks: int) -> int:
        """How many of the `banks` there are now to search: the same share; all where choosing takes longer."""
        share = self.probes / self.banks
        return banks if share > _CHOSEN else max(1, math.ceil(share * banks))


class Index:
    """Vectors in banks, searched by cosine; not safe for threads."""

    def __init__(
        self,
        rows: Rows,
        labels: NDArray[np.int32],
        bank_size: int,
        random_state: int,
        calibration: Calibration | None = None,
    ) -> None:
        self.rows, self.calibration = rows, calibration
        self.banks = Banks(rows, labels, bank_size, random_state)
        self.sketches = Sketches(rows, np.flatnonzero(labels >= 0))

    @property
    def probes(self) -> int:
        """Banks that a search looks at unless it says otherwise."""
        return self.calibration.probes_of(len(self.banks)) if self.calibration else len(self.banks)

    def add(self, row: int) -> None:
        """Put a row that the table has got into the nearest bank."""
        self.sketches.extend()
        self.banks.add(row)

    def search(
        self,
        query: NDArray[np.float32],
        k: int,
        probes: int | None = None,
        allowed: NDArray[np.bool_] | None = None,
    ) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """At least the `k` best rows that are `allowed`, where there are so many, and their cosines; in no order."""
        wanted = self.probes if probes is None else probes
        longlist, shortlist = self._lists(k)
        # All banks are scored in full only where the caller says so.
        everything = probes is not None and wanted >= len(self.banks)
        if wanted < len(self.banks):
            rows = self.banks.of(self._choose(query, k, wanted, allowed))
            if allowed is not None:
                rows = rows[allowed[rows]]
        else:
            inside = self.banks.labels >= 0
            if allowed is not None:
                inside[: len(allowed)] &= allowed[: len(inside)]
            if not everything and np.count_nonzero(inside) > _CHOSEN * len(inside):
                return self.rows.best(self.sketches.nearest_of_all(query, shortlist, longlist, inside), query, k)
            rows = np.flatnonzero(inside)
        if len(rows) > shortlist and not everything:
            rows = self.sketches.nearest(rows, query, shortlist)
        return self.rows.best(rows, query, k)

    def calibrate(self, target: float, k: int, seed: int) -> Calibration:
        """Measure how many banks and how many facts it takes to find `target` of the `k` nearest facts.

        Half of what may be missed is left to the difference between facts and real questions, the other half shared
        between banks, half sketches and sketches. Raises `BankError` for a target that is not in (0, 1] and for `k`
        below 1.
        """
        if not 0 < target <= 1 or k < 1:
            raise BankError(f"Got target={target}, k={k}; expected a target in (0, 1] and k of at least 1.")
        labels = self.banks.labels
        alive = np.flatnonzero(labels >= 0)
        sample = np.random.default_rng(seed).permutation(alive)[:_SAMPLE]
        k_found = min(k, len(alive) - 1)
        if k_found < 1:
            lists = _least_lists(len(alive))
            return Calibration(target, 1.0, len(self.banks), *lists, k, len(sample), len(self.banks), len(alive))
        own, questions = self._questions(sample)
        truth = self._flat(alive, own, questions, k_found)
        bank_ranks, half_ranks, sketch_ranks = (np.empty(truth.shape, np.intp) for _ in range(3))
        for at, question in enumerate(questions):
            # How many are at least as near, itself included.
            nearness = self.banks.centroids @ question
            bank_ranks[at] = (nearness[None] >= nearness[labels[truth[at]], None]).sum(axis=1)
            for ranks, measured in ((half_ranks, self.sketches.halves), (sketch_ranks, self.sketches.distances)):
                distances = measured(slice(0, len(labels)), question)
                until = np.cumsum(np.bincount(distances[alive]))
                ranks[at] = 1 + np.append(0, until)[distances[truth[at]]]
        kept = 1 - (1 - target) / 6
        # Which banks hold the answer depends on the kind of question: the harder one decides. Sketches know no banks.
        kinds = (slice(0, len(sample)), slice(len(sample), None))
        probes = max(int(np.quantile(bank_ranks[kind], kept, method="higher")) for kind in kinds)
        longlist, shortlist = (
            max(least, int(np.quantile(ranks[kinds[0]], kept, method="higher")))
            for ranks, least in zip((half_ranks, sketch_ranks), _least_lists(len(alive)), strict=True)
        )
        found = (bank_ranks <= probes) & (half_ranks <= longlist) & (sketch_ranks <= shortlist)
        recall = float(found[kinds[0]].mean())
        return Calibration(target, recall, probes, longlist, shortlist, k, len(sample), len(self.banks), len(alive))

    def _questions(self, sample: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Facts as questions, to be left out of their own answers; and again without what their bank has in common.

        A question that asks for the one thing that sets a fact apart ("What is the trade of X?" among facts that are
        alike but for X) lies far from its bank, and facts alone would not show how far.
        """
        facts = self.rows.vectors(sample)
        apart = facts - _COMMON * self.banks.centroids[self.banks.labels[sample]]
        lengths = np.linalg.norm(apart, axis=1, keepdims=True)
        # A bank of one fact has nothing in common with itself.
        apart = np.where(lengths > _ALIKE, apart / np.maximum(lengths, _ALIKE), facts).astype(np.float32)
        return np.append(sample, np.full(len(sample), -1)), np.concatenate([facts, apart])

    def _lists(self, k: int) -> tuple[int, int]:
        """How many facts to look at the whole sketches of, and how many of these to score, to find `k`."""
        longlist, shortlist = _least_lists(len(self.banks.labels))
        if about := self.calibration:
            longlist, shortlist = max(longlist, about.longlist), max(shortlist, about.shortlist)
        return max(longlist, _PER_HIT * k), max(shortlist, _PER_HIT * k)

    def _choose(
        self, query: NDArray[np.float32], k: int, probes: int, allowed: NDArray[np.bool_] | None
    ) -> NDArray[np.intp]:
        """The `probes` nearest banks that hold allowed rows, and as many more as it takes to have `k`."""
        banks = self.banks
        if allowed is None:
            sizes = banks.sizes
            first = banks.nearest(query, probes)
            if int(sizes[first].sum()) >= k:
                return first
        else:
            labels = banks.labels
            inside = labels[: len(allowed)][allowed[: len(labels)]]
            sizes = np.bincount(inside[inside >= 0], minlength=len(banks))
        order = banks.order(query)
        order = order[sizes[order] > 0]
        enough = int(np.searchsorted(np.cumsum(sizes[order]), k)) + 1
        return order[: max(probes, enough)]

    def _flat(
        self, alive: NDArray[np.intp], own: NDArray[np.intp], questions: NDArray[np.float32], k: int
    ) -> NDArray[np.intp]:
        """The `k` best rows for each question but its own, in no order, from scoring every row."""
        best = np.zeros((len(questions), 0), np.intp)
        scores = np.zeros((len(questions), 0), np.float32)
        for at in range(0, len(alive), _BLOCK):
            block = alive[at : at + _BLOCK]
            products = questions @ self.rows.vectors(block).T
            products[own[:, None] == block[None]] = -np.inf
            scores = np.concatenate([scores, products], axis=1)
            best = np.concatenate([best, np.broadcast_to(block, products.shape)], axis=1)
            top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
            scores, best = np.take_along_axis(scores, top, 1), np.take_along_axis(best, top, 1)
        return best


def _least_lists(facts: int) -> tuple[int, int]:
    """The least `longlist` and `shortlist` of so many facts; they grow with a bank that was calibrated before."""
    return max(_ALWAYS_SCORED, facts // _LISTED_OF), max(_ALWAYS_SCORED, facts // _SCORED_OF)
