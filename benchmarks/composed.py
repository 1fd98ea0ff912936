"""Whether prompts of several packs are answered as well as their text: the quality half of `benchmarks.composition`."""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import common, plots
from kp_core import BlendComposer, Generation, PackStore, Session
from kp_core.compose import Composer, ExactComposer, NaiveComposer, SpliceComposer, composer_of

__all__ = ["SETS", "composers", "divergence", "draw_plots", "hotpot", "needles", "orders", "paired", "quality"]

SETS = ("gold", "distractor", "needle")
"""Of questions: HotpotQA with its gold facts, the same with distractors, and one code among several."""
_RULES = ("first", "deviation", "attention")
_ANSWER = 24
"""Tokens of an answer, at most."""
_ONE_SIDED = 1.645
"""Standard errors below the mean that leave 5 % of a normal distribution."""


def composers(shares: Sequence[float]) -> list[Composer]:
    """All there are, the exact one first; `shares` are those of blend."""
    blends = [composer_of(f"blend:r={share},rule={rule}") for rule in _RULES for share in shares]
    return [ExactComposer(), NaiveComposer(), SpliceComposer(), *blends]


def divergence(exact: Generation, found: Generation) -> tuple[float, bool]:
    """KL of the first token from exact composition, in nats, and whether it is the same token."""
    if exact.first_logits is None or found.first_logits is None:
        raise AssertionError("an answer has first logits")
    mine, theirs = exact.first_logits.double(), found.first_logits.double()
    kl = float(mine.softmax(-1) @ (mine.log_softmax(-1) - theirs.log_softmax(-1)))
    return kl, bool(mine.argmax() == theirs.argmax())


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
        found.append(_Question(texts, f"What is the code of the harbour of {chosen[at]}?", codes[at]))
    return found


def hotpot(path: Path, limit: int | None) -> list[_Question]:
    """HotpotQA questions, each paragraph a text of its own."""
    return [
        _Question(tuple(map(str, example.paragraphs)), example.question, example.answer)
        for example in common.read_examples(path, limit)
    ]


def questions_of(kind: str, arguments: argparse.Namespace) -> list[_Question]:
    """The questions of one of `--sets`."""
    if kind == "needle":
        return needles(arguments.limit or 100)
    return hotpot(arguments.data if kind == "gold" else arguments.distractor, arguments.limit)


def _asked(question: _Question) -> str:
    return f"{common.INSTRUCTION}\nQuestion: {question.asked}"


def quality(engine: Session, store: PackStore, kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each composer and order; packs are kept in `store`."""
    answers: dict[tuple[str, str], list[tuple[bool, bool, float, bool]]] = {}
    sizes: list[int] = []
    counts: list[int] = []
    chance = random.Random(1)  # noqa: S311
    questions = questions_of(kind, arguments)
    for question in track(questions, kind):
        asked, shuffled = _asked(question), chance.sample(question.texts, len(question.texts))
        text = "\n\n".join((*question.texts, asked))
        known, read = (engine.generate(each, max_tokens=_ANSWER).text for each in (asked, text))
        if common.contains(known, question.answer) or not common.contains(read, question.answer):
            continue
        for order, texts in (("given", question.texts), ("shuffled", shuffled)):
            packs = list(engine.build_packs(list(texts), progress=False))
            prompt = "\n\n".join((*(str(store.put(pack)) for pack in packs), asked))
            exact: tuple[Generation, bool] | None = None
            for composer in composers(arguments.shares):
                found = engine.generate(prompt, view=store.view("default"), composer=composer, max_tokens=_ANSWER)
                right = common.contains(found.text, question.answer)
                exact = exact or (found, right)  # It is the first.
                about = (right, exact[1], *divergence(exact[0], found))
                answers.setdefault((composer.key, order), []).append(about)
        counts.append(len(packs))
        sizes += [len(pack.token_ids) for pack in packs]
    return [
        {
            "composer": composer,
            "variant": composer,
            "set": kind,
            "order": order,
            "packs": round(common.mean(counts)),
            "tokens": round(common.mean(sizes)),
            "kl": common.mean(kl for *_, kl, _ in found),
            "agree": common.mean(same for *_, same in found),
            "em": common.mean(right for right, *_ in found),
            "em_exact": common.mean(exact for _, exact, *_ in found),
            "flips": sum(exact and not right for right, exact, *_ in found),
            "counted": len(found),
            "asked": len(questions),
        }
        for (composer, order), found in answers.items()
    ]


def orders(engine: Session, store: PackStore, questions: Sequence[_Question]) -> dict[str, Any]:
    """Answers in the order given and in the free one, question by question."""
    scores: Mapping[str, Callable[[str, str], float]] = {
        "em": common.contains,
        "f1": lambda said, answer: common.f1(common.first_line(said), answer),
    }
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in scores}
    moved = 0
    for question in track(questions, "given and free"):
        packs = engine.build_packs(list(question.texts), progress=False)
        prompt = "\n\n".join((*(str(store.put(pack)) for pack in packs), _asked(question)))
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


def draw_plots(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Two pictures for each set of questions: divergence, and answers kept, over the share computed anew."""
    for kind in dict.fromkeys(row["set"] for row in rows if row["order"] == "given" and row["em"] is not None):
        found = {row["composer"]: row for row in rows if row.get("set") == kind and row["order"] == "given"}
        made = {key: composer for key in found if isinstance(composer := composer_of(key), BlendComposer)}
        shares = sorted({composer.r for composer in made.values()})
        right = found["exact"]["em"] * found["exact"]["counted"]
        apart, kept = {}, {}
        for rule in _RULES if shares else ():
            keys = ["splice", *(BlendComposer(r, rule).key for r in shares), "exact"]
            apart[rule] = [found[key]["kl"] for key in keys]
            kept[rule] = [1 - found[key]["flips"] / max(right, 1) for key in keys]
        share, x = "share of each pack computed anew (0: splice, 1: exact)", [0, *shares, 1]
        label = "KL of the first token, nats"
        plots.lines(
            folder, f"several-packs-{kind}-kl", x, apart, {}, (share, label, ""), {"naive": found["naive"]["kl"]}
        )
        plots.lines(folder, f"several-packs-{kind}-kept", x, kept, {}, (share, "right answers of exact kept", ""))
