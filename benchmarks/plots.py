"""Pictures of the benchmarks, as PNG and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

__all__ = ["bars", "lines"]

_MARKS = ("o-", "s--", "^:", "d-.")


def lines(  # noqa: PLR0913
    folder: Path,
    name: str,
    x: Sequence[float],
    left: Mapping[str, Sequence[float]],
    right: Mapping[str, Sequence[float]],
    labels: tuple[str, str, str],
    levels: Mapping[str, float] | None = None,
) -> None:
    """Lines over `x` on two scales, `labels` those of x, left and right; `levels` are dotted lines on the left."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for at, (label, values) in enumerate(left.items()):
        axes.plot(x, values, _MARKS[at % 4], color=f"C{at}", label=label)
    for label, level in (levels or {}).items():
        axes.axhline(level, color="grey", linestyle=":", label=label)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    handles = axes.get_legend_handles_labels()
    if right:
        twin = axes.twinx()
        for at, (label, values) in enumerate(right.items(), len(left)):
            twin.plot(x, values, _MARKS[at % 4], color=f"C{at}", label=label)
        twin.set(ylabel=labels[2], ylim=(-0.05, 1.05))
        more = twin.get_legend_handles_labels()
        handles = handles[0] + more[0], handles[1] + more[1]
    axes.legend(*handles, fontsize=8)
    _save(figure, folder, name)


def bars(folder: Path, name: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], label: str) -> None:
    """One group of bars per name in `groups`, one bar per series in it."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(series)
    for at, (title, values) in enumerate(series.items()):
        axes.bar([place + at * width - 0.4 + width / 2 for place in range(len(groups))], values, width, label=title)
    axes.axhline(0, color="black", linewidth=0.8)
    slanted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(groups) > 4 else {}
    axes.set_xticks(range(len(groups)), groups, fontsize=8, **slanted)
    axes.set(ylabel=label)
    # Above the axes: anywhere inside it may cover a bar.
    figure.legend(loc="outside upper center", ncols=len(series), fontsize=8)
    _save(figure, folder, name)


def _save(figure: Figure, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=110)
    # The same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
