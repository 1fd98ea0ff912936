"""Kills: what survives when the process that writes to a fact store dies.

A process adds, updates, deletes and rebuilds until it is killed (`SIGKILL`) at a random moment, `--kills` times, always
on the same folder. After each kill every change that it acknowledged must be there, a change under way must be done as
a whole or not at all, and the store must pass `verify`. The database has a collection of somebody else in it, of which
nothing may change.
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
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks import common
from kp_core import ChromaFactStore
from kp_core.facts.client import open_client

__all__ = ["main", "run"]

_AT_ONCE = 5
_GONE = 4

Floats = NDArray[np.float32]

_CHANGE = f"""
import sys
import sklearn.cluster
from benchmarks.kills import Numbered
from kp_core import ChromaFactStore, Fact
store = ChromaFactStore(sys.argv[1], Numbered(), bank_size=10)
store.banks()
print("ready", flush=True)
step = 0
while True:
    step += 1
    store.add([Fact(f"{{sys.argv[2]}}/{{step}}/{{number}}") for number in range({_AT_ONCE})])
    print("+", f"{{sys.argv[2]}}/{{step}}", flush=True)
    if step % 2 == 0:
        gone = [fact for fact, _ in zip(store.facts(), range({_GONE}))]
        store.delete(fact.id for fact in gone)
        print("-", *(fact.text for fact in gone), flush=True)
    if step % 3 == 0:
        old = next(store.facts())
        store.update(Fact(old.text + "'", id=old.id))
        print("*", old.text, flush=True)
    if step % 7 == 0:
        store.rebuild()
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
    """How many changes were acknowledged and lost, how often `verify` found something, and strangers' rows changed."""
    draw, texts = random.Random(seed), set[str]()  # noqa: S311 - moments need not be secret
    acknowledged = lost = unclean = 0
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ChromaFactStore(folder, Numbered()).close()
    foreign = _foreign(folder)
    for number in track(range(rounds), "Kills", transient=True):
        command = [sys.executable, "-c", _CHANGE, str(folder), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: S603
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("the process that is to be killed did not start")
            time.sleep(draw.uniform(0.0, 1.0))
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read().splitlines()
        acknowledged += len(said)
        for line in said:
            kind, *named = line.split(" ")
            if kind == "+":
                texts |= {f"{named[0]}/{part}" for part in range(_AT_ONCE)}
            else:
                texts = (texts - set(named)) | ({f"{named[0]}'"} if kind == "*" else set())
        with ChromaFactStore(folder, Numbered(), bank_size=10) as store:
            held = {fact.text for fact in store.facts()}
            # One change may have been under way when the process died: done, not done, but never half of it.
            gone, more = texts - held, held - texts
            lost += (len(gone), len(more)) not in {(0, 0), (_GONE, 0), (0, _AT_ONCE), (1, 1)}
            unclean += bool(store.verify())
            texts = held
    changed = int(_foreign(folder) != foreign)
    return {"kills": rounds, "acknowledged": acknowledged, "lost": lost, "unclean": unclean, "foreign": changed}


def _foreign(folder: Path) -> tuple[object, ...]:
    """All that somebody else's collection in the same database holds; made when it is not there."""
    with closing(open_client(folder)) as client:
        collection = client.get_or_create_collection("facts", embedding_function=None, metadata={"theirs": True})
        if not collection.count():
            texts = [f"theirs {number}" for number in range(50)]
            collection.add(ids=texts, documents=texts, embeddings=Numbered().embed(texts))
        held = collection.get(include=["documents", "metadatas", "embeddings"])
        about = str(collection.metadata), str(collection.configuration_json)
        return *about, held["ids"], held["documents"], held["metadatas"], held["embeddings"].tolist()


def run(arguments: argparse.Namespace) -> dict[str, int]:
    """The figures, as the JSON file holds them."""
    with tempfile.TemporaryDirectory() as folder:
        return kill(arguments.kills, arguments.seed, Path(folder) / "facts")


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
