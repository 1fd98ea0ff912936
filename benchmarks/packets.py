"""Documents as packets between trained soft tokens, beside text and the other composers (KV Packet's main figure).

For each number of documents, questions are asked over all of them in one user message: as `text`, as packs by `exact`
composition, by `splice`, by `blend` with 15 %, and as `packet`s whose KV lies in the store. Everything runs on one
engine, with the prefix tree cleared and the system head warm before each answer.

Domains: `wiki`, passages that the wrapper was not trained on, each question about one of them; `isles`, the world of
the demo, whose short facts are foreign to it. `kl` (nats) is the divergence of the first token from exact composition.
`f1` and `em` compare the answer with the right one in `isles`, and in `wiki`, which has none, with that of exact
composition. `computed` are tokens that passed the model before the first token of the answer, `added` the share of the
documents' tokens that a method computes beyond the first document and the question. Numbers of documents that do not
fit into the positions of the model are left out and named.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import common, plots
from kp_core import PacketComposer, PackStore, Session
from kp_core.compose import Composer, composer_of
from kp_core.engines.hf.samples import PacketTraining, Samples
from kp_core.errors import ContextOverflowError

__all__ = ["main", "run"]

_DEMO = Path(__file__).parents[1] / "cookbooks" / "demo"
_TOKENS = 24


@dataclass(frozen=True)
class _Question:
    """What is asked over several documents, and the answers that are right; none where exact composition is."""

    documents: tuple[str, ...]
    asked: str
    right: tuple[str, ...] = ()


def wiki(engine: Session, composer: PacketComposer, arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The passages that the wrapper was not trained on."""
    found = [(passage.title, passage.text) for passage in common.read_passages(arguments.data)]
    settings = composer.wrapper.training.get("settings")
    return found if settings is None else list(Samples(engine, found, PacketTraining.from_dict(settings)).held)


def questions(domain: str, held: Sequence[tuple[str, str]], count: int, limit: int) -> list[_Question]:
    """Questions over `count` documents each, drawn from a fixed seed; fewer where there are too few documents."""
    draw, made = random.Random(count), []  # noqa: S311
    if domain == "wiki":
        for _ in range(limit if len(held) >= count else 0):
            chosen = draw.sample(list(held), count)
            title = draw.choice(chosen)[0]
            made.append(_Question(tuple(f"{a}: {b}" for a, b in chosen), f"What is said about {title}?"))
        return made
    facts, asked = (
        [json.loads(line) for line in (_DEMO / name).read_text(encoding="utf-8").splitlines()]
        for name in ("facts.jsonl", "questions.jsonl")
    )
    for row in asked[: limit if len(facts) >= count else 0]:
        needed = [fact for fact in facts if fact["id"] in row["facts"]]
        others = draw.sample([fact for fact in facts if fact not in needed], max(count - len(needed), 0))
        chosen = draw.sample([*needed, *others], len(needed) + len(others))
        texts = tuple(f"{fact['title']}: {fact['text']}" for fact in chosen)
        right = (row["answer"], *row.get("aliases", ()))
        made.append(_Question(texts, f"{common.INSTRUCTION}\nQuestion: {row['question']}", right))
    return made


def ask(
    engine: Session, store: PackStore, question: _Question, methods: dict[str, Composer]
) -> dict[str, dict[str, float]]:
    """What each method makes of one question."""
    packs = list(engine.build_packs(list(question.documents), progress=False))
    prompt = "\n\n".join((*(str(store.put(pack)) for pack in packs), question.asked))
    options: dict[str, Any] = {"view": store.view("default"), "max_tokens": _TOKENS}
    # Wrapped packs are compiled once; what that costs is not part of a use.
    engine.prefill(prompt, view=options["view"], composer=methods["packet"], keep="always")
    said = {}
    for name in ("text", *methods):
        engine.clear_cache()
        engine.prefill("Hello.")
        if name == "text":
            said[name] = engine.generate("\n\n".join((*question.documents, question.asked)), max_tokens=_TOKENS)
        else:
            # What exact composition computes is not left in the store, or the others would find it.
            keep = "used_twice" if name == "packet" else "never"
            said[name] = engine.generate(prompt, **options, composer=methods[name], keep=keep)
    exact = said["exact"].first_logits.double().log_softmax(-1)
    total = sum(len(pack.token_ids) for pack in packs)
    needed = said["splice"].usage.computed_tokens
    rows = {}
    for name, answer in said.items():
        found = answer.first_logits.double().log_softmax(-1)
        right, line = question.right or (said["exact"].text,), common.first_line(answer.text)
        first = right if question.right else (common.first_line(right[0]),)
        rows[name] = {
            "f1": max(common.f1(line, each) for each in first),
            "em": float(any(common.exact_match(line, each) for each in first)),
            "kl": float((exact.exp() * (exact - found)).sum()),
            "ttft_s": answer.usage.ttft_s,
            "computed": float(answer.usage.computed_tokens),
            "added": max(answer.usage.computed_tokens - needed, 0) / total,
        }
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    engine = common.load_engine(arguments)
    packet = PacketComposer.load(arguments.wrapper)
    methods: dict[str, Composer] = {name: composer_of(name) for name in ("exact", "splice", "blend")}
    methods["packet"] = packet
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    held = wiki(engine, packet, arguments) if "wiki" in arguments.domains else []
    for domain in arguments.domains:
        for count in arguments.documents:
            found: dict[str, list[dict[str, float]]] = {}
            asked = questions(domain, held, count, 20 if arguments.limit is None else arguments.limit)
            with tempfile.TemporaryDirectory() as folder:
                store = PackStore(folder)
                for question in track(asked, f"{domain}, {count} documents"):
                    try:
                        for name, row in ask(engine, store, question, methods).items():
                            found.setdefault(name, []).append(row)
                    except ContextOverflowError:
                        found = {}
                        break
            if not found:
                left_out.append(f"{domain}, {count} documents")
            for name, each in found.items():
                middle = {"ttft_s", "computed"}
                figures = {
                    key: statistics.median(row[key] for row in each)
                    if key in middle
                    else common.mean(row[key] for row in each)
                    for key in each[0]
                }
                rows.append({"method": name, "documents": count, "domain": domain, **figures})
    wrapper = {"id": packet.wrapper.id, **packet.wrapper.training}
    return {"dtype": arguments.dtype, "wrapper": wrapper, "left_out": left_out, "rows": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, show, draw and write."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument("--wrapper", type=Path, metavar="FILE", help="default: that of the bundled model")
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--domains", nargs="+", default=["wiki", "isles"], choices=["wiki", "isles"])
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the divergence into this folder")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    columns = ("domain", "documents", "f1", "em", "kl", "computed", "added", "ttft_s")
    common.show_table(
        f"Documents composed ({arguments.dtype})",
        ("method", *columns),
        [[row["method"], *(row[column] for column in columns)] for row in figures["rows"]],
        [f"Left out: {each}." for each in figures["left_out"]],
    )
    if arguments.plots:
        for domain in arguments.domains:
            mine = [row for row in figures["rows"] if row["domain"] == domain]
            counts = sorted({row["documents"] for row in mine})
            lines = {
                name: [row["kl"] for row in mine if row["method"] == name] for name in ("splice", "blend", "packet")
            }
            labels = ("documents", "divergence of the first token, nats", "")
            plots.lines(arguments.plots, f"packets-{domain}", counts, lines, {}, labels)
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
