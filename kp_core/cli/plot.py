"""A map of banks: their centroids in two dimensions, as large as they hold facts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kp_core.errors import BankError, MissingDependencyError
from kp_core.facts.routing import RoutedBank

__all__ = ["plot_banks"]

_NAMED = 12


def plot_banks(bank: RoutedBank, path: Path) -> None:
    """Write a PNG of the bank's centroids along their two main axes; the largest banks are named by their first fact.

    Raises `MissingDependencyError` where matplotlib is absent, `BankError` for a bank without facts.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError('A plot needs matplotlib: `pip install "knowledge-packs[cli]"`.') from error
    centroids = bank.centroids
    if not len(centroids):
        raise BankError("The bank is empty; there is nothing to plot.")
    centred = centroids - centroids.mean(axis=0)
    _, spread, axes = np.linalg.svd(centred, full_matrices=False)
    # A bank alone, or two, span fewer axes than a plot has.
    places = np.zeros((len(centroids), 2))
    places[:, : min(2, len(axes))] = centred @ axes[:2].T
    share = float((spread[:2] ** 2).sum() / max(1e-12, (spread**2).sum()))
    sizes = np.array([len(bank.bank_facts(number)) for number in range(len(centroids))])
    figure = Figure(figsize=(10, 8), layout="constrained")
    plot = figure.add_subplot()
    plot.scatter(places[:, 0], places[:, 1], s=4 * sizes, alpha=0.6)
    for number in np.argsort(-sizes, kind="stable")[:_NAMED].tolist():
        first = bank.bank_facts(number)[0]
        plot.annotate(f"{number}: {(first.title or first.text)[:32]}", places[number], fontsize=7)
    plot.set_title(f"{len(centroids)} banks of {len(bank)} facts; the two axes show {share:.0%} of their spread")
    plot.set_xticks([])
    plot.set_yticks([])
    figure.savefig(path, format="png", dpi=120)
