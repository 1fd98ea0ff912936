"""Knowledge in a pack and a style on its values: does the style show, and does the knowledge stay?

HotpotQA questions, the gold facts of each as one pack in the system message, answered in a sentence or two. Conditions
(Knowledge Packs, arXiv 2604.03270, tables 9 and 10):

- pack: the facts, unsteered; what all others are compared with.
- SCOPE:ALPHA, as `--steered` names them: the same with steering; `pack` steers the facts alone, `system` the whole head
  of the prompt, facts included.
- With `--others`: nothing (no facts), steering (of the head, no facts), instruction (in the system message, no facts),
  pack and instruction.

EM is cover EM as in `benchmarks.equivalence`: the normalised gold answer stands in the first line of the reply. Style
is measured three ways: formality as in `benchmarks.scores`, the number of words, and likeness to the formal sides of
the pairs (`benchmarks.steering_range`, all-MiniLM-L6-v2). Differences are paired, with the 95 % interval of a bootstrap
over questions.

`--batch` answers are decoded at a time; with 1 they round as each does by itself.

Answers are kept in `--answers`, so that a run that was interrupted goes on, and several may share the work (`--skip`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from benchmarks import common, plots
from benchmarks.scores import INSTRUCTED, formality
from benchmarks.steering_range import likeness
from kp_core import Message, SentenceTransformerEmbedder
from kp_core.steering import preset

__all__ = ["main"]

ASK = "Answer the question in one or two full sentences, using the facts.\nQuestion: "
STEERED = ("system:0.3", "system:0.5", "system:0.7", "system:1", "pack:0.7")


@dataclass(frozen=True)
class Condition:
    """One way to ask."""

    name: str
    with_pack: bool = True
    alpha: float = 0.0
    scope: str | None = None
    instruction: str | None = None


PLAIN = Condition("pack")
OTHERS = (
    Condition("nothing", with_pack=False),
    Condition("steering", with_pack=False, alpha=0.7, scope="system"),
    Condition("instruction", with_pack=False, instruction=INSTRUCTED),
    Condition("pack and instruction", instruction=INSTRUCTED),
)


def steered(name: str) -> Condition:
    """The condition that SCOPE:ALPHA names."""
    scope, alpha = name.split(":")
    return Condition(name, alpha=float(alpha), scope=scope)


class Answers:
    """What was said, by question and condition, on disk as soon as it is."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.said: dict[tuple[int, str], str] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.said[row["question"], row["condition"]] = row["text"]

    def keep(self, question: int, condition: str, text: str) -> None:
        """Take an answer."""
        self.said[question, condition] = text
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"question": question, "condition": condition, "text": text}) + "\n")


def answer(arguments: argparse.Namespace, examples: Sequence[common.Example], answers: Answers) -> None:
    """Ask what was not asked before."""
    conditions = _conditions(arguments)
    missing = [
        at
        for at in range(arguments.skip, len(examples))
        if any((at, condition.name) not in answers.said for condition in conditions)
    ]
    if not missing:
        return
    engine = common.load_engine(arguments)
    direction = engine.make_steering(preset(arguments.preset))
    packs = {at: engine.build_pack(_facts(examples[at]), compiled_for="system", lazy=True) for at in missing}
    requests = {
        (at, condition.name): {
            "messages": _messages(examples[at], condition),
            "packs": [packs[at]] if condition.with_pack else (),
            "steering": (direction, condition.alpha),
            "scope": condition.scope,
        }
        for at in missing
        for condition in conditions
    }
    said = engine.generate_many(requests, done=answers.said, at_once=arguments.batch, max_tokens=arguments.tokens)
    for (at, name), found in said:
        answers.keep(at, name, found.text)


def _messages(example: common.Example, condition: Condition) -> list[Message]:
    head: list[Message] = (
        [] if condition.instruction is None else [{"role": "system", "content": condition.instruction}]
    )
    return [*head, {"role": "user", "content": ASK + example.question}]


