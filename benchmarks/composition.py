"""Several packs in one prompt: text, exact composition (order given and free) and the approximate composers.

Speed, on passages cut to one size: text against `exact`, packs in the order given; `free`, in an order of the engine's
choice, with nothing in memory, with two of them seen together (`free, 2 seen`), and with all (`free, all seen`); then
each approximate composer. All run on one engine, one after the other for each question, with the prefix tree cleared
and the system head warm before each; times are medians over `--pairs` questions, and `ratio` is the median of text over
packs, question by question. `computed` are the tokens that passed all layers; `kl` (nats) and `agree` compare the first
token with that of exact composition. Combinations above 7,500 tokens are left out and named.

Quality (`--limit` questions): HotpotQA questions, each paragraph a pack, and a needle test of this file: one code among
several. `em` is the share of answers that contain the right one, `em_exact` that of exact composition; `flips` counts,
among the questions that exact answers and no knowledge does not (`counted`), those that the composer gets wrong. In
order `shuffled` the packs of each question are shuffled.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import common
from kp_core import PackStore, Session
from kp_core.compose import Composer, ExactComposer, NaiveComposer, SpliceComposer, composer_of

__all__ = ["main", "run"]

_MOST_TOKENS = 7500
_SHARES = (0.05, 0.15, 0.5)
_RULES = ("first", "deviation", "attention")
_EXACT = ExactComposer()
_ASKED = "What is the first passage about?"


@dataclass(frozen=True)
class _Variant:
    """One way to send the same passages; `seen` packs were sent together before, with another question."""

    name: str
    composer: Composer = _EXACT
    order: str = "given"
    seen: int = 0


def variants(shares: Sequence[float]) -> list[_Variant]:
    """All ways to send packs."""
    blends = [composer_of(f"blend:r={share},rule={rule}") for rule in _RULES for share in shares]
    return [
        _Variant("exact"),
        _Variant("free", order="free"),
        _Variant("free, 2 seen", order="free", seen=2),
        _Variant("free, all seen", order="free", seen=-1),
        *(_Variant(made.key, made) for made in (NaiveComposer(), SpliceComposer(), *blends)),
    ]


def passages(engine: Session, texts: Iterator[str], size: int, count: int) -> list[str]:
    """`count` passages of about `size` tokens, each cut out of the next texts."""
    found = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < size:
            ids += engine.tokenizer.encode(next(texts) + " ", add_special_tokens=False)
        found.append(engine.tokenizer.decode(ids[:size]).strip())
    return found


def _reset(engine: Session) -> None:
    engine.clear_cache()
    engine.prefill("Hello.")


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
    every = variants(arguments.shares)
    times: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in every}
    about: dict[str, list[tuple[int, float, bool]]] = {variant.name: [] for variant in every}
    pool = iter(random.Random(size * count).sample(texts, len(texts)))  # noqa: S311
    with tempfile.TemporaryDirectory() as folder:
        store = PackStore(folder)
        for number in track(range(arguments.pairs), f"{count} packs of {size} tokens"):
            found = passages(engine, pool, size, count)
            handles = [str(store.put(pack)) for pack in engine.build_packs(found, progress=False)]
            asked = f"\n\n{_ASKED} ({number})"
            _reset(engine)
            text = engine.generate("\n\n".join(found) + asked, max_tokens=1)
            # Each in its turn goes first, so that no variant gains by its place.
            for variant in every[number % len(every) :] + every[: number % len(every)]:
                _reset(engine)
                options: dict[str, Any] = {"view": store.view("default"), "composer": variant.composer}
                if variant.seen:
                    seen = handles[-variant.seen :] if variant.seen > 0 else handles[::-1]
                    engine.prefill("\n\n".join(seen) + "\n\nWhy?", **options)
                packs = engine.generate("\n\n".join(handles) + asked, max_tokens=1, order=variant.order, **options)
                times[variant.name].append((text.usage.ttft_s, packs.usage.ttft_s))
                kl, same = 0.0, True
                if not variant.composer.exact:
                    oracle = engine.prefill("\n\n".join(packs.packs) + asked, view=options["view"]).logits.double()
                    logits = packs.first_logits.double()  # type: ignore[union-attr]
                    kl = float(oracle.softmax(-1) @ (oracle.log_softmax(-1) - logits.log_softmax(-1)))
                    same = bool(oracle.argmax() == logits.argmax())
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
            "ratio": statistics.median(text / mine for text, mine in times[variant.name]),
            "computed": statistics.median(computed for computed, _, _ in about[variant.name]),
            "kl": common.mean(kl for _, kl, _ in about[variant.name]),
            "agree": common.mean(same for *_, same in about[variant.name]),
        }
        for variant in every
    ]


@dataclass(frozen=True)
class _Question:
    """What is asked of several packs, and the answer."""

    texts: tuple[str, ...]
    asked: str
    answer: str


def needles(count: int, packs: int = 5) -> list[_Question]:
    """Questions for one code among several; drawn from a fixed seed."""
    draw = random.Random(0)  # noqa: S311
    names = ("Avel", "Brin", "Corl", "Dace", "Elun", "Fenn", "Gorse", "Harl", "Isken", "Jorva")
    found = []
    for _ in range(count):
        chosen = draw.sample(names, packs)
        codes = [str(draw.randint(1000, 9999)) for _ in chosen]
        texts = tuple(
            f"The code of the harbour of {name} is {code}. It was given out by the harbour master in spring."
            for name, code in zip(chosen, codes, strict=True)
        )
        at = draw.randrange(packs)
        found.append(_Question(texts, f"What is the code of the harbour of {chosen[at]}?", codes[at]))
    return found


def hotpot(arguments: argparse.Namespace) -> list[_Question]:
    """HotpotQA questions, each paragraph a text of its own."""
    return [
        _Question(tuple(map(str, example.paragraphs)), example.question, example.answer)
        for example in common.read_examples(arguments.data, arguments.limit)
    ]


def quality(  # noqa: PLR0913
    engine: Session, store: PackStore, kind: str, questions: Sequence[_Question], order: str, shares: Sequence[float]
) -> list[dict[str, Any]]:
    """One row for each composer; packs are kept in `store`."""
    composers = [variant.composer for variant in variants(shares) if not variant.seen and variant.order == "given"]
    right: dict[str, list[bool]] = {composer.key: [] for composer in composers}
    unknown = []
    draw = random.Random(1)  # noqa: S311
    for question in track(questions, f"{kind}, {order}"):
        asked = f"{common.INSTRUCTION}\nQuestion: {question.asked}"
        said = engine.generate(asked, max_tokens=24).text
        unknown.append(not common.contains(said, question.answer))
        texts = draw.sample(question.texts, len(question.texts)) if order == "shuffled" else question.texts
        packs = engine.build_packs(list(texts), progress=False)
        prompt = "\n\n".join((*(str(store.put(pack)) for pack in packs), asked))
        for composer in composers:
            answer = engine.generate(prompt, view=store.view("default"), composer=composer, max_tokens=24).text
            right[composer.key].append(common.contains(answer, question.answer))
    counted = [is_right and is_new for is_right, is_new in zip(right["exact"], unknown, strict=True)]
    return [
        {
            "composer": composer.key,
            "variant": composer.key,
            "set": kind,
            "order": order,
            "packs": round(common.mean(len(question.texts) for question in questions)),
            "em": common.mean(right[composer.key]),
            "em_exact": common.mean(right["exact"]),
            "counted": sum(counted),
            "flips": sum(
                is_counted and not mine for is_counted, mine in zip(counted, right[composer.key], strict=True)
            ),
        }
        for composer in composers
    ]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    engine = common.load_engine(arguments)
    rows: list[dict[str, Any]] = []
    if arguments.pairs:
        texts = [passage.text for passage in common.read_passages(arguments.passages)]
        rows += speed(engine, texts, arguments)
    if arguments.limit != 0:
        with tempfile.TemporaryDirectory() as folder:
            store = PackStore(folder)
            for order in ("given", "shuffled"):
                for kind, questions in (("hotpotqa", hotpot(arguments)), ("needle", needles(arguments.limit or 100))):
                    rows += quality(engine, store, kind, questions, order, arguments.shares)
    return {"dtype": arguments.dtype, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--passages", type=Path, default=common.data_folder() / "wiki_passages.jsonl")
    parser.add_argument("--packs", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 140, 500])
    parser.add_argument("--shares", type=float, nargs="*", default=_SHARES, help="of blend; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=20, help="questions for speed; 0: none; default: %(default)s")
    arguments = parser.parse_args(argv)
    figures = run(arguments)
    timed = [row for row in figures["rows"] if "ttft_s" in row]
    columns = ("packs", "tokens", "ttft_s", "text_s", "ratio", "computed", "kl", "agree")
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
    scored = [row for row in figures["rows"] if "em" in row]
    columns = ("set", "order", "packs", "em", "em_exact", "flips", "counted")
    if scored:
        common.show_table(
            f"Answers ({arguments.dtype})",
            ("composer", *columns),
            [[row["composer"], *(row[column] for column in columns)] for row in scored],
        )
    common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
