"""Several packs in one prompt: text, exact composition (order given and free) and the approximate composers.

Speed, on passages cut to one size: text against `exact`, packs in the order given; `free`, in an order of the engine's
choice, with nothing in memory, with two of them seen together (`free, 2 seen`), and with all (`free, all seen`); then
each approximate composer, with the packs in the store and nothing in memory, and splice where these packs were spliced
before (`splice, all seen`). All run on one engine, one after the other for each question, with the prefix tree cleared
and the system head warm before each; times are medians over `--pairs` questions, and `ratio` is the median of text over
packs, question by question, with its 95 % interval, `low` to `high`. `computed` are the tokens that passed all layers;
`kl` (nats) and `agree` compare the first token with that of exact composition. Combinations above 7,500 tokens are left
out and named. Whether the answers are right is measured by `benchmarks.answers`.

`--orders N`: N questions of `--data` in the order given and in the free one, exact both times, each with the packs of
all earlier questions in memory. `em` contains the answer, `f1` is that of the first line; `lower` is the lower 95 %
bound (one-sided) of the mean paired difference, free less given, in points.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import common
from benchmarks.questions import Question
from kp_core import Generation, PackStore, Session
from kp_core.compose import Composer, ExactComposer, NaiveComposer, SpliceComposer

__all__ = ["COLUMNS", "main", "run"]

_MOST_TOKENS = 7500
_ANSWER = 24
"""Tokens of an answer, at most."""
_ONE_SIDED = 1.645
"""Standard errors below the mean that leave 5 % of a normal distribution."""
_EXACT = ExactComposer()
_ASKED = "What is the first passage about?"
COLUMNS = ("composer", "packs", "tokens", "order", "ttft_s", "text_s", "computed", "kl", "agree")
"""Of every row; `None` where it was not measured."""


def divergence(exact: Generation, found: Generation) -> tuple[float, bool]:
    """KL of the first token from exact composition, in nats, and whether it is the same token."""
    if exact.logits is None or found.logits is None:
        raise AssertionError("an answer has first logits")
    mine, theirs = exact.logits.double(), found.logits.double()
    kl = float(mine.softmax(-1) @ (mine.log_softmax(-1) - theirs.log_softmax(-1)))
    return kl, bool(mine.argmax() == theirs.argmax())


@dataclass(frozen=True)
class _Variant:
    """One way to send the same passages; `seen` packs were sent together before, with another question."""

    name: str
    composer: Composer = _EXACT
    order: str = "given"
    seen: int = 0


_VARIANTS = (
    _Variant("exact"),
    _Variant("free", order="free"),
    _Variant("free, 2 seen", order="free", seen=2),
    _Variant("free, all seen", order="free", seen=-1),
    _Variant("naive", NaiveComposer()),
    _Variant("splice", SpliceComposer()),
    _Variant("splice, all seen", SpliceComposer(), seen=-1),
)
"""All ways to send packs."""


def passages(engine: Session, texts: Iterator[str], size: int, count: int) -> list[str]:
    """`count` passages of about `size` tokens, each cut out of the next texts."""
    found = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < size:
            ids += engine.tokenizer.encode(next(texts) + " ", add_special_tokens=False)
        found.append(engine.tokenizer.decode(ids[:size]).strip())
    return found


def speed(engine: Session, texts: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of packs, size and variant."""
    rows = []
    for size in arguments.sizes:
        for count in arguments.packs:
            if size * count > _MOST_TOKENS:
                rows.append({"composer": "left out", "packs": count, "tokens": size, "order": "given"})
                continue
            rows += _speed_of(engine, texts, size, count, arguments)
    return rows


def _speed_of(
    engine: Session, texts: list[str], size: int, count: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    every = [each for each in _VARIANTS if each.name in (arguments.variants or [each.name])]
    times: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in every}
    about: dict[str, list[tuple[int, float, bool]]] = {variant.name: [] for variant in every}
    pool = iter(random.Random(size * count).sample(texts, len(texts)))  # noqa: S311
    with common.scratch(engine) as folder:
        store = PackStore(folder)
        for number in track(range(arguments.pairs), f"{count} packs of {size} tokens"):
            found = passages(engine, pool, size, count)
            handles = [str(store.put(pack)) for pack in engine.build_packs(found, progress=False)]
            asked = f"\n\n{_ASKED} ({number})"
            common.reset(engine)
            text = engine.generate("\n\n".join(found) + asked, max_tokens=1)
            # Each in its turn goes first, so that no variant gains by its place.
            for variant in every[number % len(every) :] + every[: number % len(every)]:
                common.reset(engine)
                # What the store kept of a prompt would make the next variant's a second use.
                first: dict[str, Any] = {"view": store.view("default"), "keep": "never"}
                options = first | {"composer": variant.composer}
                if variant.seen:
                    backwards = variant.seen < 0 and variant.order == "free"
                    seen = handles[::-1] if backwards else handles[-variant.seen :] if variant.seen > 0 else handles
                    engine.prefill("\n\n".join(seen) + "\n\nWhy?", **options)
                packs = engine.generate("\n\n".join(handles) + asked, max_tokens=1, order=variant.order, **options)
                times[variant.name].append((text.usage.ttft_s, packs.usage.ttft_s))
                kl, same = 0.0, True
                if not variant.composer.exact:
                    oracle = engine.generate("\n\n".join(packs.packs) + asked, max_tokens=1, **first)
                    kl, same = divergence(oracle, packs)
                about[variant.name].append((packs.usage.computed_tokens, kl, same))
    return [
        {
            "composer": variant.composer.key,
            "variant": variant.name,
            "packs": count,
            "tokens": size,
            "order": variant.order,
            "ttft_s": statistics.median(mine for _, mine in times[variant.name]),
            "text_s": statistics.median(text for text, _ in times[variant.name]),
            **common.median_ratio(*zip(*times[variant.name], strict=True)),
            "computed": statistics.median(computed for computed, _, _ in about[variant.name]),
            "kl": common.mean(kl for _, kl, _ in about[variant.name]),
            "agree": common.mean(same for *_, same in about[variant.name]),
        }
        for variant in every
    ]


