"""The results of a run on an accelerator: kept in a file after every row, shown as tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kp_core import Session
from kp_core.engines.local.engine import LocalEngine

__all__ = ["DeviceLostError", "Report", "local", "synchronise"]


class DeviceLostError(Exception):
    """The device no longer computes. What was measured before is in the report."""


class Report:
    """Rows by part, in the JSON file `path` after every row, and as tables beside it.

    `minutes` is the time for everything. What could not be run is in `figures["cannot"]`, a line each.
    """

    def __init__(self, path: Path, minutes: float, device: torch.device, about: Mapping[str, Any]) -> None:
        self.figures: dict[str, Any] = {"about": dict(about), "cannot": []}
        self.device = device
        self._path, self._start, self._seconds = path, time.monotonic(), 60 * minutes

    def has_time(self, share: float, needed_s: float = 0.0) -> bool:
        """Whether the first `share` of the time is not over, and `needed_s` seconds of it are left."""
        return time.monotonic() - self._start + needed_s <= share * self._seconds

    def add(self, part: str, row: Mapping[str, Any]) -> None:
        """Add a row to a part, and write the file."""
        self.figures.setdefault(part, []).append(dict(row))
        self._write()

    def _write(self) -> None:
        self.figures["seconds"] = round(time.monotonic() - self._start, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".part")  # A run may be killed while it writes.
        written.write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")
        written.replace(self._path)

    def cannot(self, what: str, why: object) -> None:
        """Say in one line what was not run, and why."""
        reason = (str(why).strip() or type(why).__name__).partition("\n")[0]
        self.figures["cannot"].append(f"{what}: {reason}")
        print(f"Not run: {what}: {reason}", flush=True)
        self._write()

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Go on after an error in the block, and say it. Raises `DeviceLostError` if the device is gone."""
        try:
            yield
            synchronise(self.device)
        except Exception as error:  # noqa: BLE001 - whatever fails must not end the run
            self.cannot(what, f"{type(error).__name__}: {error}")
            try:
                torch.zeros(1, device=self.device).add_(1).item()
            except (RuntimeError, AssertionError) as lost:
                raise DeviceLostError(str(lost).partition("\n")[0]) from error

    def show(self, part: str, notes: Sequence[str] = ()) -> None:
        """Print the tables of a part, one for each kind of row, and write all tables so far to a text file."""
        lines = ["", part, "=" * len(part)]
        tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in self.figures.get(part, []):
            tables.setdefault(tuple(row), []).append(row)
        for columns, rows in tables.items():
            cells = [list(columns), *([_cell(row[column]) for column in columns] for row in rows)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines += ["", *("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)]
        text = "\n".join([*lines, *notes])
        print(text, flush=True)
        self._write()
        with self._path.with_suffix(".txt").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "-" if value is None else str(value)


def synchronise(device: torch.device) -> None:
    """Wait until the device has computed everything."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def local(session: Session) -> LocalEngine:
    """The engine of a session on this machine."""
    if not isinstance(session.engine, LocalEngine):
        raise TypeError(f"Got a session on {type(session.engine).__name__}; expected one on this machine.")
    return session.engine
