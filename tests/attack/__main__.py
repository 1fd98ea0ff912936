"""Attack for minutes: each class in a process of its own, one after another, with as much time each (and what it takes to start).

`python -m tests.attack --minutes 15 --seed 7` prints a table, and for what came out badly the line that repeats it:
`python -m tests.attack --only files --seed 7 --case 123`. A process that dies or falls silent is counted, and
the class goes on behind the case that did it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.attack.harness import CASE_SECONDS, NAMES, Tally, run

_COLUMNS = ("tried", "wrong", "uncaught", "lost", "hung")
_START_SECONDS = 300  # Importing and loading take their time on a busy machine.
_DEAF_SECONDS = 3 * CASE_SECONDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the classes, print the table; 1 where anything came out badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, metavar="N", help="in all; default: %(default)s")
    parser.add_argument("--seed", default="0", help="of all that is drawn; default: %(default)s")
    parser.add_argument("--only", metavar="CLASS,...", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--case", type=int, metavar="N", help="try this case alone, of the one class of --only")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--worker", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else NAMES
    if wrong := [name for name in names if name not in NAMES]:
        parser.error(f"got the classes {', '.join(wrong)}; there are {', '.join(NAMES)}")
    if arguments.worker is not None:
        return _work(names[0], arguments.seed, arguments.worker, arguments.start)
    if arguments.case is not None:
        with tempfile.TemporaryDirectory() as folder:
            tally = run(names[0], arguments.seed, Path(folder), numbers=range(arguments.case, arguments.case + 1))
        sys.stdout.write("\n".join([*tally.said, f"bad: {tally.bad}", ""]))
        return int(tally.bad > 0)
    figures = {name: _watch(name, arguments.seed, 60 * arguments.minutes / len(names)) for name in names}
    _show(figures, arguments.seed)
    if arguments.json:
        content = {"seed": arguments.seed, "minutes": arguments.minutes, **{n: asdict(t) for n, t in figures.items()}}
        arguments.json.write_text(json.dumps(content, indent=1))
    return int(any(tally.bad for tally in figures.values()))


def _work(name: str, seed: str, seconds: float, start: int) -> int:
    """What a process does: a line of JSON before it starts, and for each case."""
    # Here goes what is reported; what the attacked print goes nowhere.
    with os.fdopen(os.dup(1), "w", buffering=1) as out, tempfile.TemporaryDirectory() as folder:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

        def tell(number: int, seconds: float, tally: Tally) -> None:
            out.write(json.dumps([number, seconds, asdict(tally)]) + "\n")

        run(name, seed, Path(folder), numbers=range(start, start + 1), seconds=seconds, tell=tell)
    return 0


def _watch(name: str, seed: str, seconds: float) -> Tally:
    """Let a process work at a class, and further ones behind the cases that it does not survive."""
    total, start, left = Tally(), 0, seconds
    command = [sys.executable, "-m", "tests.attack", "--only", name, "--seed", seed]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    while left > 0:
        tally, limit, took = Tally(), float(_START_SECONDS), left
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(  # noqa: S603 - our own
                [*command, "--worker", str(left), "--start", str(start)],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            ) as process,
        ):  # fmt: skip
            lines = _lines(process)
            try:
                while (line := lines.get(timeout=limit)) is not None:
                    number, took, told = json.loads(line)
                    tally, start, limit = Tally(**told), number + 1, float(_DEAF_SECONDS)
            except queue.Empty:
                process.kill()
                tally.hung, tally.tried = tally.hung + 1, tally.tried + 1
                tally.said.append(f"hung: --only {name} --seed {seed} --case {start}: deaf to signals")
            else:
                if process.wait() == 0:
                    took = left
                else:
                    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
                    tally.uncaught, tally.tried = tally.uncaught + 1, tally.tried + 1
                    end = errors.read().decode(errors="replace").strip()
                    died = f"the process ended with {process.returncode}: {end[-400:]}"
                    tally.said.append(f"uncaught: --only {name} --seed {seed} --case {start}: {died}")
            start, left = start + 1, left - took
        for column in _COLUMNS:
            setattr(total, column, getattr(total, column) + getattr(tally, column))
        total.said += tally.said
        sys.stdout.write("".join(f"{line}\n" for line in tally.said))
        sys.stdout.write(f"{name}: {total.tried} tried, {total.bad} bad\n")
        sys.stdout.flush()
    return total


def _lines(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """The lines that a process writes, then `None`."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def _show(figures: dict[str, Tally], seed: str) -> None:
    table = Table("class", title=f"Attacks, seed {seed}", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, tally in figures.items():
        table.add_row(name, *(f"{getattr(tally, column):,}" for column in _COLUMNS))
    table.add_section()
    sums = (sum(getattr(tally, column) for tally in figures.values()) for column in _COLUMNS)
    table.add_row("all", *(f"{each:,}" for each in sums))
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
