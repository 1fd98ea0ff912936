"""Scale: what banks of 5,000 to 500,000 facts cost to build, keep, open, extend and search, beside Chroma.

Knowledge: the paragraphs that `benchmarks.routing` uses; beyond them, copies: each a paragraph whose vector is moved by
`_BLUR` times the direction between two others and made of length 1 again, so that a copy's nearest neighbour is about
as near (a cosine of 0.7) as a paragraph's is. Their texts are those of the paragraphs, numbered. Questions: those of
HotpotQA, real ones at every size. Nothing here waits for an embedder: all vectors are at hand.

- build, rebuild, add: seconds; `add / rebuild` is what 1,000 facts more cost beside clustering everything anew.
- open, memory (Linux): of a fresh process that replays the journal of the bank and answers once.
- recall@k: against exact search over the embedder's own floats; probed as calibrated, with all banks scored (what one
  byte per dimension costs), and from one flat collection of Chroma: HNSW with its defaults, and with the least
  `ef_search` (in hundreds) that finds the share of the two nearest which banks are calibrated for.
- p50, p99: milliseconds of one query, the ways taking turns.
- bytes per fact beyond text and one byte per dimension; Chroma's come on top of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks import common, routing
from kp_core import ChromaFactBank, Fact, SentenceTransformerEmbedder, bundled_embedder

__all__ = ["main", "run"]

_SIZES = (5_000, 50_000, 500_000)
_ADDED = 1_000
_KS = (1, 2, 5)
_BLUR = 1.0
_BLOCK = 8192
# Chroma's default.
_EF_SEARCH, _EF_MOST = 100, 2000

Floats = NDArray[np.float32]
Search = Callable[[Floats], list[int]]

_OPEN = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from benchmarks.scale import AtHand
from kp_core import ChromaFactBank

def resident():
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if pages.exists() else 0.0

before, began = resident(), time.perf_counter()
with ChromaFactBank(sys.argv[1], AtHand([], np.eye(2, int(sys.argv[2]), dtype=np.float32)), read_only=True) as bank:
    seconds = time.perf_counter() - began
    bank.search_vector(bank.centroids[0], 2)
    print(json.dumps({"open_s": seconds, "memory_mb": resident() - before}))
"""


class AtHand:
    """An embedder of numbered texts: `text(row)` has the vector in that row."""

    name = "at-hand"

    def __init__(self, paragraphs: Sequence[str], vectors: Floats) -> None:
        self.paragraphs, self.vectors, self.dimensions = paragraphs, vectors, vectors.shape[1]

    def text(self, row: int) -> str:
        """The text of a row: a paragraph, numbered where it is a copy."""
        copy, paragraph = divmod(row, len(self.paragraphs))
        return f"{self.paragraphs[paragraph]} ({copy}) #{row}"

    def embed(self, texts: Sequence[str]) -> Floats:
        """See `kp_core.Embedder`."""
        return self.vectors[[int(text.rpartition("#")[2]) for text in texts]]

    def embed_query(self, text: str) -> Floats:
        """See `kp_core.Embedder`."""
        vector: Floats = self.embed([text])[0]
        return vector


def blurred(real: Floats, count: int) -> Floats:
    """`real`, and as many copies as it takes to have `count` vectors."""
    draw = np.random.default_rng(0)
    vectors = np.empty((count, real.shape[1]), np.float32)
    vectors[: len(real)] = real[:count]
    for at in range(len(real), count, _BLOCK):
        rows = np.arange(at, min(at + _BLOCK, count))
        moved = real[draw.integers(len(real), size=len(rows))] - real[draw.integers(len(real), size=len(rows))]
        # Of the few pairs that are a paragraph and itself, nothing moves.
        moved *= _BLUR / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), np.finfo(np.float32).eps)
        copies = real[rows % len(real)] + moved
        vectors[rows] = copies / np.linalg.norm(copies, axis=1, keepdims=True)
    return vectors


