"""Routing: what a search finds against exact flat search, how much it looks at, and how long it takes.

Knowledge: all paragraphs of `hotpotqa_gold.jsonl` and `hotpotqa_distractor.jsonl` beside `--data`, among the passages
of `--data`; questions: those of the two. And synthetic facts that are easy to tell apart (`benchmarks.synthetic`): how
often the one that is asked for comes first.

Ways:

- one bank: the nearest bank alone, as in the Knowledge Packs paper.
- probed: as many banks as the bank's calibration says, of which sketches choose what is scored.
- all banks: every stored vector scored, which shows what rounding to a byte per dimension costs.
- chroma: Chroma's own HNSW index, with its defaults, on the same vectors.

Recall@k is the share of the k nearest facts of exact search over the embedder's own floats. Latencies are of one query
whose vector is at hand. `scored` is the share of facts whose vectors are read in full, `sketched` the share of which
one bit per dimension is read.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks import common
from benchmarks.synthetic import synthetic
from kp_core import ChromaFactBank, Fact, SentenceTransformerEmbedder, bundled_embedder

__all__ = ["main", "run"]

_KS = (1, 2, 5)
_SYNTHETIC = (100, 1000, 5000)

Floats = NDArray[np.float32]
Search = Callable[[Floats, int], list[str]]


class Remembering:
    """An embedder whose vectors of known texts are at hand."""

    def __init__(self, embedder: SentenceTransformerEmbedder, texts: Sequence[str]) -> None:
        self.name, self.dimensions = embedder.name, embedder.dimensions
        self.vectors = embedder.embed(texts)
        self._rows = {text: row for row, text in enumerate(texts)}
        self.embed_query = embedder.embed_query

    def embed(self, texts: Sequence[str]) -> Floats:
        """The vectors of texts that were given at the start."""
        return self.vectors[[self._rows[text] for text in texts]]


def knowledge(data: Path, limit: int | None) -> tuple[list[str], list[str]]:
    """Texts and questions."""
    texts, questions = dict[str, None](), list[str]()
    for name in ("hotpotqa_gold.jsonl", "hotpotqa_distractor.jsonl"):
        for example in common.read_examples(data.parent / name, limit):
            questions.append(example.question)
            texts.update(dict.fromkeys(map(str, example.paragraphs)))
    texts.update(dict.fromkeys(map(str, common.read_passages(data, limit))))
    return list(texts), questions


def ways(bank: ChromaFactBank) -> dict[str, Search]:
    """The searches that are compared: from a question's vector to texts."""

    def found(probes: int | None) -> Search:
        return lambda query, k: [hit.fact.text for hit in bank.search_vector(query, k, probes=probes)]

    texts = {fact.id: fact.text for fact in bank.facts()}
    collection = _collection(bank.path)

    def chroma(query: Floats, k: int) -> list[str]:
        answer = collection.query(query_embeddings=[query], n_results=k, include=["distances"])
        return [texts[fact_id] for fact_id in answer["ids"][0]]

    return {"one bank": found(1), "probed": found(None), "all banks": found(bank.banks), "chroma": chroma}


