"""Documents as packets between trained soft tokens, beside text and the other composers (KV Packet's main figure).

For each number of documents, questions are asked over all of them in one user message: as `text`, as packs by `exact`
composition, by `splice`, and as `packet`s whose KV lies in the store. Everything runs on one engine, with the prefix
tree cleared and the system head warm before each answer.

Domains: `wiki`, passages that the wrapper was not trained on, each question about one of them; `hotpot`, HotpotQA with
its distractors and those of the next question; `needle`, one code among several; `isles`, the world of the demo. The
wrapper saw neither texts nor questions of the last three. `kl` (nats) is the divergence of the first token from exact
composition. `f1` and `em` (the right answer is in what is said) compare with the right answer, and in `wiki`, which has
none, with the answer of exact composition. `computed` are tokens that passed the model before the first token of the
answer. `added` are the FLOPs that a method adds to those of the question, which every method computes, by those of
prefilling the documents: linear maps, attention, keys turned. Numbers of documents that do not fit into the positions
of the model are left out and named.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

from rich.progress import track
from transformers import AutoConfig, PretrainedConfig

from benchmarks import common, plots
from kp_core import Composer, Generation, PackStore, Session
from kp_core.errors import ContextOverflowError
from kp_core.plan.composer import composer_of
from kp_methods import PacketComposer
from kp_methods.packet.composer import SHIPPED
from kp_methods.packet.training import PacketTraining, Samples

__all__ = ["draw", "main", "run"]

_DEMO = Path(__file__).parents[1] / "cookbooks" / "demo"
_TOKENS = 24
_MOST_NEEDLES = 20
DOMAINS = ("wiki", "hotpot", "needle", "isles")
METHODS = ("text", "exact", "splice", "packet")


@dataclass(frozen=True)
class _Question:
    """What is asked over several documents, and the answers that are right; none where exact composition is."""

    documents: tuple[str, ...]
    asked: str
    right: tuple[str, ...] = ()


def _needles(count: int, packs: int) -> list[_Question]:
    """Questions for one code among several; drawn from a fixed seed."""
    draw = random.Random(0)  # noqa: S311
    names = ("Avel", "Brin", "Corl", "Dace", "Elun", "Fenn", "Gorse", "Harl", "Isken", "Jorva")
    if packs > len(names):
        names += ("Kesk", "Lunt", "Mavor", "Nolde", "Orrin", "Pell", "Quarl", "Rusp", "Sevin", "Tholm")
    found = []
    for _ in range(count):
        chosen = draw.sample(names, packs)
        codes = [str(draw.randint(1000, 9999)) for _ in chosen]
        texts = tuple(
            f"The code of the harbour of {name} is {code}. It was given out by the harbour master in spring."
            for name, code in zip(chosen, codes, strict=True)
        )
        at = draw.randrange(packs)
        asked = f"{common.INSTRUCTION}\nQuestion: What is the code of the harbour of {chosen[at]}?"
        found.append(_Question(texts, asked, (codes[at],)))
    return found


def wiki(engine: Session, composer: PacketComposer, arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The passages that the wrapper was not trained on."""
    found = [(passage.title, passage.text) for passage in common.read_passages(arguments.data)]
    settings = composer.training.get("settings")
    return found if settings is None else list(Samples(engine, found, PacketTraining(**settings)).held)


def questions(domain: str, held: Sequence[tuple[str, str]], count: int, limit: int) -> list[_Question]:
    """Questions over `count` documents each, drawn from a fixed seed; fewer where there are too few documents."""
    draw, made = random.Random(count), []  # noqa: S311
    if domain == "wiki":
        for _ in range(limit if len(held) >= count else 0):
            chosen = draw.sample(list(held), count)
            title = draw.choice(chosen)[0]
            made.append(_Question(tuple(f"{a}: {b}" for a, b in chosen), f"What is said about {title}?"))
        return made
    if domain == "needle":
        return _needles(limit, count) if count <= _MOST_NEEDLES else []
    if domain == "hotpot":
        examples = common.read_examples(common.data_folder() / "hotpotqa_distractor.jsonl")
        for example, next_one in islice(pairwise(examples), limit):
            rows = sorted(example.paragraphs, key=lambda each: not each.is_supporting)
            texts = list(dict.fromkeys(map(str, (*rows, *next_one.paragraphs))))[:count]
            asked_of = f"{common.INSTRUCTION}\nQuestion: {example.question}"
            if len(texts) == count:
                made.append(_Question(tuple(draw.sample(texts, count)), asked_of, (example.answer,)))
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
    engine: Session,
    store: PackStore,
    asked: Sequence[_Question],
    methods: dict[str, Composer | None],
    at_once: int,
) -> list[dict[str, Generation]]:
    """What each method answers; packs go to `store`."""
    packs = [list(engine.build_packs(list(each.documents), progress=False)) for each in asked]
    prompts = [
        "\n\n".join((*(str(store.put(pack)) for pack in found), each.asked))
        for each, found in zip(asked, packs, strict=True)
    ]
    said: list[dict[str, Generation]] = [{} for _ in asked]
    for name, composer in methods.items():
        options: dict[str, Any] = {"view": store.view("default")}
        if isinstance(composer, PacketComposer):
            # Wrapped packs are compiled once; what that costs is not part of a use.
            for prompt in prompts:
                engine.prefill(prompt, **options, composer=composer, keep="always")
        if composer is None:
            sent, options = ["\n\n".join((*each.documents, each.asked)) for each in asked], {}
        else:
            # What exact composition computes is not left in the store, or the others would find it.
            keep = "used_twice" if isinstance(composer, PacketComposer) else "never"
            sent, options = prompts, options | {"composer": composer, "keep": keep}
        common.reset(engine)
        with ThreadPoolExecutor(at_once) as pool:
            answers = pool.map(partial(engine.generate, **options, max_tokens=_TOKENS), sent)
            for found, answer in zip(said, answers, strict=True):
                found[name] = answer
    return said


