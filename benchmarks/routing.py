"""Routing: what a search finds against exact flat search, how much it looks at, and how long it takes.

Knowledge: all paragraphs of `hotpotqa_gold.jsonl` and `hotpotqa_distractor.jsonl` beside `--data`, among the passages
of `--data`; questions: those of the two. And synthetic facts that are easy to tell apart (`benchmarks.synthetic`): how
often the one that is asked for comes first.

Ways:

- one bank: the nearest bank alone, as in the Knowledge Packs paper.
- probed: as many banks as the bank's calibration says, of which sketches choose what is scored.
- all banks: every stored vector scored, which shows what rounding to a byte per dimension costs.
- chroma: Chroma's own HNSW index, with its defaults, on the same vectors.
- with BM25: the first 50 of probed, put into another order by `LexicalReranker`.

Recall@k is the share of the k nearest facts of exact search over the embedder's own floats; gold@k how many of the
paragraphs that the answer needs are among the first k, of as many as there can be. Latencies are of one query whose
vector is at hand. `scored` is the share of facts whose vectors are read in full, `sketched` the share of which one bit
per dimension is read.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks import common
from benchmarks.synthetic import synthetic
from kp_core import ChromaFactBank, Fact, SentenceTransformerEmbedder, bundled_embedder
from kp_core.facts import LexicalReranker

__all__ = ["main", "run"]

_KS = (1, 2, 5)
_MOST = max(_KS)
_MEANING = ("one bank", "probed", "all banks", "chroma")
_SYNTHETIC = (100, 1000, 5000)

Floats = NDArray[np.float32]
Search = Callable[[str, Floats], list[str]]


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


def ways(bank: ChromaFactBank) -> dict[str, Search]:
    """The searches that are compared: from a question and its vector to texts."""

    def found(probes: int | None) -> Search:
        return lambda _, query: [hit.fact.text for hit in bank.search_vector(query, _MOST, probes=probes)]

    texts = {fact.id: fact.text for fact in bank.facts()}
    collection, lexical = _collection(bank.path), LexicalReranker()

    def chroma(_: str, query: Floats) -> list[str]:
        answer = collection.query(query_embeddings=[query], n_results=_MOST, include=["distances"])
        return [texts[fact_id] for fact_id in answer["ids"][0]]

    def with_words(question: str, query: Floats) -> list[str]:
        hits = lexical(question, bank.search_vector(query, lexical.depth))
        return [hit.fact.text for hit in hits[:_MOST]]

    each = (found(1), found(None), found(bank.banks), chroma)
    return {**dict(zip(_MEANING, each, strict=True)), "with BM25": with_words}


def compare(
    questions: Sequence[str],
    queries: Floats,
    gold: Sequence[set[str]],
    nearest: Sequence[list[str]],
    bank: ChromaFactBank,
) -> dict[str, Any]:
    """Recall, gold and latency of each way; `nearest` are the texts that exact search finds."""
    figures: dict[str, Any] = {}
    for name, search in ways(bank).items():
        search(questions[0], queries[0])
        shares: dict[str, list[float]] = defaultdict(list)
        seconds: list[float] = []
        asked = list(zip(questions, queries, gold, nearest, strict=True))
        for question, query, needed, truth in track(asked, name, transient=True):
            began = time.perf_counter()
            found = search(question, query)
            seconds.append(time.perf_counter() - began)
            for k in _KS:
                if name in _MEANING:
                    shares[f"recall@{k}"].append(len(set(found[:k]) & set(truth[:k])) / k)
                shares[f"gold@{k}"].append(len(set(found[:k]) & needed) / min(k, len(needed)))
        figures[name] = {part: common.mean(values) for part, values in shares.items()} | {
            "p50_ms": 1e3 * float(np.quantile(seconds, 0.5)),
            "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        }
    return figures


def route_synthetic(embedder: SentenceTransformerEmbedder, counts: Sequence[int], folder: Path) -> dict[str, Any]:
    """The share of questions about synthetic facts whose fact comes first: from one bank, probed, and from all."""
    texts, questions = synthetic(max(counts, default=0))
    if not texts:
        return {}
    remembering, queries = Remembering(embedder, texts), embedder.embed(questions)
    figures = {}
    for count in counts:
        with ChromaFactBank(folder / f"synthetic-{count}", remembering, mirror=False) as bank:
            bank.build(map(Fact, texts[:count]))
            figures[str(count)] = {
                name: common.mean(
                    bank.search_vector(query, 1, probes=probes)[0].fact.text == text
                    for query, text in zip(queries[:count], texts[:count], strict=True)
                )
                for name, probes in (("one bank", 1), ("probed", None), ("all banks", bank.banks))
            }
    return figures


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, as the JSON file holds them."""
    embedder = SentenceTransformerEmbedder(arguments.embedder or bundled_embedder())
    texts, questions, gold = knowledge(arguments.data, arguments.limit)
    remembering = Remembering(embedder, texts)
    queries = np.stack([embedder.embed_query(question) for question in track(questions, "Questions", transient=True)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bank"
        began = time.perf_counter()
        with ChromaFactBank(path, remembering) as bank:
            bank.build(map(Fact, texts))
            built = time.perf_counter() - began
            sizes, about, banks = bank.sizes, bank.calibration, bank.banks
        order = np.argsort(-(queries @ remembering.vectors.T), axis=1, kind="stable")[:, :_MOST]
        nearest = [[texts[row] for row in rows] for rows in order.tolist()]
        with ChromaFactBank(path, remembering, mirror=False) as bank:
            figures = compare(questions, queries, gold, nearest, bank)
        counts = [count for count in _SYNTHETIC if count <= arguments.synthetic]
        rounds = route_synthetic(embedder, counts, Path(folder))
    if about is None:
        raise RuntimeError("a bank that was built is calibrated")
    return {
        "facts": len(texts),
        "questions": len(questions),
        "banks": banks,
        "probes": about.probes_of(banks),
        "sketched": about.probes_of(banks) / banks,
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
        "--synthetic", type=int, default=max(_SYNTHETIC), metavar="N", help="up to so many synthetic facts; 0 for none"
    )
    figures = run(parser.parse_args(argv))
    parts = ", ".join(f"{name} {size:.0f}" for name, size in figures["bytes_per_fact"].items())
    columns = list(figures["ways"]["probed"])
    common.show_table(
        f"Routing: {figures['questions']} questions, {figures['facts']} facts in {figures['banks']} banks",
        ("way", *(column.replace("_", " ") for column in columns)),
        [(name, *(each.get(column, "-") for column in columns)) for name, each in figures["ways"].items()],
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
