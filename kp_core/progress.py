"""Progress of long work: a bar in a terminal or notebook, lines in a file or pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

_LINE_EVERY_S = 5.0


class _Lines:
    """A file for tqdm without a terminal: writes each state on its own line."""

    _last = ""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line and line != self._last:
            sys.stderr.write(f"{line}\n")
        self._last = line or self._last

    def flush(self) -> None:
        sys.stderr.flush()


def bar_of(  # noqa: PLR0913 - what a bar says
    name: str, total: int | None, unit: str, items: Iterable[Any] | None = None, *, done: int = 0, shown: bool = True
) -> tqdm[Any]:
    """Return a progress bar, over `items` if given; without a terminal or notebook, it prints a line every few seconds.

    `done` of the `total` are already finished.
    """
    wide = sys.stderr.isatty() or "ipykernel" in sys.modules
    interval = 0.1 if wide else _LINE_EVERY_S
    return tqdm(
        items,
        desc=name,
        total=total,
        initial=done,
        unit=unit,
        unit_scale=unit == "B",
        file=None if wide else _Lines(),
        delay=1 if wide else interval,
        mininterval=interval,
        miniters=None if wide else 1,
        ncols=None if wide else 80,
        ascii=not wide,
        disable=not shown,
    )
