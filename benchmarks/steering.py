"""What steering does to how a model speaks, to what it knows, and to how fast it is.

The sections, each asked for with `--only` (default: all):

- alpha: effect and coherence of the formal preset over alpha (Knowledge Packs, arXiv 2604.03270, table 6), beside an
  instruction in the system message. With `--plot`, a picture.
- layers: the effect of each third of the layers, and of all (table 7), at the recommended alpha.
- composition: formal and concise added (table 8); how much of its single effect each keeps, and their cosine.
- dual: HotpotQA questions with their gold facts in a steered pack (tables 9 and 10): how often the first line contains
  the gold answer, equals it (EM) or shares words with it (F1), all normalised; and formality.
- pairs: the effect over the number of pairs, at one strength.
- cache: one-shot cache steering (arXiv 2507.08799): K and V at the last token, for the reasoning styles.
- speed: seconds per token and to the first token, steered over unsteered, in turns; and tokens added.

Answers are greedy. Formality is the mean of two numbers from 0 to 1: the automated readability index of textstat (a
school grade from the lengths of words and sentences), clipped to 0..20 and divided by 20; and one less ten times the
share of informal words (contractions, first and second person, slang, exclamation marks), at least 0. Brevity is minus
the logarithm of the number of words. Coherence is as in `kp_core.steering.calibrate`. Effects are differences to the
unsteered answers.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import textstat
from rich.progress import track

from benchmarks import common
from benchmarks.equivalence import question_text
from kp_core import Steering
from kp_core.steering import Calibration, Task, calibrate, preset, repetition, resolve_layers

if TYPE_CHECKING:
    from kp_core.engines.hf import HFEngine

__all__ = ["brevity", "formality", "main"]

QUESTIONS = (
    "What is the sun?",
    "Why do people sleep?",
    "How do I learn to swim?",
    "What should I eat for breakfast?",
    "Tell me about dogs.",
    "Why is the sea salty?",
    "How can I save money?",
    "What is music good for?",
    "What makes a good friend?",
    "How does a bicycle stay upright?",
)
INSTRUCTED = "Write in a highly formal register, without contractions and without addressing the reader."
ALPHAS = (-3.0, -2.0, -1.0, 0.0, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0)
STYLES = ("strategy_execution", "numbered_deduction", "causal_chain", "annotated_deduction", "analogy", "step_by_step")
_INFORMAL = re.compile(
    r"\b(?:\w+'(?:s|re|ve|ll|d|m|t)|i|me|my|you|your|we|us|our|hey|yeah|ok|okay|lol|gonna|wanna|gotta|kinda|stuff|guys|"
    r"cool|awesome|super|dude|yo|thanks|pretty|really|just|so|love)\b|!",
    re.IGNORECASE,
)


def formality(text: str) -> float:
    """Formality from 0 to 1, as the module says; 0 of a text without words."""
    words = text.split()
    if not words:
        return 0.0
    grade = min(max(textstat.automated_readability_index(text), 0.0), 20.0) / 20
    return (grade + max(0.0, 1 - 10 * len(_INFORMAL.findall(text)) / len(words))) / 2


def brevity(text: str) -> float:
    """Minus the natural logarithm of the number of words."""
    return -math.log(max(len(text.split()), 1))


class Bench:
    """One engine, the questions, and what the sections share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.engine: HFEngine = common.load_engine(arguments)
        self.questions = QUESTIONS[: arguments.questions]
        self.formal = self.engine.make_steering(preset("formal"))
        self._alpha: float | None = None
        self._plain: list[str] = []

    def answers(self, steering: Steering | None = None, system: str | None = None, **request: Any) -> list[str]:  # noqa: ANN401
        """Greedy answers to the questions."""
        head = [] if system is None else [{"role": "system", "content": system}]
        return [
            self.engine.generate(
                [*head, {"role": "user", "content": question}],
                steering=steering,
                max_tokens=self.arguments.tokens,
                **request,
            ).text
            for question in self.questions
        ]

    def effect(self, texts: Sequence[str], score: Callable[[str], float] = formality) -> float:
        """Mean score less that of the unsteered answers."""
        return common.mean(map(score, texts)) - common.mean(map(score, self.plain))

    @property
    def plain(self) -> list[str]:
        """The unsteered answers."""
        self._plain = self._plain or self.answers()
        return self._plain

    def sweep(self) -> Calibration:
        """The alpha sweep."""
        tasks = [Task(question) for question in self.questions]
        return calibrate(
            self.engine, self.formal, tasks, formality, alphas=self.arguments.alphas, max_tokens=self.arguments.tokens
        )

    @property
    def alpha(self) -> float:
        """The alpha to use: asked for, or what the sweep recommends."""
        if self._alpha is None:
            self._alpha = self.sweep().recommended if self.arguments.alpha is None else self.arguments.alpha
        return self._alpha