def hotpot(path: Path, limit: int | None) -> list[Question]:
    """HotpotQA questions, each paragraph a text of its own."""
    return [
        Question(example.question, example.answer, tuple(map(str, example.paragraphs)))
        for example in common.read_examples(path, limit)
    ]


def orders(engine: Session, store: PackStore, questions: Sequence[Question]) -> dict[str, Any]:
    """Answers in the order given and in the free one, question by question."""
    scores: Mapping[str, Callable[[str, str], float]] = {
        "em": common.contains,
        "f1": lambda said, answer: common.f1(common.first_line(said), answer),
    }
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in scores}
    moved = 0
    for question in track(questions, "given and free"):
        packs = engine.build_packs(list(question.documents), progress=False)
        prompt = common.prompt([store.put(pack) for pack in packs], question.asked)
        options: dict[str, Any] = {"view": store.view("default"), "max_tokens": _ANSWER}
        free = engine.generate(prompt, order="free", **options)
        # One prompt has one answer.
        given = engine.generate(prompt, **options) if free.usage.reordered_packs else free
        moved += given is not free
        for name, score in scores.items():
            pairs[name].append((score(given.text, question.answer), score(free.text, question.answer)))
    return {"n": len(questions), "moved": moved, **{name: paired(found) for name, found in pairs.items()}}


def paired(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Means in points, and the lower bound of the difference."""
    apart = [100 * (free - given) for given, free in found]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    given, free = (100 * common.mean(pair[at] for pair in found) for at in (0, 1))
    return {"given": given, "free": free, "difference": free - given, "lower": free - given - _ONE_SIDED * error}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    engine = common.load_engine(arguments)
    figures: dict[str, Any] = {"dtype": arguments.dtype, "rows": []}
    if arguments.pairs:
        texts = [passage.text for passage in common.read_passages(arguments.passages)]
        figures["rows"] = [dict.fromkeys(COLUMNS) | row for row in speed(engine, texts, arguments)]
    if arguments.orders:
        with common.scratch(engine) as folder:
            figures["orders"] = orders(engine, PackStore(folder), hotpot(arguments.data, arguments.orders))
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--passages", type=Path, default=common.data_folder() / "wiki_passages.jsonl")
    parser.add_argument("--packs", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 140, 500])
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="of those above, for speed; default: all")
    parser.add_argument("--pairs", type=int, default=20, help="questions for speed; 0: none; default: %(default)s")
    parser.add_argument(
        "--orders", type=int, default=0, metavar="N", help="compare given and free order on N questions"
    )
    arguments = parser.parse_args(argv)
    known = [each.name for each in _VARIANTS]
    if unknown := set(arguments.variants or ()).difference(known):
        parser.error(f"got the variants {sorted(unknown)}; expected some of {known}")
    figures = run(arguments)
    timed = [row for row in figures["rows"] if row["ttft_s"] is not None]
    columns = ("packs", "tokens", "ttft_s", "text_s", "ratio", "low", "high", "computed", "kl", "agree")
    if timed:
        common.show_table(
            f"Time to first token, seconds ({arguments.dtype})",
            ("variant", *columns),
            [[row["variant"], *(row[column] for column in columns)] for row in timed],
            [
                f"Left out: {row['packs']} of {row['tokens']}."
                for row in figures["rows"]
                if row["composer"] == "left out"
            ],
        )
    if "orders" in figures:
        found = figures["orders"]
        columns = ("given", "free", "difference", "lower")
        common.show_table(
            f"Given and free order, {found['n']} questions, {found['moved']} reordered ({arguments.dtype})",
            ("score", *columns),
            [[name, *(found[name][column] for column in columns)] for name in ("em", "f1")],
        )
    common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
