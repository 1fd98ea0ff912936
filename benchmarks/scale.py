"""Scale: what 5,000 and 50,000 facts cost to keep, open, extend and search in Chroma, beside Chroma used directly.

Knowledge: the paragraphs that `benchmarks.routing` uses; beyond them, copies: each a paragraph whose vector is moved by
`_BLUR` times the direction between two others and made of length 1 again, so that a copy's nearest neighbour is about
as near (a cosine of 0.7) as a paragraph's is. Their texts are those of the paragraphs, numbered. Questions: those of
HotpotQA, real ones at every size. Nothing here waits for an embedder: all vectors are at hand.

- add, banks, add 1,000 more: seconds; `again` is adding the same facts once more, of which none is new.
- open: seconds until a fresh process has opened the folder and answered once; memory (Linux): what that took, beside
  what a process takes that does the same with Chroma alone.
- recall@k: against exact search over the embedder's own floats.
- p50, p99: milliseconds of one query, ours and Chroma's own taking turns, both giving texts and metadata.
- bytes per fact on disk beyond its text.
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
from kp_core import ChromaFactStore, Fact, Hit, SentenceTransformerEmbedder, bundled_embedder
from kp_core.banks.chroma import open_client

__all__ = ["main", "run"]

_SIZES = (5_000, 50_000)
_ADDED = 1_000
_KS = (1, 2, 5)
_BLUR = 1.0
_BLOCK = 8192
_OPENINGS = 3

Floats = NDArray[np.float32]
Search = Callable[[Floats], list[int]]

_OPEN = """
import json, os, sys, time
from pathlib import Path
import chromadb, numpy as np
from benchmarks.scale import AtHand
from kp_core import ChromaFactStore
from kp_core.banks.chroma import open_client

def resident():
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if pages.exists() else 0.0

vector = np.eye(1, int(sys.argv[2]), dtype=np.float32)
before, began = resident(), time.perf_counter()
if sys.argv[3] == "ours":
    found = ChromaFactStore(sys.argv[1], AtHand(["a"], vector)).search("#0", 2)
else:
    client = open_client(sys.argv[1])
    collection = client.get_collection("kp-default-facts", embedding_function=None)
    found = collection.query(query_embeddings=vector, n_results=2)
print(json.dumps({"open_s": time.perf_counter() - began, "memory_mb": resident() - before}))
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


def measure(embedder: AtHand, queries: Floats, count: int, folder: Path) -> Iterator[dict[str, float]]:
    """One size: its figures, as they come."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    def facts(start: int, stop: int) -> Iterator[Fact]:
        return (Fact(embedder.text(row)) for row in range(start, stop))

    text = sum(len(embedder.text(row).encode()) for row in range(count))
    truth = nearest(embedder.vectors[:count], queries, max(_KS))
    with ChromaFactStore(folder / "facts", embedder) as store:
        with timed("add_s"):
            store.add(facts(0, count))
        with timed("again_s"):
            store.add(facts(0, count))
        with timed("banks_s"):
            banks = len(store.banks())
        yield seconds | {"banks": banks, "bytes_per_fact_beyond": (store.nbytes - text) / count}
    with closing(open_client(folder / "facts")) as client:
        collection = client.get_collection("kp-default-facts", embedding_function=None)

        def directly(query: Floats) -> list[int]:
            found = collection.query(query_embeddings=[query], n_results=max(_KS))
            return [int(text.rpartition("#")[2]) for text in found["documents"][0]]

        with ChromaFactStore(folder / "facts", embedder) as store:
            at_hand = Asked(embedder)
            store.embedder = at_hand

            def ours(query: Floats) -> list[int]:
                return [_row(hit.fact) for hit in at_hand.search(store, query, max(_KS))]

            yield _compared({"ours": ours, "Chroma": directly}, queries, truth)
    for name in ("ours", "Chroma"):
        figures = [_opened(folder / "facts", embedder.dimensions, name) for _ in range(_OPENINGS)]
        yield {f"{name}: {part}": min(each[part] for each in figures) for part in figures[0]}
    with ChromaFactStore(folder / "facts", embedder) as store:
        with timed("add_1000_s"):
            store.add(facts(count, count + _ADDED))
        with timed("rebuild_s"):
            store.rebuild()
        yield seconds


class Asked:
    """The embedder, with the vector of the question at hand."""

    def __init__(self, embedder: AtHand) -> None:
        self.name, self.embed = embedder.name, embedder.embed
        self._query: Floats = np.zeros(0, np.float32)

    def search(self, store: ChromaFactStore, query: Floats, k: int) -> list[Hit]:
        """What the store finds for a question with this vector."""
        self._query = query
        return store.search("?", k)

    def embed_query(self, _text: str) -> Floats:
        """See `kp_core.Embedder`."""
        return self._query


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
            for figures in measure(embedder, queries, count, Path(folder)):
                found[-1] |= figures
                common.write_json(arguments.json, {"scale": found})
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--facts", type=int, nargs="+", default=list(_SIZES), metavar="N", help="default: %(default)s")
    found = run(parser.parse_args(argv))
    common.show_table(
        "Facts by size",
        ("", *(f"{figures['facts']:,}" for figures in found)),
        [
            (name.replace("_", " "), *(figures[name] for figures in found))
            for name in dict.fromkeys(name for figures in found for name in figures)
            if name != "facts"
        ],
    )
    return {"scale": found}


def _row(fact: Fact) -> int:
    return int(fact.text.rpartition("#")[2])


def _opened(folder: Path, dimensions: int, way: str) -> dict[str, float]:
    """Seconds and megabytes that opening takes in a process of its own, until one question is answered."""
    command = [sys.executable, "-c", _OPEN, str(folder), str(dimensions), way]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


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