def alpha_section(bench: Bench) -> dict[str, Any]:
    """Effect and coherence over alpha, beside an instruction."""
    found = bench.sweep()
    bench._alpha = bench._alpha or found.recommended  # noqa: SLF001
    instructed = bench.effect(bench.answers(system=INSTRUCTED))
    plain = next(row.effect for row in found.rows if row.alpha == 0)
    common.show_table(
        f"Formality over alpha: {len(bench.questions)} questions",
        ("alpha", "strength", "formality", "effect", "coherent", "repeated", "perplexity"),
        [
            (
                f"{row.alpha:g}",
                *(row.strength, row.effect, row.effect - plain),
                *(f"{row.coherence:.0%}", f"{row.repetition:.0%}", f"{row.perplexity:.1f}"),
            )
            for row in found.rows
        ],
        (
            f"Coherent from {found.low:g} to {found.high:g}; recommended alpha {found.recommended:g}.",
            f"Effect of the instruction in the system message: {instructed:.3f}",
        ),
    )
    if bench.arguments.plot:
        for suffix in ("png", "svg"):
            found.plot(bench.arguments.plot.with_suffix(f".{suffix}"))
    return {**found.to_dict(), "instruction_effect": instructed}


def layers_section(bench: Bench) -> dict[str, Any]:
    """Thirds of the layers at one alpha."""
    everything = bench.engine.make_steering(preset("formal"), layers=(0.0, 1.0))
    count = len(everything.layers)
    bounds = {"first": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "last": (2 / 3, 1.0), "all": (0.0, 1.0)}
    thirds = {name: resolve_layers(bound, count) for name, bound in bounds.items()}
    rows = {}
    for name, layers in thirds.items():
        steering = everything.restrict(layers) * bench.alpha
        texts = bench.answers(steering)
        rows[name] = {
            "effect": bench.effect(texts),
            "repetition": common.mean(map(repetition, texts)),
            "strength": steering.strength,
        }
    common.show_table(
        f"Thirds of the layers at alpha {bench.alpha:g}",
        ("layers", "effect", "of all", "strength", "repeated"),
        [
            (
                name,
                row["effect"],
                f"{_share(row['effect'], rows['all']['effect']):.0%}",
                row["strength"],
                row["repetition"],
            )
            for name, row in rows.items()
        ],
    )
    return rows


def composition_section(bench: Bench) -> dict[str, Any]:
    """Two directions added."""
    formal = bench.formal * bench.alpha
    # One alpha means different strengths for different pairs.
    concise = bench.engine.make_steering(preset("concise")).at_strength(formal.strength)
    found = {
        name: {
            "formality": bench.effect(texts),
            "brevity": bench.effect(texts, brevity),
            "repetition": common.mean(map(repetition, texts)),
        }
        for name, texts in (
            ("formal", bench.answers(formal)),
            ("concise", bench.answers(concise)),
            ("both", bench.answers(formal + concise)),
        )
    }
    kept = [
        _share(found["both"]["formality"], found["formal"]["formality"]),
        _share(found["both"]["brevity"], found["concise"]["brevity"]),
    ]
    cosine = formal.cosine(concise)
    common.show_table(
        f"Composition, each at strength {formal.strength:.3f}",
        ("steering", "formality", "brevity", "repeated"),
        [(name, *row.values()) for name, row in found.items()],
        (f"Kept when added: formality {kept[0]:.0%}, brevity {kept[1]:.0%}. Cosine of the two: {cosine:.3f}",),
    )
    return {**found, "kept": kept, "cosine": cosine}


def dual_section(bench: Bench) -> dict[str, Any]:
    """Knowledge in a pack and a style on it."""
    examples = common.read_examples(bench.arguments.data, bench.arguments.limit)
    rows: dict[str, dict[str, float]] = {}
    conditions: list[tuple[str, bool, float, str | None]] = [
        ("nothing", False, 0.0, None),
        ("steering", False, 0.7, None),
        ("instruction", False, 0.0, INSTRUCTED),
        ("pack and instruction", True, 0.0, INSTRUCTED),
        *((f"pack, alpha {alpha:g}", True, alpha, None) for alpha in bench.arguments.dual_alphas),
    ]
    packs = [bench.engine.build_pack("\n".join(map(str, example.paragraphs)), inside="system") for example in examples]
    for name, with_pack, alpha, system in conditions:
        texts = []
        for example, pack in track(list(zip(examples, packs, strict=True)), name):
            head = [] if system is None else [{"role": "system", "content": system}]
            texts.append(
                bench.engine.generate(
                    [*head, {"role": "user", "content": question_text(example.question)}],
                    packs=[pack] if with_pack else (),
                    steering=(bench.formal, alpha),
                    max_tokens=bench.arguments.tokens,
                ).text
            )
        said = list(zip(examples, texts, strict=True))
        rows[name] = {
            "contains": common.mean(common.contains(common.first_line(text), example.answer) for example, text in said),
            "em": common.mean(common.exact_match(common.first_line(text), example.answer) for example, text in said),
            "f1": common.mean(common.f1(common.first_line(text), example.answer) for example, text in said),
            "formality": common.mean(map(formality, texts)),
            "words": common.mean(len(text.split()) for text in texts),
        }
    common.show_table(
        f"Dual channel: {len(examples)} HotpotQA questions with gold facts",
        ("condition", "contains", "EM, strict", "F1", "formality", "words"),
        [
            (
                name,
                f"{row['contains']:.1%}",
                f"{row['em']:.1%}",
                f"{row['f1']:.1%}",
                row["formality"],
                f"{row['words']:.1f}",
            )
            for name, row in rows.items()
        ],
    )
    return rows


