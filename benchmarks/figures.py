"""The pictures of the docs, drawn from what the benchmarks wrote: `--results` is the folder of their JSON files.

A benchmark whose file is not there is passed over. Pictures that need more than its figures are drawn by the benchmark
itself (`--plots`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import packets, plots

__all__ = ["DRAWN", "main"]


def _ttft(found: dict[str, Any], folder: Path) -> None:
    rows = found["rows"]
    columns = {"text": "text_s", "pack on disk": "pack_disk_s", "pack in memory": "pack_memory_s"}
    series = {name: [row[column] for row in rows] for name, column in columns.items()}
    labels = ("tokens of knowledge", "seconds to the first token", "")
    plots.lines(folder, "ttft", [row["tokens"] for row in rows], series, {}, labels)


def _agent(found: dict[str, Any], folder: Path) -> None:
    [conversation, *_] = found["conversations"]
    names = {"text": "text", "select": "packs, select:packs=1"}
    if set(names) <= set(conversation):
        panels = {
            label: {shown: [step[cost] for step in conversation[name]["steps"]] for name, shown in names.items()}
            for cost, label in {"first": "seconds to the first tokens", "read": "tokens of the prompt"}.items()
        }
        plots.panels(folder, "agent", "searches of the agent", panels, "the window is full")


def _size(found: dict[str, Any], folder: Path) -> None:
    rows = found["rows"]
    series = {"bytes": [row["bytes_ratio"] for row in rows], "time to load": [row["load_ratio"] for row in rows]}
    plots.bars(folder, "size", [row["compression"] for row in rows], series, "over a plain pack")


def _concurrency(found: dict[str, Any], folder: Path) -> None:
    rows = [row for row in found["rows"] if row["at_once"] in {1, row["users"]}]
    users = sorted({row["users"] for row in rows})
    series = {
        name: [
            next(row["tok_s"] for row in rows if row["users"] == count and row["at_once"] == (at or count))
            for count in users
        ]
        for name, at in {"together": 0, "one by one": 1}.items()
    }
    plots.bars(folder, "concurrency", [f"{count} users" for count in users], series, "tokens a second")


DRAWN: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "ttft": _ttft,
    "agent": _agent,
    "size": _size,
    "concurrency": _concurrency,
    "packets": packets.draw,
}
"""How each benchmark's figures are drawn."""


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("bench-results"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="default: %(default)s")
    asked = parser.parse_args(argv)
    for name, draw in DRAWN.items():
        path = asked.results / f"{name}.json"
        if path.is_file():
            draw(json.loads(path.read_text(encoding="utf-8")), asked.out)
            print(f"{name}: drawn")
        else:
            print(f"{name}: there is no {path}")


if __name__ == "__main__":
    main()
