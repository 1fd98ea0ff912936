"""What steering does to how a model speaks, and to how fast it is; `benchmarks.dual` has what it does to knowledge.

The sections, each asked for with `--only` (default: all):

- alpha: effect and coherence of the formal preset over alpha (Knowledge Packs, arXiv 2604.03270, table 6), beside an
  instruction in the system message.
- layers: the effect of each third of the layers, and of all (table 7), at the recommended alpha.
- composition: formal or casual and concise or detailed added (table 8), and formal and concise each without its part
  along the other; how much of its single effect each keeps, their cosine, and the two instructions in words.
- pairs: the effect over the number of pairs, at one strength.
- cache: one-shot cache steering (arXiv 2507.08799): K and V at the last token, for the reasoning styles, beside an
  instruction.
- speed: seconds per token and to the first token, steered over unsteered, in turns; and tokens added.

Answers are greedy. Formality and brevity are as in `benchmarks.scores`; likeness to the pairs of a preset as in
`benchmarks.steering_range`, with all-MiniLM-L6-v2; coherence as in `benchmarks.steering_range`. Effects are
differences to the unsteered answers. With `--answers` a run that was interrupted goes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, plots
from benchmarks.scores import INSTRUCTED, brevity
from benchmarks.steered import QUESTIONS, Bench, share, without
from benchmarks.steering_range import repetition
from kp_core.steering import preset, resolve_layers

__all__ = ["main"]

ALPHAS = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
STYLES = {
    "strategy_execution": "First state a strategy, then carry it out.",
    "numbered_deduction": "Reason in numbered steps.",
    "causal_chain": "Reason as a chain of causes and effects.",
    "annotated_deduction": "Reason in steps, and name the rule behind each.",
    "analogy": "Explain by an analogy.",
    "step_by_step": "Think step by step.",
}
SHORTLY = "Answer as shortly as you can."
COEFFICIENTS = ((2.0, 0.0), (6.0, 0.2))
"""c_v and c_k."""


def alpha_section(bench: Bench) -> dict[str, Any]:
    """Effect and coherence over alpha, beside an instruction."""
    found, like = bench.sweep, bench.likeness("formal")
    instructed = bench.answers(system=INSTRUCTED)
    likes = {row.alpha: common.mean(map(like, bench.answers(bench.formal * row.alpha))) for row in found.rows}
    liked = common.mean(map(like, instructed))
    plain = next(row.effect for row in found.rows if row.alpha == 0)
    figures = {
        **found.to_dict(),
        "likeness": {f"{alpha:g}": value for alpha, value in likes.items()},
        "instruction_effect": bench.effect(instructed),
        "instruction_likeness": liked,
    }
    common.show_table(
        f"Formality over alpha: {len(bench.questions)} questions",
        ("alpha", "strength", "formality", "effect", "likeness", "coherent", "repeated", "perplexity"),
        [
            (
                f"{row.alpha:g}",
                *(row.strength, row.effect, row.effect - plain, likes[row.alpha]),
                *(f"{row.coherence:.0%}", f"{row.repetition:.0%}", f"{row.perplexity:.1f}"),
            )
            for row in found.rows
        ],
        (
            f"Coherent from {found.low:g} to {found.high:g}; recommended alpha {found.recommended:g}.",
            f"Instruction in text: effect {figures['instruction_effect']:.3f}, likeness {liked:.3f}",
        ),
    )
    if bench.arguments.plots:
        plots.lines(
            bench.arguments.plots,
            "steering-alpha",
            [row.alpha for row in found.rows],
            {"formality": [row.effect for row in found.rows], "likeness": list(likes.values())},
            {"coherent": [row.coherence for row in found.rows]},
            ("alpha", "formality, likeness to the formal pairs", "share of answers"),
            {"formality with an instruction in text": plain + figures["instruction_effect"]},
        )
    return figures


def layers_section(bench: Bench) -> dict[str, Any]:
    """Thirds of the layers at one alpha."""
    everything, like = bench.engine.make_steering(preset("formal"), layers=(0.0, 1.0)), bench.likeness("formal")
    bounds = {"first": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "last": (2 / 3, 1.0), "all": (0.0, 1.0)}
    rows = {}
    for name, bound in bounds.items():
        steering = everything.restrict(resolve_layers(bound, len(everything.layers))) * bench.alpha
        texts = bench.answers(steering)
        rows[name] = {
            "effect": bench.effect(texts),
            "likeness": bench.effect(texts, like),
            "repetition": common.mean(map(repetition, texts)),
            "strength": steering.strength,
        }
    for row in rows.values():
        row["of_all"] = share(row["effect"], rows["all"]["effect"])
        row["likeness_of_all"] = share(row["likeness"], rows["all"]["likeness"])
    common.show_table(
        f"Thirds of the layers at alpha {bench.alpha:g}",
        ("layers", "effect", "of all", "likeness", "of all", "strength", "repeated"),
        [
            (
                *(name, row["effect"], f"{row['of_all']:.0%}", row["likeness"], f"{row['likeness_of_all']:.0%}"),
                *(row["strength"], row["repetition"]),
            )
            for name, row in rows.items()
        ],
    )
    if bench.arguments.plots:
        series = {"formality": [row["effect"] for row in rows.values()]}
        plots.bars(bench.arguments.plots, "steering-layers", list(rows), series, "effect")
    return {"alpha": bench.alpha, **rows}


def composition_section(bench: Bench) -> dict[str, Any]:
    """Two directions added: formal or casual, and concise or detailed."""
    formal = bench.formal * bench.alpha
    # One alpha means different strengths for different pairs.
    concise = bench.engine.make_steering(preset("concise")).at_strength(formal.strength)
    styles, lengths = {"formal": formal, "casual": formal * -1}, {"concise": concise, "detailed": concise * -1}
    sums = {f"{style} + {length}": (style, length) for style in styles for length in lengths}
    texts = {name: bench.answers(steering) for name, steering in (styles | lengths).items()}
    texts |= {name: bench.answers(styles[style] + lengths[length]) for name, (style, length) in sums.items()}
    texts |= {
        "formal + concise, apart": bench.answers(without(formal, concise) + without(concise, formal)),
        "instructed: formal": bench.answers(system=INSTRUCTED),
        "instructed: concise": bench.answers(system=SHORTLY),
        "instructed: both": bench.answers(system=f"{INSTRUCTED} {SHORTLY}"),
    }
    found: dict[str, dict[str, float]] = {
        name: {
            "formality": bench.effect(said),
            "brevity": bench.effect(said, brevity),
            "words": common.mean(len(text.split()) for text in said),
            "repetition": common.mean(map(repetition, said)),
        }
        for name, said in texts.items()
    }
    parts = sums | {
        "formal + concise, apart": ("formal", "concise"),
        "instructed: both": ("instructed: formal", "instructed: concise"),
    }
    kept = {
        name: [
            share(found[name]["formality"], found[style]["formality"]),
            share(found[name]["brevity"], found[length]["brevity"]),
        ]
        for name, (style, length) in parts.items()
    }
    cosine, by_layer = formal.cosine(concise), formal.layer_cosines(concise)
    notes = [f"Kept by {name!r}: formality {first:.0%}, brevity {second:.0%}" for name, (first, second) in kept.items()]
    common.show_table(
        f"Composition, each at strength {formal.strength:.3f}, {bench.arguments.tokens} tokens",
        ("steering", "formality", "brevity", "words", "repeated"),
        [(name, *row.values()) for name, row in found.items()],
        (
            *notes,
            f"Cosine of the two: {cosine:.3f}; by layer {min(by_layer.values()):.3f} to {max(by_layer.values()):.3f}",
        ),
    )
    if bench.arguments.plots:
        series = {score: [row[score] for row in found.values()] for score in ("formality", "brevity")}
        plots.bars(bench.arguments.plots, "steering-composition", list(found), series, "effect")
    return {**found, "kept": kept, "cosine": cosine, "strength": formal.strength}


def pairs_section(bench: Bench) -> dict[str, Any]:
    """How many pairs it takes, all at the strength of the recommended alpha."""
    pairs, strength = preset("formal"), bench.formal.strength * abs(bench.alpha)
    rows = {}
    for count in sorted({1, 2, 4, 8, 16, len(pairs)}):
        steering = bench.engine.make_steering(pairs[:count], progress=False).at_strength(strength)
        rows[str(count)] = {"effect": bench.effect(bench.answers(steering)), "cosine": steering.cosine(bench.formal)}
    common.show_table(
        f"Number of pairs at strength {strength:.3f}",
        ("pairs", "effect", "cosine with all"),
        [(name, *row.values()) for name, row in rows.items()],
    )
    if bench.arguments.plots:
        columns = {name: [row[name] for row in rows.values()] for name in ("effect", "cosine")}
        plots.lines(
            *(bench.arguments.plots, "steering-pairs", [int(count) for count in rows]),
            *({"effect": columns["effect"]}, {"cosine with all": columns["cosine"]}, ("pairs", "effect", "cosine")),
        )
    return rows


def cache_section(bench: Bench) -> dict[str, Any]:
    """One-shot steering of K and V at one position, beside an instruction."""
    rows = {}
    for style, instruction in STYLES.items():
        steering = bench.engine.make_steering(preset(style), method="last_token", layers=(0.0, 1.0), progress=False)
        like = bench.likeness(style)
        ways = {
            f"{style}, c_v {c_v:g}, c_k {c_k:g}": bench.answers(steering.scaled(c_v=c_v, c_k=c_k), scope="last_token")
            for c_v, c_k in COEFFICIENTS
        }
        for name, texts in (*ways.items(), (f"{style}, instructed", bench.answers(system=instruction))):
            rows[name] = {
                "likeness": bench.effect(texts, like),
                "words": common.mean(len(text.split()) for text in texts),
                "changed": common.mean(text != before for text, before in zip(texts, bench.plain, strict=True)),
                "repetition": common.mean(map(repetition, texts)),
            }
    words = common.mean(len(text.split()) for text in bench.plain)
    common.show_table(
        f"One-shot cache steering at the last token: {len(bench.questions)} questions",
        ("style", "likeness", "words", "answers changed", "repeated"),
        [
            (name, row["likeness"], f"{row['words']:.1f}", f"{row['changed']:.0%}", row["repetition"])
            for name, row in rows.items()
        ],
        (f"Unsteered: {words:.1f} words, repeated {common.mean(map(repetition, bench.plain)):.3f}",),
    )
    if bench.arguments.plots:
        ways_of = ("c_v 2, c_k 0", "c_v 6, c_k 0.2", "instructed")
        series = {way: [rows[f"{style}, {way}"]["likeness"] for style in STYLES] for way in ways_of}
        plots.bars(bench.arguments.plots, "steering-cache", list(STYLES), series, "likeness to the style")
    return {**rows, "unsteered_words": words}


def speed_section(bench: Bench) -> dict[str, Any]:
    """Steered over unsteered, in turns, with everything warm."""
    pack = bench.engine.build_pack("\n".join(f"The {n}th fact of many." for n in range(100)), compiled_for="system")
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    tokens = {}
    for turn in range(2 * (bench.arguments.repeats + 1)):
        steered = bool(turn % 2)
        began = time.perf_counter()
        found = bench.engine.generate(
            f"What is fact {turn // 2 + 10}?",
            packs=[pack],
            steering=(bench.formal, None) if steered else None,
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


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "alpha": alpha_section,
    "layers": layers_section,
    "composition": composition_section,
    "pairs": pairs_section,
    "cache": cache_section,
    "speed": speed_section,
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the tables, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="most tokens of an answer; default: 32")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), metavar="N", help="open questions to ask")
    parser.add_argument("--alpha", type=float, help="alpha of layers, composition and pairs; default: as recommended")
    parser.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS), help="alphas of the sweep")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="runs per median of speed; default: 20")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keep answers here, and go on from there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw each section, as PNG and as SVG")
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