def pairs_section(bench: Bench) -> dict[str, Any]:
    """How many pairs it takes, all at the strength of the recommended alpha."""
    pairs, strength = preset("formal"), bench.formal.strength * abs(bench.alpha)
    rows = {}
    for count in (1, 3, 8, 16, len(pairs)):
        steering = bench.engine.make_steering(pairs[:count], progress=False).at_strength(strength)
        rows[str(count)] = {"effect": bench.effect(bench.answers(steering)), "cosine": steering.cosine(bench.formal)}
    common.show_table(
        f"Number of pairs at strength {strength:.3f}",
        ("pairs", "effect", "cosine with all"),
        [(name, *row.values()) for name, row in rows.items()],
    )
    return rows


def cache_section(bench: Bench) -> dict[str, Any]:
    """One-shot steering of K and V at one position."""
    rows = {}
    plain = bench.plain
    for style in STYLES:
        steering = bench.engine.make_steering(preset(style), method="last_token", layers=(0.0, 1.0), progress=False)
        for c_v, c_k in ((2.0, 0.0), (4.0, 0.2), (8.0, 0.2)):
            texts = bench.answers(steering.scaled(c_v=c_v, c_k=c_k), scope="last_token")
            rows[f"{style} c_v={c_v:g} c_k={c_k:g}"] = {
                "words": common.mean(len(text.split()) for text in texts),
                "changed": common.mean(text != before for text, before in zip(texts, plain, strict=True)),
                "repetition": common.mean(map(repetition, texts)),
            }
    words = common.mean(len(text.split()) for text in plain)
    common.show_table(
        "One-shot cache steering at the last token",
        ("style", "words", "answers changed", "repeated"),
        [(name, f"{row['words']:.1f}", f"{row['changed']:.0%}", row["repetition"]) for name, row in rows.items()],
        (f"Unsteered: {words:.1f} words, repeated {common.mean(map(repetition, plain)):.3f}",),
    )
    return {**rows, "unsteered_words": words}


def speed_section(bench: Bench) -> dict[str, Any]:
    """Steered over unsteered, in turns, with everything warm."""
    pack = bench.engine.build_pack("\n".join(f"The {n}th fact of many." for n in range(100)), inside="system")
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    tokens = {}
    for turn in range(2 * (bench.arguments.repeats + 1)):
        steered = bool(turn % 2)
        began = time.perf_counter()
        found = bench.engine.generate(
            f"What is fact {turn // 2 + 10}?",
            packs=[pack],
            steering=(bench.formal, 0.7) if steered else None,
            max_tokens=bench.arguments.tokens,
        )
        each = (time.perf_counter() - began - found.usage.ttft_s) / max(found.usage.completion_tokens - 1, 1)
        tokens[steered] = len(found.prompt)
        if turn > 1:  # The first two warm up.
            seconds[steered].append((found.usage.ttft_s, each))
    ttft, each = ({it: statistics.median(row[at] for row in seconds[it]) for it in seconds} for at in (0, 1))
    figures = {
        "ttft_s": ttft[False],
        "ttft_ratio": ttft[True] / ttft[False],
        "token_s": each[False],
        "token_ratio": each[True] / each[False],
        "tokens_added": tokens[True] - tokens[False],
    }
    common.show_table(
        f"Speed behind a pack of {len(pack.token_ids)} tokens, medians of {bench.arguments.repeats}",
        ("", "unsteered, ms", "steered / unsteered"),
        [
            ("time to first token", f"{1000 * ttft[False]:.1f}", f"{figures['ttft_ratio']:.2f}"),
            ("per token", f"{1000 * each[False]:.1f}", f"{figures['token_ratio']:.2f}"),
        ],
        (f"Tokens added by steering: {figures['tokens_added']}",),
    )
    return figures


def _share(part: float, whole: float) -> float:
    """What share of `whole` a part is; 0 of nothing."""
    return part / whole if whole else 0.0


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "alpha": alpha_section,
    "layers": layers_section,
    "composition": composition_section,
    "dual": dual_section,
    "pairs": pairs_section,
    "cache": cache_section,
    "speed": speed_section,
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the tables, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="most tokens of an answer; default: 48")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), metavar="N", help="open questions to ask")
    parser.add_argument("--alpha", type=float, help="alpha of layers, composition and pairs; default: as recommended")
    parser.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS), help="alphas of the sweep")
    parser.add_argument("--dual-alphas", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0])
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="runs per median of speed; default: 20")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the alpha sweep to FILE.png and FILE.svg")
    arguments = parser.parse_args(argv)
    bench = Bench(arguments)
    figures = {
        "questions": len(bench.questions),
        "dtype": arguments.dtype,
        "steering": {"id": bench.formal.id, "strength": bench.formal.strength},
        **{name: SECTIONS[name](bench) for name in arguments.only},
    }
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
