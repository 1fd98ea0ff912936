"""Finds the range of alpha in which a steered model stays coherent and still answers from packs.

As a program, it measures the steering of a file, as `kp steer make` writes it, on eight plain questions or on those of
`--questions`, lines of `{"question": "...", "facts": "...", "expected": "..."}`, of which only the first is needed. The
effect is how like the answers are to the first sides of the pairs (1) or to the second (-1), by embedding. The steering
is saved with the range and the strengths that it found as its defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from benchmarks import common
from kp_cli.steer import read_pairs
from kp_core import KnowledgePack, Message, SentenceTransformerEmbedder, Session
from kp_core.errors import OptionError
from kp_core.progress import bar_of
from kp_core.steering import Pair, Scope, Steering, load_steering, save_steering

__all__ = ["Calibration", "CalibrationRow", "Task", "calibrate", "likeness", "main", "repetition"]

QUESTIONS = (
    "What is the sun?",
    "Why do people sleep?",
    "How do I learn to swim?",
    "What should I eat for breakfast?",
    "Tell me about dogs.",
    "Why is the sea salty?",
    "How can I save money?",
    "What makes a good friend?",
)

ALPHAS = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0)
_TOLERANCE = 0.01  # Largest acceptable loss of accuracy with packs.
_LEAST_COHERENCE = 0.8  # Times the share of coherent answers at alpha 0.
_MOST_REPETITION = 0.5  # Share of word triples.
_MOST_PERPLEXITY = 8.0  # Times that of the unsteered answers.
Score: TypeAlias = Callable[[str], float]


@dataclass(frozen=True)
class Task:
    """One question. With `expected`, an answer that contains it counts as correct."""

    messages: Sequence[Message] | str
    packs: Sequence[KnowledgePack] = ()
    expected: str | None = None


@dataclass(frozen=True)
class CalibrationRow:
    """Results for one alpha: means over the tasks."""

    alpha: float
    strength: float
    """`Steering.strength` at this alpha; NaN for a steering without scales."""
    effect: float
    """Mean of the caller's score."""
    coherence: float
    """Share of answers that are valid, with little repetition and low perplexity under the unsteered model."""
    repetition: float
    perplexity: float
    """Geometric mean of the answers' perplexity under the unsteered model."""
    accuracy: float | None
    """Share of correct answers among the tasks with `expected`; `None` if there are none."""


