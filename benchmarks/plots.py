"""Pictures of the benchmarks: one style, as SVG for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

__all__ = ["bars", "lines", "panels", "points"]

_MARKS = ("o-", "s--", "^:", "d-.")
# Ink and colours that can be told apart by people who see no red or no green, on white and on black.
_STYLES = {
    "": ("#24292f", ["#d95f02", "#0072b2", "#009e73", "#aa4499", "#b8860b", "#7f7f7f"]),
    "-dark": ("#d0d7de", ["#f5a45d", "#56b4e9", "#44c9a0", "#d18ac8", "#e3c65b", "#a6a6a6"]),
}


def lines(  # noqa: PLR0913
    folder: Path,
    name: str,
    x: Sequence[float],
    left: Mapping[str, Sequence[float]],
    right: Mapping[str, Sequence[float]],
    labels: tuple[str, str, str],
    levels: Mapping[str, float] | None = None,
    *,
    scale: str = "linear",
) -> None:
    """Lines over `x` on two scales, `labels` those of x, left and right; `levels` are dotted lines on the left."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for at, (label, values) in enumerate(left.items()):
            axes.plot(x, values, _MARKS[at % 4], color=f"C{at}", label=label)
        for label, level in (levels or {}).items():
            axes.axhline(level, color="grey", linestyle=":", label=label)
        axes.set(xlabel=labels[0], ylabel=labels[1], yscale=scale)
        handles = axes.get_legend_handles_labels()
        if right:
            twin = axes.twinx()
            for at, (label, values) in enumerate(right.items(), len(left)):
                twin.plot(x, values, _MARKS[at % 4], color=f"C{at}", label=label)
            twin.set(ylabel=labels[2], ylim=(-0.05, 1.05))
            more = twin.get_legend_handles_labels()
            handles = handles[0] + more[0], handles[1] + more[1]
        axes.legend(*handles, fontsize=8)

    _save(draw, folder, name)


def panels(
    folder: Path, name: str, label: str, of_panel: Mapping[str, Mapping[str, Sequence[float]]], note: str
) -> None:
    """One panel beside another, each with points over 1, 2, ... (`label`). `note` marks where the first series ends.

    Points, because values that leap from one to the next make a line a solid block.
    """

    def draw(figure: Figure) -> None:
        for axes, (title, series) in zip(figure.subplots(1, len(of_panel)), of_panel.items(), strict=True):
            for at, (line, values) in enumerate(series.items()):
                axes.plot(range(1, len(values) + 1), values, ".", markersize=4, color=f"C{at}", label=line)
            first = next(iter(series.values()))
            if len(first) < max(map(len, series.values())):
                axes.plot(len(first), first[-1], "x", color="C0", label=note)
            axes.set(xlabel=label, ylabel=title, ylim=(0, None))
        figure.axes[0].legend(fontsize=8)

    _save(draw, folder, name)


def bars(folder: Path, name: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], label: str) -> None:
    """One group of bars per name in `groups`, one bar per series in it."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        width = 0.8 / len(series)
        for at, (title, values) in enumerate(series.items()):
            axes.bar([place + at * width - 0.4 + width / 2 for place in range(len(groups))], values, width, label=title)
        axes.axhline(0, color=mpl.rcParams["axes.edgecolor"], linewidth=0.8)
        slanted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(groups) > 4 else {}
        axes.set_xticks(range(len(groups)), groups, fontsize=8, **slanted)
        axes.set(ylabel=label)
        # Above the axes: anywhere inside it may cover a bar.
        figure.legend(loc="outside upper center", ncols=min(3, len(series)), fontsize=8)

    _save(draw, folder, name)


def points(
    folder: Path, name: str, places: Mapping[str, tuple[float, float, float, float]], labels: tuple[str, str]
) -> None:
    """Named points of x and y, with the interval of y from low to high; x is logarithmic."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for at, (label, (x, y, low, high)) in enumerate(places.items()):
            axes.errorbar(x, y, [[y - low], [high - y]], fmt=_MARKS[at % 4][0], color=f"C{at % 6}", label=label)
        axes.set(xlabel=labels[0], ylabel=labels[1], xscale="log")
        axes.legend(fontsize=8)

    _save(draw, folder, name)


def _save(draw: Callable[[Figure], None], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, (ink, colours) in _STYLES.items():
        inked = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
        # The same figures give the same file.
        style = {
            "svg.hashsalt": name,
            "axes.prop_cycle": cycler(color=colours),
            "axes.spines.top": False,
            "legend.frameon": False,
        }
        style |= inked
        with mpl.rc_context(style):
            figure = Figure(figsize=(7, 4), layout="constrained")
            draw(figure)
            # On a page of unknown colour the light one is to be read too, so it brings its own.
            figure.savefig(folder / f"{name}{suffix}.svg", transparent=bool(suffix), metadata={"Date": None})
