"""Several packs in one prompt: text, exact composition and the approximate composers.

Speed, on passages cut to one size: text against `exact`; then each approximate composer, with the packs in the store
and nothing in memory, and splice where these packs were spliced before (`splice, all seen`). All run on one engine, one
after the other for each question, with the prefix tree cleared and the system head warm before each; times are medians
over `--pairs` questions, and `ratio` is the median of text over packs, question by question, with its 95 % interval,
`low` to `high`. `computed` are the tokens that passed all layers; `kl` (nats) and `agree` compare the first token with
that of exact composition. Combinations above 7,500 tokens are left out and named. Whether the answers are right is
measured by `benchmarks.answers`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import common
from kp_core import Composer, ExactComposer, Generation, PackStore, Session
from kp_methods import SpliceComposer
from tests.kits import NaiveComposer

__all__ = ["COLUMNS", "main", "run"]

_MOST_TOKENS = 7500
_EXACT = ExactComposer()
_ASKED = "What is the first passage about?"
COLUMNS = ("composer", "packs", "tokens", "ttft_s", "text_s", "computed", "kl", "agree")
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
    seen: int = 0


_VARIANTS = (
    _Variant("exact"),
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
                rows.append({"composer": "left out", "packs": count, "tokens": size})
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
                    seen = handles[-variant.seen :] if variant.seen > 0 else handles
                    engine.prefill("\n\n".join(seen) + "\n\nWhy?", **options)
                packs = engine.generate("\n\n".join(handles) + asked, max_tokens=1, **options)
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
            "ttft_s": statistics.median(mine for _, mine in times[variant.name]),
            "text_s": statistics.median(text for text, _ in times[variant.name]),
            **common.median_ratio(*zip(*times[variant.name], strict=True)),
            "computed": statistics.median(computed for computed, _, _ in about[variant.name]),
            "kl": common.mean(kl for _, kl, _ in about[variant.name]),
            "agree": common.mean(same for *_, same in about[variant.name]),
        }
        for variant in every
    ]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    engine = common.load_engine(arguments)
    figures: dict[str, Any] = {"dtype": arguments.dtype, "rows": []}
    texts = [passage.text for passage in common.read_passages(arguments.passages)]
    figures["rows"] = [dict.fromkeys(COLUMNS) | row for row in speed(engine, texts, arguments)]
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--passages", type=Path, default=common.data_folder() / "wiki_passages.jsonl")
    parser.add_argument("--packs", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 140, 500])
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="of those above, for speed; default: all")
    parser.add_argument("--pairs", type=int, default=20, help="questions for each; default: %(default)s")
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
    common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