@dataclass(frozen=True)
class Calibration:
    """Results of a sweep. `steering` is calibrated: it has default strengths and warns beyond its coherent range.

    `low` and `high` are the alphas between which text stayed coherent, or an end of the sweep if no limit was found.
    """

    rows: tuple[CalibrationRow, ...]
    low: float
    high: float
    steering: Steering = field(repr=False)

    @property
    def recommended(self) -> float:
        """Alpha for steering without packs: that of the largest effect within the coherent range."""
        return max(self._coherent(), key=lambda row: (row.effect, -abs(row.alpha))).alpha

    @property
    def recommended_with_knowledge(self) -> float:
        """Alpha with packs: that of the largest effect with at most one percentage point less accuracy than unsteered.

        If no task has `expected`, it is 0.7, or `high` if that is lower.
        """
        plain = next(row.accuracy for row in self.rows if row.alpha == 0)
        if plain is None:
            return min(replace(self.steering, recommended=None).default_alpha(with_knowledge=True), self.high)
        accurate = [row for row in self._coherent() if row.accuracy is not None and row.accuracy >= plain - _TOLERANCE]
        return max(accurate, key=lambda row: (row.effect, -abs(row.alpha))).alpha

    def to_dict(self) -> dict[str, Any]:
        """The results as plain values for JSON."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "low": self.low,
            "high": self.high,
            "recommended": self.recommended,
            "recommended_with_knowledge": self.recommended_with_knowledge,
        }

    def table(self) -> str:
        """The rows as a text table, followed by the recommendations."""
        lines = ["  alpha  strength    effect  coherent  repeated  perplexity  accuracy"]
        lines += [
            f"{row.alpha:7.2f}{row.strength:10.3f}{row.effect:10.3f}{row.coherence:10.0%}{row.repetition:10.0%}"
            f"{row.perplexity:12.1f}{'-' if row.accuracy is None else f'{row.accuracy:.0%}':>10}"
            for row in self.rows
        ]
        lines.append(
            f"Coherent from {self.low:g} to {self.high:g}. Recommended: {self.recommended:g} alone, "
            f"{self.recommended_with_knowledge:g} with knowledge."
        )
        return "\n".join(lines)

    def plot(self, path: str | Path) -> Path:
        """Plot effect, coherence and accuracy over alpha to `path`, whose suffix chooses the image format."""
        figure = Figure(figsize=(7, 4), layout="constrained")
        left = figure.subplots()
        right = left.twinx()
        alphas = [row.alpha for row in self.rows]
        left.plot(alphas, [row.effect for row in self.rows], "o-", color="tab:blue", label="effect")
        right.plot(alphas, [row.coherence for row in self.rows], "s--", color="tab:green", label="coherent")
        if accuracies := [row.accuracy for row in self.rows if row.accuracy is not None]:
            right.plot(alphas, accuracies, "^:", color="tab:red", label="accuracy")
        left.axvspan(self.low, self.high, color="tab:green", alpha=0.08)
        left.set(xlabel="alpha", ylabel="effect")
        right.set(ylabel="share of answers", ylim=(-0.05, 1.05))
        left.legend(loc="upper left")
        right.legend(loc="lower right")
        figure.savefig(path)
        return Path(path)

    def _coherent(self) -> list[CalibrationRow]:
        return [row for row in self.rows if self.low <= row.alpha <= self.high]


def calibrate(  # noqa: PLR0913 - what is asked, at which strengths, and how it is scored
    engine: Session,
    steering: Steering,
    tasks: Sequence[Task | str],
    score: Score,
    *,
    alphas: Sequence[float] = ALPHAS,
    scope: Scope | None = None,
    max_tokens: int = 64,
    progress: bool = True,
) -> Calibration:
    """Answer `tasks` greedily at each of `alphas` and measure the answers.

    An answer is coherent when it is not empty, at most half of its word triples repeat earlier ones, and its perplexity
    under the unsteered model is at most 8 times that of the unsteered answers. The coherent range contains the alphas
    around 0, without a gap, whose share of coherent answers is at least 0.8 times that at alpha 0.

    Raises `OptionError` for no tasks, no alphas, and an alpha or a score that is not finite; otherwise as
    `engine.generate`.
    """
    if isinstance(tasks, str):
        raise OptionError(f"Got the tasks {tasks!r}; expected a list of them: [{tasks!r}].")
    questions = [Task(task) if isinstance(task, str) else task for task in tasks]
    if not questions or not alphas or not all(math.isfinite(alpha) for alpha in alphas):
        raise OptionError(f"Got {len(questions)} tasks and the alphas {alphas!r}; expected tasks and finite numbers.")
    unwarned = replace(steering, coherent=(-math.inf, math.inf))
    answers: dict[float, list[tuple[Task, str, float]]] = {alpha: [] for alpha in sorted({0.0, *map(float, alphas)})}
    with bar_of("Calibrating", len(answers) * len(questions), "answer", shown=progress) as bar:
        for alpha, alpha_answers in answers.items():
            for task in questions:
                request = {"steering": (unwarned, alpha), "scope": scope, "packs": task.packs}
                text = engine.generate(task.messages, max_tokens=max_tokens, **request).text
                alpha_answers.append((task, text, common.perplexity(engine, task.messages, text, packs=task.packs)))
                bar.update()
    limit = _MOST_PERPLEXITY * geometric_mean(perplexity for _, _, perplexity in answers[0.0])

    def effect(text: str) -> float:
        value = score(text)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise OptionError(f"The score gave {value!r} for the answer {text[:40]!r}; expected a finite number.")
        return float(value)

    rows = []
    for alpha, measured in answers.items():
        texts, perplexities = [text for _, text, _ in measured], [perplexity for _, _, perplexity in measured]
        repetitions = [repetition(text) for text in texts]
        are_correct = [task.expected.lower() in text.lower() for task, text, _ in measured if task.expected is not None]
        row = CalibrationRow(
            alpha=alpha,
            strength=abs(alpha) * steering.strength if steering.scales and steering.values else math.nan,
            effect=fmean(map(effect, texts)),
            coherence=fmean(
                bool(text) and repeated <= _MOST_REPETITION and perplexity <= limit
                for text, perplexity, repeated in zip(texts, perplexities, repetitions, strict=True)
            ),
            repetition=fmean(repetitions),
            perplexity=geometric_mean(perplexities),
            accuracy=fmean(are_correct) if are_correct else None,
        )
        rows.append(row)
    plain = next(row for row in rows if row.alpha == 0)
    incoherent = [row.alpha for row in rows if row.coherence < _LEAST_COHERENCE * plain.coherence]
    # The nearest incoherent alphas on both sides of 0; an end of the sweep is no limit.
    below = max((alpha for alpha in incoherent if alpha < 0), default=-math.inf)
    above = min((alpha for alpha in incoherent if alpha > 0), default=math.inf)
    coherent = [row.alpha for row in rows if below < row.alpha < above]
    bounds = -math.inf if below == -math.inf else coherent[0], math.inf if above == math.inf else coherent[-1]
    calibration = Calibration(tuple(rows), coherent[0], coherent[-1], steering)
    chosen = calibration.recommended, calibration.recommended_with_knowledge
    return replace(calibration, steering=replace(steering, coherent=bounds, recommended=chosen))


def repetition(text: str) -> float:
    """Share of the word triples of `text` that repeat earlier ones; 0 for fewer than three words."""
    words = text.lower().split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


def likeness(pairs: Sequence[Pair], embedder: Any) -> Callable[[str], float]:  # noqa: ANN401 - has `embed(texts)`
    """A score for `calibrate`: 1 for a text like the average positive side of `pairs`, -1 like the negative one.

    `embedder` is one of `kp_core.banks.embed`. Of a conversation, only the last message counts. Raises `OptionError`
    for no pairs, and for pairs whose sides have the same mean embedding.
    """
    if not pairs:
        raise OptionError("Got no pairs; expected the pairs that the steering was made from.")
    positive, negative = (
        embedder.embed([side if isinstance(side, str) else str(side[-1]["content"]) for side in sides]).mean(axis=0)
        for sides in zip(*pairs, strict=True)
    )
    half, middle = (positive - negative) / 2, (positive + negative) / 2
    length = float(half @ half)
    if not length:
        raise OptionError("Both sides of the pairs mean the same to the embedder; give a score of your own.")
    return lambda text: float((embedder.embed([text])[0] - middle) @ half) / length


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, save the steering."""
    parser = common.argument_parser(__doc__, "")
    parser.add_argument("file", type=Path, metavar="FILE", help="a steering")
    parser.add_argument("--pairs", help="a preset or a JSON file; default: the pairs that it was made from")
    parser.add_argument("--questions", type=Path, metavar="JSONL")
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="most tokens of an answer; default: 32")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw the sweep: .png or .svg")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file to write; default: FILE")
    arguments = parser.parse_args(argv)
    steering = load_steering(arguments.file)
    pairs = read_pairs(arguments.pairs or steering.provenance.get("pairs", ""))
    rows: list[dict[str, str]] = [{"question": question} for question in QUESTIONS]
    if arguments.questions:
        rows = [json.loads(line) for line in arguments.questions.read_text().splitlines() if line.strip()]
    engine = common.load_engine(arguments)
    steering.check(engine.fingerprint)
    tasks = [
        Task(
            row["question"],
            [engine.build_pack(row["facts"], compiled_for="system")] if "facts" in row else (),
            row.get("expected"),
        )
        for row in rows
    ]
    score = likeness(pairs, SentenceTransformerEmbedder())
    found = calibrate(engine, steering, tasks, score, alphas=arguments.alphas, max_tokens=arguments.tokens)
    save_steering(found.steering, arguments.out or arguments.file)
    if arguments.plot:
        found.plot(arguments.plot)
    print(found.table())
    common.write_json(arguments.json, found.to_dict())
    return found.to_dict()


if __name__ == "__main__":
    main()
