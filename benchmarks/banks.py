"""Living banks: what adding costs beside a rebuild, how fast large banks answer, and what survives being killed.

- scale: banks of `--facts` facts (vectors of real passages, then perturbed copies of them): time to build, to add
  1,000 facts, to open again; latency of one query whose vector is at hand, probed and flat; recall@2 of probed against
  flat search over the same vectors; bytes per fact. Chroma is left out, as it takes minutes for each of these.
- kills: a process adds, deletes and rebuilds until it is killed (`SIGKILL`) at a random moment, `--kills` times, always
  on the same bank. Afterwards every change it acknowledged must be there, and the bank must pass `verify`.
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
from kp_core import ChromaFactBank, Fact, SentenceTransformerEmbedder, bundled_embedder

__all__ = ["main", "run"]

_QUERIES, _ADDED, _PASSAGES, _K = 200, 1000, 2000, 2
_BLUR = 0.6  # Length of the noise beside a vector of length 1: such copies are about 0.86 from their original.

Floats = NDArray[np.float32]

_CHANGE = """
import sys
import sklearn.cluster
from benchmarks.banks import Numbered
from kp_core import ChromaFactBank, Fact
bank = ChromaFactBank(sys.argv[1], Numbered(), mirror=False)
print("ready", flush=True)
step = 0
while True:
    step += 1
    bank.add([Fact(f"{sys.argv[2]}/{step}/{number}") for number in range(5)])
    print("+", f"{sys.argv[2]}/{step}", flush=True)
    if step % 2 == 0:
        gone = [fact.id for fact, _ in zip(bank.facts(), range(4))]
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


class AtHand:
    """An embedder of the texts `0`, `1`, ...: the rows of a matrix."""

    name = "at-hand"

    def __init__(self, vectors: Floats) -> None:
        self.vectors, self.dimensions = vectors, vectors.shape[1]

    def embed(self, texts: Sequence[str]) -> Floats:
        """See `kp_core.Embedder`."""
        return self.vectors[[int(text) for text in texts]]

    def embed_query(self, text: str) -> Floats:
        """See `kp_core.Embedder`."""
        vector: Floats = self.vectors[int(text)]
        return vector


def scale(passages: Floats, count: int, folder: Path) -> dict[str, float]:
    """One size of bank."""
    draw = np.random.default_rng(0)
    total = count + _ADDED + _QUERIES
    vectors = np.concatenate([passages] * -(-total // len(passages)))[:total]
    for at in range(len(passages), total, 8192):
        block = vectors[at : at + 8192]
        noise = draw.standard_normal(block.shape, np.float32)
        block += _BLUR * noise / np.linalg.norm(noise, axis=1, keepdims=True)
        block /= np.linalg.norm(block, axis=1, keepdims=True)
    # Shuffled, so that what is added and asked is like what is held.
    embedder = AtHand(vectors[draw.permutation(total)])
    figures: dict[str, float] = {"facts": count}

    def timed(name: str, began: float) -> None:
        figures[name] = time.perf_counter() - began

    with ChromaFactBank(folder, embedder, mirror=False) as bank:
        began = time.perf_counter()
        bank.build(Fact(str(row)) for row in range(count))
        timed("build_s", began)
        began = time.perf_counter()
        bank.add(Fact(str(row)) for row in range(count, count + _ADDED))
        timed("add_1000_s", began)
        began = time.perf_counter()
        bank.rebuild()
        timed("rebuild_s", began)
    began = time.perf_counter()
    with ChromaFactBank(folder, embedder, mirror=False) as bank:
        timed("open_s", began)
        about, seconds, shares = bank.calibration, list[float](), list[float]()
        flat_seconds = list[float]()
        for query in embedder.vectors[count + _ADDED :]:
            began = time.perf_counter()
            probed = bank.search_vector(query, _K)
            middle = time.perf_counter()
            flat = bank.search_vector(query, _K, probes=bank.banks)
            seconds.append(middle - began)
            flat_seconds.append(time.perf_counter() - middle)
            shares.append(len({hit.fact.id for hit in flat} & {hit.fact.id for hit in probed}) / _K)
        figures |= {
            "recall@2": common.mean(shares),
            "p50_ms": 1e3 * float(np.quantile(seconds, 0.5)),
            "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
            "flat_p50_ms": 1e3 * float(np.quantile(flat_seconds, 0.5)),
            "bytes_per_fact": sum(bank.sizes.values()) / len(bank),
        }
        if about:
            figures |= {"sketched": about.probes / about.banks, "scored": about.shortlist / about.facts}
    return figures


def kill(rounds: int, folder: Path) -> dict[str, int]:
    """How many changes were acknowledged, lost, and how often `verify` found something."""
    draw, texts = random.Random(0), set[str]()  # noqa: S311 - moments need not be secret
    acknowledged = lost = unclean = 0
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for number in track(range(rounds), "Kills", transient=True):
        command = [sys.executable, "-c", _CHANGE, str(folder), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: S603
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("the process that is to be killed did not start")
            time.sleep(draw.uniform(0.0, 0.4))
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read().splitlines()
        acknowledged += len(said)
        for line in said:
            kind, *named = line.split(" ")
            texts = texts - set(named) if kind == "-" else texts | {f"{named[0]}/{part}" for part in range(5)}
        with ChromaFactBank(folder, Numbered(), mirror=False) as bank:
            held = {fact.text for fact in bank.facts()}
            # One change may have been under way when the process died: done, not done, but never half of a deletion.
            gone, more = texts - held, held - texts
            lost += len(gone) not in {0, 4} or bool(gone and more)
            unclean += bool(bank.verify())
            texts = held
    return {"kills": rounds, "acknowledged": acknowledged, "lost": lost, "unclean": unclean}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    figures: dict[str, Any] = {"scale": [], "kills": None}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.facts:
            rows = common.read_passages(arguments.data, arguments.limit or _PASSAGES)
            passages = SentenceTransformerEmbedder(bundled_embedder()).embed([str(row) for row in rows])
            figures["scale"] = [scale(passages, count, Path(folder) / str(count)) for count in arguments.facts]
        if arguments.kills:
            figures["kills"] = kill(arguments.kills, Path(folder) / "killed")
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the tables, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--facts", type=int, nargs="*", default=[5000, 50_000], metavar="N", help="sizes of banks")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="how often to kill; 0 leaves it out")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    if figures["scale"]:
        names = [name for name in figures["scale"][0] if name != "facts"]
        common.show_table(
            "Living banks: seconds, milliseconds, shares of the facts",
            ("", *(f"{each['facts']:,} facts" for each in figures["scale"])),
            [(name.replace("_", " "), *(each[name] for each in figures["scale"])) for name in names],
        )
    if figures["kills"]:
        common.show_table("Killed", ("", "count"), [(name, str(count)) for name, count in figures["kills"].items()])
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
