"""Routing: what a search finds against exact flat search, and how long it takes beside Chroma asked directly.

Knowledge: all paragraphs of `hotpotqa_gold.jsonl` and `hotpotqa_distractor.jsonl` beside `--data`, among the passages
of `--data`; questions: those of the two. And synthetic facts that are easy to tell apart (`benchmarks.synthetic`): how
often the one that is asked for comes first.

Ways:

- one bank: the nearest bank alone, as in the Knowledge Packs paper; four banks: the four nearest.
- flat: the search of the store as it is by default.
- chroma: the same collection asked directly, for the same texts and metadata, in turns with flat.

Recall@k is the share of the k nearest facts of exact search over the embedder's own floats; gold@k how many of the
paragraphs that the answer needs are among the first k, of as many as there can be. Latencies are of one query whose
vector is at hand.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks import common
from benchmarks.synthetic import synthetic
from kp_core import ChromaFactStore, Fact, SentenceTransformerEmbedder, bundled_embedder
from kp_core.banks.chroma import open_client

__all__ = ["main", "run"]

_KS = (1, 2, 5)
_MOST = max(_KS)
_WAYS = ("one bank", "four banks", "flat", "chroma")
_SYNTHETIC = (100, 1000, 5000)

Floats = NDArray[np.float32]
Search = Callable[[str, Floats], list[str]]


class Remembering:
    """An embedder whose vectors of known texts are at hand."""

    def __init__(self, embedder: SentenceTransformerEmbedder, texts: Sequence[str]) -> None:
        self.name = embedder.name
        self.vectors = embedder.embed(texts)
        self._rows = {text: row for row, text in enumerate(texts)}
        self.questions: dict[str, Floats] = {}

    def embed(self, texts: Sequence[str]) -> Floats:
        """The vectors of texts that were given at the start."""
        return self.vectors[[self._rows[text] for text in texts]]

    def embed_query(self, text: str) -> Floats:
        """The vector of a question that was put into `questions`."""
        return self.questions[text]


def knowledge(data: Path, limit: int | None) -> tuple[list[str], list[str], list[set[str]]]:
    """Texts, questions, and the texts that each question needs."""
    texts, questions, gold = dict[str, None](), list[str](), list[set[str]]()
    for name in ("hotpotqa_gold.jsonl", "hotpotqa_distractor.jsonl"):
        for example in common.read_examples(data.parent / name, limit):
            questions.append(example.question)
            texts.update(dict.fromkeys(map(str, example.paragraphs)))
            gold.append({str(paragraph) for paragraph in example.paragraphs if paragraph.is_supporting})
    texts.update(dict.fromkeys(map(str, common.read_passages(data, limit))))
    return list(texts), questions, gold


def ways(store: ChromaFactStore, client: Any) -> dict[str, Search]:  # noqa: ANN401 - the library's own type
    """The searches that are compared: from a question and its vector to texts."""

    def found(probes: int | None) -> Search:
        def search(question: str, _: Floats) -> list[str]:
            return [hit.fact.text for hit in store.search(question, _MOST, probes=probes)]

        return search

    collection = client.get_collection("kp-default-facts", embedding_function=None)

    def chroma(_: str, query: Floats) -> list[str]:
        answer = collection.query(query_embeddings=[query], n_results=_MOST)
        return list(answer["documents"][0])

    return dict(zip(_WAYS, (found(1), found(4), found(None), chroma), strict=True))


def compare(
    questions: Sequence[str],
    queries: Floats,
    gold: Sequence[set[str]],
    nearest: Sequence[list[str]],
    searches: dict[str, Search],
) -> dict[str, Any]:
    """Recall, gold and latency of each way, taking turns; `nearest` are the texts that exact search finds."""
    shares: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in searches}
    seconds: dict[str, list[float]] = {name: [] for name in searches}
    for search in searches.values():
        search(questions[0], queries[0])
    asked = list(zip(questions, queries, gold, nearest, strict=True))
    for question, query, needed, truth in track(asked, "Searches", transient=True):
        for name, search in searches.items():
            began = time.perf_counter()
            found = search(question, query)
            seconds[name].append(time.perf_counter() - began)
            for k in _KS:
                shares[name][f"recall@{k}"].append(len(set(found[:k]) & set(truth[:k])) / k)
                shares[name][f"gold@{k}"].append(len(set(found[:k]) & needed) / min(k, len(needed)))
    return {
        name: {part: common.mean(values) for part, values in shares[name].items()}
        | {"p50_ms": 1e3 * float(np.quantile(taken, 0.5)), "p99_ms": 1e3 * float(np.quantile(taken, 0.99))}
        for name, taken in seconds.items()
    }


def route_synthetic(embedder: SentenceTransformerEmbedder, counts: Sequence[int], folder: Path) -> dict[str, Any]:
    """The share of questions about synthetic facts whose fact comes first: from one bank, from four, and from all."""
    texts, questions = synthetic(max(counts, default=0))
    if not texts:
        return {}
    remembering, queries = Remembering(embedder, texts), embedder.embed(questions)
    remembering.questions = dict(zip(questions, queries, strict=True))
    figures = {}
    for count in counts:
        with ChromaFactStore(folder / f"synthetic-{count}", remembering) as store:
            store.add(map(Fact, texts[:count]))
            store.rebuild()
            figures[str(count)] = {
                name: common.mean(
                    store.search(question, 1, probes=probes)[0].fact.text == text
                    for question, text in zip(questions[:count], texts[:count], strict=True)
                )
                for name, probes in (("one bank", 1), ("four banks", 4), ("flat", None))
            }
    return figures


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    embedder = SentenceTransformerEmbedder(arguments.embedder or bundled_embedder())
    texts, questions, gold = knowledge(arguments.data, arguments.limit)
    remembering = Remembering(embedder, texts)
    queries = np.stack([embedder.embed_query(question) for question in track(questions, "Questions", transient=True)])
    remembering.questions = dict(zip(questions, queries, strict=True))
    order = np.argsort(-(queries @ remembering.vectors.T), axis=1, kind="stable")[:, :_MOST]
    nearest = [[texts[row] for row in rows] for rows in order.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder) / "facts", time.perf_counter()
        with ChromaFactStore(path, remembering) as store:
            store.add(map(Fact, texts))
            added = time.perf_counter() - began
            banks = len(store.banks())
            built = time.perf_counter() - began - added
            size = store.nbytes
            with closing(open_client(path)) as client:
                figures = compare(questions, queries, gold, nearest, ways(store, client))
        counts = [count for count in _SYNTHETIC if count <= arguments.synthetic]
        rounds = route_synthetic(embedder, counts, Path(folder))
    return {
        "facts": len(texts),
        "questions": len(questions),
        "banks": banks,
        "add_s": added,
        "banks_s": built,
        "bytes_per_fact": {
            "on disk": size / len(texts),
            "text": sum(len(text.encode()) for text in texts) / len(texts),
        },
        "ways": figures,
        "flat_to_chroma": figures["flat"]["p50_ms"] / figures["chroma"]["p50_ms"],
        "synthetic": rounds,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--embedder", metavar="MODEL", help="default: the bundled all-MiniLM-L6-v2")
    parser.add_argument(
        "--synthetic", type=int, default=max(_SYNTHETIC), metavar="N", help="up to so many synthetic facts; 0 for none"
    )
    figures = run(parser.parse_args(argv))
    parts = ", ".join(f"{name} {size:.0f}" for name, size in figures["bytes_per_fact"].items())
    columns = list(figures["ways"]["flat"])
    common.show_table(
        f"Routing: {figures['questions']} questions, {figures['facts']} facts in {figures['banks']} banks",
        ("way", *(column.replace("_", " ") for column in columns)),
        [(name, *(each.get(column, "-") for column in columns)) for name, each in figures["ways"].items()],
        (
            f"p50 of flat over that of Chroma asked directly: {figures['flat_to_chroma']:.2f}.",
            f"Bytes per fact: {parts}.",
            f"From vectors that were at hand: added in {figures['add_s']:.1f} s, banks in {figures['banks_s']:.1f} s.",
            *(
                f"Synthetic, {count} facts, found first: "
                + ", ".join(f"{name} {each:.1%}" for name, each in got.items())
                for count, got in figures["synthetic"].items()
            ),
        ),
    )
    common.write_json(parser.parse_args(argv).json, figures)
    return figures


if __name__ == "__main__":
    main()
