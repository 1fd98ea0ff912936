"""Composers, questions over several packs, and answers in the free order, for `benchmarks.composition`."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import common
from kp_core import Generation, PackStore, Session
from kp_core.compose import Composer, ExactComposer, NaiveComposer, SpliceComposer, composer_of

__all__ = ["composers", "divergence", "hotpot", "needles", "orders", "paired"]

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


def _asked(question: _Question) -> str:
    return f"{common.INSTRUCTION}\nQuestion: {question.asked}"


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
