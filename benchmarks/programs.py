"""Steering how a model writes code: documented, defensive, and both at once (Knowledge Packs, arXiv 2604.03270, 2.6).

Short functions are asked for, and what is answered is read by `ast`: `documented` and `defensive` as in
`benchmarks.scores`, and whether it is a program at all. Effects are differences to the unsteered answers; those of the
two directions added are compared with what each does alone (table 8). Beside them the same asked for in words.

Answers are greedy. With `--answers` a run that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, plots
from benchmarks.scores import defensive, documented, program
from benchmarks.steered import Bench, share
from benchmarks.steering_range import repetition
from kp_core.steering import preset

__all__ = ["main"]

TASKS = tuple(
    f"Write a Python function that {what}. Give the code alone."
    for what in (
        "gives the largest of a list of numbers",
        "counts the vowels of a string",
        "reverses a list",
        "says whether a number is prime",
        "gives the factorial of a number",
        "converts Celsius to Fahrenheit",
        "gives the average of a list of numbers",
        "removes duplicates from a list",
        "says whether a word is a palindrome",
        "reads the lines of a file",
        "gives the area of a circle",
        "merges two dictionaries",
        "sorts a list of names",
        "gives the sum of the digits of a number",
        "finds the index of an item in a list",
        "divides two numbers",
        "counts the words of a text",
        "gives the first n Fibonacci numbers",
        "flattens a list of lists",
        "gives the greatest common divisor of two numbers",
    )
)
IN_WORDS = {
    "documented": "Document all code with docstrings and comments.",
    "defensive": "Check all input, and raise an error where it is wrong.",
}
SCORES = {"documented": documented, "defensive": defensive}
STRENGTHS = (-0.24, 0.12, 0.24, 0.36)


def measure(bench: Bench, strengths: Sequence[float], composed: float) -> dict[str, Any]:
    """The figures of every way to ask."""
    made = {name: bench.engine.make_steering(preset(f"{name}_code"), progress=False) for name in SCORES}
    directions = {name: direction.at_strength(1.0) for name, direction in made.items()}
    said = {"unsteered": bench.plain}
    for name, direction in directions.items():
        for strength in sorted({*strengths, composed}):
            said[f"{name}, {strength:g}"] = bench.answers(direction * strength)
    first, second = (direction * composed for direction in directions.values())
    said["both"] = bench.answers(first + second)
    for name, words in (*IN_WORDS.items(), ("both", " ".join(IN_WORDS.values()))):
        said[f"{name}, in words"] = bench.answers(system=words)
    rows = {
        way: {
            **{name: bench.effect(texts, score) for name, score in SCORES.items()},
            "programs": common.mean(program(text) is not None for text in texts),
            "repetition": common.mean(map(repetition, texts)),
        }
        for way, texts in said.items()
    }
    singles = {name: rows[f"{name}, {composed:g}"][name] for name in SCORES}
    # Of an effect that goes the wrong way nothing can be kept.
    kept = {name: share(rows["both"][name], alone) for name, alone in singles.items() if alone > 0}
    unsteered = {name: common.mean(map(score, bench.plain)) for name, score in SCORES.items()}
    return {"rows": rows, "kept": kept, "cosine": first.cosine(second), "unsteered": unsteered}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="most tokens of an answer; default: 128")
    parser.add_argument("--questions", type=int, default=len(TASKS), metavar="N", help="functions to ask for")
    parser.add_argument(
        "--strengths", type=float, nargs="+", default=list(STRENGTHS), help="of the cached values' norm"
    )
    parser.add_argument("--composed", type=float, default=0.24, metavar="STRENGTH", help="of each where two are added")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keep answers here, and go on from there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the effects, as PNG and as SVG")
    arguments = parser.parse_args(argv)
    bench = Bench(arguments, TASKS)
    figures = {"questions": len(bench.questions), **measure(bench, arguments.strengths, arguments.composed)}
    common.show_table(
        f"Code: {len(bench.questions)} functions, {arguments.tokens} tokens; effects",
        ("steering, strength", *SCORES, "programs", "repeated"),
        [
            (way, *(row[name] for name in SCORES), f"{row['programs']:.0%}", f"{row['repetition']:.0%}")
            for way, row in figures["rows"].items()
        ],
        (
            "Unsteered: " + ", ".join(f"{name} {value:.3f}" for name, value in figures["unsteered"].items()),
            "Kept by both: " + (", ".join(f"{name} {value:.0%}" for name, value in figures["kept"].items()) or "-"),
            f"Cosine of the two: {figures['cosine']:.3f}",
        ),
    )
    if arguments.plots:
        rows = figures["rows"]
        series = {name: [row[name] for row in rows.values()] for name in SCORES}
        plots.bars(arguments.plots, "steering-code", list(rows), series, "effect")
    common.write_json(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