def compare(texts: Sequence[str], queries: Floats, vectors: Floats, bank: ChromaFactBank) -> dict[str, Any]:
    """Recall and latency of each way."""
    nearest = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, : max(_KS)]
    rows = {text: row for row, text in enumerate(texts)}
    figures: dict[str, Any] = {}
    for name, search in ways(bank).items():
        search(queries[0], max(_KS))
        recall: dict[int, list[float]] = {k: [] for k in _KS}
        seconds: list[float] = []
        for query, truth in track(list(zip(queries, nearest, strict=True)), name, transient=True):
            began = time.perf_counter()
            found = search(query, max(_KS))
            seconds.append(time.perf_counter() - began)
            for k in _KS:
                recall[k].append(len({rows[text] for text in found[:k]} & set(truth[:k].tolist())) / k)
        figures[name] = {
            **{f"recall@{k}": common.mean(recall[k]) for k in _KS},
            "p50_ms": 1e3 * float(np.quantile(seconds, 0.5)),
            "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        }
    return figures


def route_synthetic(embedder: SentenceTransformerEmbedder, count: int, folder: Path) -> dict[str, float]:
    """The share of questions about synthetic facts whose fact comes first: from one bank, probed, and from all."""
    texts, questions = synthetic(count)
    with ChromaFactBank(folder, embedder, mirror=False) as bank:
        bank.build(map(Fact, texts))
        queries = embedder.embed(questions)
        return {
            name: common.mean(
                bank.search_vector(query, 1, probes=probes)[0].fact.text == text
                for query, text in zip(queries, texts, strict=True)
            )
            for name, probes in (("one bank", 1), ("probed", None), ("all banks", bank.banks))
        }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    embedder = SentenceTransformerEmbedder(arguments.embedder or bundled_embedder())
    texts, questions = knowledge(arguments.data, arguments.limit)
    remembering = Remembering(embedder, texts)
    queries = np.stack([embedder.embed_query(question) for question in track(questions, "Questions", transient=True)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bank"
        began = time.perf_counter()
        with ChromaFactBank(path, remembering) as bank:
            bank.build(map(Fact, texts))
            built = time.perf_counter() - began
            sizes, about, banks = bank.sizes, bank.calibration, bank.banks
        with ChromaFactBank(path, remembering, mirror=False) as bank:
            figures = compare(texts, queries, remembering.vectors, bank)
        rounds = {
            str(count): route_synthetic(embedder, count, Path(folder) / f"synthetic-{count}")
            for count in _SYNTHETIC
            if count <= arguments.synthetic
        }
    if about is None:
        raise RuntimeError("a bank that was built is calibrated")
    return {
        "facts": len(texts),
        "questions": len(questions),
        "banks": banks,
        "probes": about.probes,
        "sketched": about.probes / banks,
        "scored": min(1.0, about.shortlist / len(texts)),
        "calibrated_recall": about.recall,
        "build_s": built,
        "bytes_per_fact": {name: size / len(texts) for name, size in sizes.items()}
        | {"text": sum(len(text.encode()) for text in texts) / len(texts)},
        "ways": figures,
        "synthetic": rounds,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--embedder", metavar="MODEL", help="default: the bundled all-MiniLM-L6-v2")
    parser.add_argument(
        "--synthetic", type=int, default=max(_SYNTHETIC), metavar="N", help="up to so many synthetic facts"
    )
    figures = run(parser.parse_args(argv))
    parts = ", ".join(f"{name} {size:.0f}" for name, size in figures["bytes_per_fact"].items())
    common.show_table(
        f"Routing: {figures['questions']} questions, {figures['facts']} facts in {figures['banks']} banks",
        ("way", *(f"recall@{k}" for k in _KS), "p50 ms", "p99 ms"),
        [(name, *each.values()) for name, each in figures["ways"].items()],
        (
            (
                f"Probed: {figures['probes']} banks, {figures['sketched']:.1%} of the facts sketched, "
                f"at most {figures['scored']:.1%} scored."
            ),
            f"Bytes per fact: {parts}.",
            f"Built in {figures['build_s']:.1f} s from vectors that were at hand, Chroma included.",
            *(
                f"Synthetic, {count} facts, found first: "
                + ", ".join(f"{name} {each:.1%}" for name, each in got.items())
                for count, got in figures["synthetic"].items()
            ),
        ),
    )
    common.write_json(parser.parse_args(argv).json, figures)
    return figures


def _collection(path: Path) -> Any:  # noqa: ANN401 - the library's own types are unions of unions
    import chromadb
    from chromadb.config import Settings

    [folder] = path.glob("chroma-*")
    client = chromadb.PersistentClient(str(folder), settings=Settings(anonymized_telemetry=False))
    return client.get_collection("facts", embedding_function=None)


if __name__ == "__main__":
    main()
