"""Kills: what survives when the process that writes to a bank dies.

A process builds, adds, deletes and rebuilds until it is killed (`SIGKILL`) at a random moment, `--kills` times, always
on the same bank. After each kill every change that it acknowledged must be there, a deletion under way must be done as
a whole or not at all, and the bank must pass `verify`. In every fifth round Chroma follows, and is looked at too; in
those between it falls behind, so that it has to be mended.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks import common
from kp_core import ChromaFactBank

__all__ = ["main", "run"]

_MIRRORED = 5
_AT_ONCE = 5
_GONE = 4

Floats = NDArray[np.float32]

_CHANGE = f"""
import sys
import sklearn.cluster
from benchmarks.kills import Numbered
from kp_core import ChromaFactBank, Fact
bank = ChromaFactBank(sys.argv[1], Numbered(), mirror=bool(int(sys.argv[3])))
print("ready", flush=True)
step = 0
while True:
    step += 1
    change = bank.build if step % 6 == 4 else bank.add
    change([Fact(f"{{sys.argv[2]}}/{{step}}/{{number}}") for number in range({_AT_ONCE})])
    print("+", f"{{sys.argv[2]}}/{{step}}", flush=True)
    if step % 2 == 0:
        gone = [fact.id for fact, _ in zip(bank.facts(), range({_GONE}))]
        texts = [bank.get(fact_id).text for fact_id in gone]
        bank.delete(gone)
        print("-", *texts, flush=True)
    if step % 15 == 0:
        bank.rebuild()
"""


class Numbered:
    """A random unit vector per text, the same in every process."""

    name, dimensions = "numbered", 32

    def embed(self, texts: Sequence[str]) -> Floats:
        """See `kp_core.Embedder`."""
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Floats:
        """See `kp_core.Embedder`."""
        vector = np.random.default_rng(list(text.encode())).standard_normal(self.dimensions)
        return np.asarray(vector / np.linalg.norm(vector), np.float32)


def kill(rounds: int, seed: int, folder: Path) -> dict[str, int]:
    """How many changes were acknowledged and lost, and how often `verify` found something."""
    draw, texts = random.Random(seed), set[str]()  # noqa: S311 - moments need not be secret
    acknowledged = lost = unclean = 0
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for number in track(range(rounds), "Kills", transient=True):
        mirror = number % _MIRRORED == 0
        command = [sys.executable, "-c", _CHANGE, str(folder), str(number), str(int(mirror))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: S603
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("the process that is to be killed did not start")
            time.sleep(draw.uniform(0.0, 0.4))
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read().splitlines()
        acknowledged += len(said)
        for line in said:
            kind, *named = line.split(" ")
            texts = texts - set(named) if kind == "-" else texts | {f"{named[0]}/{part}" for part in range(_AT_ONCE)}
        with ChromaFactBank(folder, Numbered(), mirror=mirror) as bank:
            held = {fact.text for fact in bank.facts()}
            # One change may have been under way when the process died: done, not done, but never half of a deletion.
            gone, more = texts - held, held - texts
            lost += len(gone) not in {0, _GONE} or bool(gone and more)
            unclean += bool(bank.verify())
            texts = held
    return {"kills": rounds, "acknowledged": acknowledged, "lost": lost, "unclean": unclean}


def run(arguments: argparse.Namespace) -> dict[str, int]:
    """The figures, as the JSON file holds them."""
    with tempfile.TemporaryDirectory() as folder:
        return kill(arguments.kills, arguments.seed, Path(folder) / "bank")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="how often to kill; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    common.show_table("Killed", ("", "count"), [(name, str(count)) for name, count in figures.items()])
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