def nearest(vectors: Floats, queries: Floats, k: int) -> list[list[int]]:
    """The `k` nearest rows to each query, best first, from all products of floats."""
    scores, rows = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.intp)
    for at in range(0, len(vectors), _BLOCK):
        products = queries @ vectors[at : at + _BLOCK].T
        scores = np.concatenate([scores, products], axis=1)
        rows = np.concatenate([rows, np.broadcast_to(np.arange(at, at + products.shape[1]), products.shape)], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
    found: list[list[int]] = rows.tolist()
    return found


def measure(
    embedder: AtHand, queries: Floats, count: int, without: Sequence[str], folder: Path
) -> Iterator[dict[str, float]]:
    """One size of bank: its figures, as they come."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    def facts(start: int, stop: int) -> Iterator[Fact]:
        return (Fact(embedder.text(row)) for row in range(start, stop))

    texts = sum(len(embedder.text(row).encode()) for row in range(count))
    truth = nearest(embedder.vectors[:count], queries, max(_KS))
    with ChromaFactBank(folder / "bank", embedder, mirror=False) as bank:
        with timed("build_s"):
            bank.build(facts(0, count))
        about = bank.calibration
        if about is None:
            raise RuntimeError("a bank that was built is calibrated")
        yield seconds | {
            "banks": bank.banks,
            "sketched": about.probes_of(bank.banks) / bank.banks,
            "scored": min(1.0, about.shortlist / count),
            "bytes_per_fact_beyond": (sum(bank.sizes.values()) - texts) / count - embedder.dimensions,
        }
        yield _opened(bank.path, embedder.dimensions)
        ways: dict[str, Search] = {
            "probed": lambda query: [_row(hit.fact) for hit in bank.search_vector(query, max(_KS))],
            "all banks": lambda query: [
                _row(hit.fact) for hit in bank.search_vector(query, max(_KS), probes=bank.banks)
            ],
        }
        yield _compared(ways, queries, truth)
        if "chroma" not in without:
            with timed("chroma_build_s"):
                _build_chroma(folder / "chroma", embedder.vectors[:count])
            files = (path for path in (folder / "chroma").rglob("*") if path.is_file())
            size = sum(path.stat().st_size for path in files) / count
            yield seconds | {"chroma_bytes_per_fact": size}
            with _chroma(folder / "chroma", _EF_SEARCH) as search:
                yield _compared(ways | {"Chroma": search}, queries, truth)
            for ef_search in range(_EF_SEARCH, _EF_MOST, _EF_SEARCH):
                with _chroma(folder / "chroma", ef_search) as search:
                    figures = _compared({"probed beside": ways["probed"], "Chroma as good": search}, queries, truth)
                if figures["Chroma as good: recall@2"] >= about.target:
                    yield {"Chroma as good: ef_search": ef_search} | figures
                    break
        if "add" not in without:
            with timed("add_1000_s"):
                bank.add(facts(count, count + _ADDED))
            with timed("rebuild_s"):
                bank.rebuild()
            yield seconds | {"add / rebuild": seconds["add_1000_s"] / seconds["rebuild_s"]}


def run(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """The figures, as the JSON file holds them; it is written again whenever there are more."""
    import sklearn.cluster  # noqa: F401 - seconds that are no part of the first build

    model = SentenceTransformerEmbedder(bundled_embedder())
    texts, questions, _ = routing.knowledge(arguments.data, arguments.limit)
    real = model.embed(texts)
    queries = np.stack([model.embed_query(question) for question in questions])
    embedder = AtHand(texts, blurred(real, max(arguments.facts) + _ADDED))
    found: list[dict[str, float]] = []
    for count in arguments.facts:
        found.append({"facts": count})
        with tempfile.TemporaryDirectory() as folder:
            for figures in measure(embedder, queries, count, arguments.without, Path(folder)):
                found[-1] |= figures
                common.write_json(arguments.json, {"scale": found})
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--facts", type=int, nargs="+", default=list(_SIZES), metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--without", nargs="+", default=[], choices=("chroma", "add"), help="leave out Chroma, or adding and rebuilding"
    )
    found = run(parser.parse_args(argv))
    common.show_table(
        "Banks by size",
        ("", *(f"{figures['facts']:,}" for figures in found)),
        [
            # Not every size has every figure: no `ef_search` may be enough.
            (name.replace("_", " "), *(figures.get(name, "-") for figures in found))
            for name in dict.fromkeys(name for figures in found for name in figures)
            if name != "facts"
        ],
    )
    return {"scale": found}


def _row(fact: Fact) -> int:
    return int(fact.text.rpartition("#")[2])


def _opened(folder: Path, dimensions: int) -> dict[str, float]:
    """Seconds and megabytes that opening a bank takes in a process of its own."""
    command = [sys.executable, "-c", _OPEN, str(folder), str(dimensions)]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _client(folder: Path) -> Any:  # noqa: ANN401 - untyped there
    import chromadb
    from chromadb.config import Settings

    return closing(chromadb.PersistentClient(str(folder), settings=Settings(anonymized_telemetry=False)))


def _build_chroma(folder: Path, vectors: Floats) -> None:
    with _client(folder) as client:
        collection = client.create_collection(
            "facts", configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
        )
        step = min(2048, client.get_max_batch_size())
        for at in track(range(0, len(vectors), step), "Chroma", transient=True):
            page = vectors[at : at + step]
            collection.add(ids=[str(row) for row in range(at, at + len(page))], embeddings=page)


@contextmanager
def _chroma(folder: Path, ef_search: int) -> Iterator[Search]:
    with _client(folder) as client:
        found = client.get_collection("facts", embedding_function=None)
        found.modify(configuration={"hnsw": {"ef_search": ef_search}})
    # A collection that was searched goes on as it was: only one that is opened anew does as it is told.
    with _client(folder) as client:
        collection = client.get_collection("facts", embedding_function=None)

        def search(query: Floats) -> list[int]:
            answer = collection.query(query_embeddings=[query], n_results=max(_KS), include=["distances"])
            return [int(found) for found in answer["ids"][0]]

        yield search


def _compared(ways: dict[str, Search], queries: Floats, truth: list[list[int]]) -> dict[str, float]:
    """Recall and latency of each way."""
    seconds, recall = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for search in ways.values():
        search(queries[0])
    for query, expected in track(list(zip(queries, truth, strict=True)), "Questions", transient=True):
        for name, search in ways.items():
            began = time.perf_counter()
            found = search(query)
            seconds[name].append(time.perf_counter() - began)
            for k in _KS:
                recall[f"{name}: recall@{k}"].append(len(set(found[:k]) & set(expected[:k])) / k)
    figures = {name: common.mean(shares) for name, shares in recall.items()}
    for name, taken in seconds.items():
        figures[f"{name}: p50 ms"] = 1e3 * float(np.quantile(taken, 0.5))
        figures[f"{name}: p99 ms"] = 1e3 * float(np.quantile(taken, 0.99))
    return figures


if __name__ == "__main__":
    main()