def _facts(example: common.Example) -> str:
    return "\n".join(map(str, example.paragraphs))


def score(arguments: argparse.Namespace, examples: Sequence[common.Example], answers: Answers) -> dict[str, Any]:
    """The figures, of the questions that every condition answered."""
    conditions = [condition.name for condition in _conditions(arguments)]
    asked = [at for at in range(len(examples)) if all((at, name) in answers.said for name in conditions)]
    like = likeness(preset(arguments.preset), SentenceTransformerEmbedder())
    scores: dict[str, Callable[[int, str], float]] = {
        "em": lambda at, text: common.contains(common.first_line(text), examples[at].answer),
        "formality": lambda _, text: formality(text),
        "likeness": lambda _, text: like(text),
        "words": lambda _, text: len(text.split()),
    }
    found = {
        name: {
            measure: np.array([rate(at, answers.said[at, name]) for at in asked], float)
            for measure, rate in scores.items()
        }
        for name in conditions
    }
    return {"questions": len(asked)} | {
        name: {
            "changed": common.mean(answers.said[at, name] != answers.said[at, PLAIN.name] for at in asked),
            **{measure: _compared(values, found[PLAIN.name][measure]) for measure, values in measured.items()},
        }
        for name, measured in found.items()
    }


def _compared(values: Any, plain: Any) -> dict[str, float]:  # noqa: ANN401 - arrays
    """Mean, mean difference to the plain condition, and its 95 % interval."""
    differences = values - plain
    low = high = 0.0
    if differences.any() and len(differences) > 1:
        interval = bootstrap(
            (differences,), np.mean, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return {"mean": float(values.mean()), "difference": float(differences.mean()), "low": low, "high": high}


def _conditions(arguments: argparse.Namespace) -> list[Condition]:
    return [PLAIN, *map(steered, arguments.steered), *(OTHERS if arguments.others else ())]


def _shown(cell: dict[str, float], form: str) -> str:
    return f"{cell['difference']:+{form}} [{cell['low']:+{form}}, {cell['high']:+{form}}]"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--preset", default="formal", help="the steering; default: formal")
    parser.add_argument("--steered", nargs="*", default=list(STEERED), metavar="SCOPE:ALPHA")
    parser.add_argument("--others", action="store_true", help="also without facts, and with an instruction")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="most tokens of an answer; default: 40")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="do not answer the first N rows")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="answers at a time")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keep answers here, and go on from there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw EM and formality, as PNG and as SVG")
    arguments = parser.parse_args(argv)
    examples, answers = common.read_examples(arguments.data, arguments.limit), Answers(arguments.answers)
    answer(arguments, examples, answers)
    figures = {"preset": arguments.preset, "dtype": arguments.dtype, **score(arguments, examples, answers)}
    rows = {name: row for name, row in figures.items() if isinstance(row, dict)}
    common.show_table(
        f"Dual channel: {figures['questions']} HotpotQA questions; differences to the unsteered pack",
        ("condition", "EM", "EM, points", "formality", "likeness", "words", "changed"),
        [
            (
                name,
                f"{row['em']['mean']:.1%}",
                f"{100 * row['em']['difference']:+.1f} [{100 * row['em']['low']:+.1f}, {100 * row['em']['high']:+.1f}]",
                _shown(row["formality"], ".3f"),
                _shown(row["likeness"], ".3f"),
                _shown(row["words"], ".1f"),
                f"{row['changed']:.0%}",
            )
            for name, row in rows.items()
        ],
        (f"Unsteered: formality {rows['pack']['formality']['mean']:.3f}, {rows['pack']['words']['mean']:.1f} words",),
    )
    if arguments.plots:
        series = {measure: [row[measure]["mean"] for row in rows.values()] for measure in ("em", "formality")}
        plots.bars(arguments.plots, "steering-dual", list(rows), series, "EM, and formality from 0 to 1")
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