def scores(question: _Question, said: dict[str, Generation], shape: PretrainedConfig) -> dict[str, dict[str, float]]:
    """The figures of each method for one question; `shape` is that of the model."""
    exact = said["exact"].logits.double().log_softmax(-1)
    total = said["exact"].usage.pack_tokens
    # The question alone, behind the documents: all that a method has to compute.
    least = min(answer.usage.computed_tokens for answer in said.values())
    own = _flops(shape, least, sum(_seen(said["exact"])))
    rows = {}
    for name, answer in said.items():
        found = answer.logits.double().log_softmax(-1)
        right, line = question.right or (common.first_line(said["exact"].text),), common.first_line(answer.text)
        used = _flops(shape, answer.usage.computed_tokens, sum(_seen(answer)), answer.usage.approximate_tokens)
        rows[name] = {
            "f1": max(common.f1(line, each) for each in right),
            "em": float(any(common.contains(answer.text, each) for each in right)),
            "kl": float((exact.exp() * (exact - found)).sum()),
            "ttft_s": answer.usage.ttft_s,
            "computed": float(answer.usage.computed_tokens),
            "added": (used - own) / _flops(shape, total, total / 2),
        }
    return rows


def _seen(answer: Generation) -> tuple[int, int]:
    return answer.usage.prompt_tokens, answer.usage.pack_tokens


def _flops(shape: PretrainedConfig, tokens: float, seen: float, moved: int = 0) -> float:
    """Of `tokens` that attend to `seen` others each, and of turning the keys of `moved` ones."""
    width, keys = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    linear = 2 * width * width + 2 * width * keys + 3 * width * shape.intermediate_size
    return shape.num_hidden_layers * (tokens * (2 * linear + 4 * width * seen) + 3 * keys * moved)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    engine = common.load_engine(arguments)
    packet = PacketComposer.load(arguments.wrapper)
    splice = composer_of("splice")
    methods = {"text": None, "exact": composer_of("exact"), "splice": splice, "packet": packet}
    chosen = {name: methods[name] for name in methods if name in ("exact", *arguments.methods)}
    shape = AutoConfig.from_pretrained(common.model_path(arguments))
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    held = wiki(engine, packet, arguments) if "wiki" in arguments.domains else []
    for domain, count in track(list(product(arguments.domains, arguments.documents)), "domains and documents"):
        found: dict[str, list[dict[str, float]]] = {}
        asked = questions(domain, held, count, 20 if arguments.limit is None else arguments.limit)
        with common.scratch(engine) as folder:
            store = PackStore(folder)
            try:
                said = ask(engine, store, asked, chosen, arguments.at_once)
            except ContextOverflowError:
                said = []
        for question, answers in zip(asked, said, strict=False):
            for name, row in scores(question, answers, shape).items():
                found.setdefault(name, []).append(row)
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
            rows.append({"method": name, "documents": count, "domain": domain, "asked": len(each), **figures})
        common.write_json(arguments.json, {"rows": rows})
    wrapper = {"id": packet.id, **packet.training}
    return {"dtype": arguments.dtype, "wrapper": wrapper, "left_out": left_out, "rows": rows}


def draw(figures: dict[str, Any], folder: Path) -> None:
    """The divergence of each method, by domain and number of documents."""
    groups = list(dict.fromkeys(f"{row['domain']}, {row['documents']}" for row in figures["rows"]))
    found = {name: [row["kl"] for row in figures["rows"] if row["method"] == name] for name in METHODS[2:]}
    series = {name: column for name, column in found.items() if column}
    plots.bars(folder, "packets", groups, series, "divergence of the first token, nats")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, show, draw and write."""
    parser = common.argument_parser(__doc__, "wiki_passages.jsonl")
    parser.add_argument(
        "--wrapper", type=Path, metavar="FILE", default=SHIPPED, help="default: that of the bundled model"
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="exact is always there")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="questions; times say nothing above 1")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the divergence into this folder")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    columns = ("domain", "documents", "asked", "f1", "em", "kl", "computed", "added", "ttft_s")
    common.show_table(
        f"Documents composed ({arguments.dtype})",
        ("method", *columns),
        [[row["method"], *(row[column] for column in columns)] for row in figures["rows"]],
        [f"Left out: {each}." for each in figures["left_out"]],
    )
    if arguments.plots:
        draw(figures, arguments.plots)
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
