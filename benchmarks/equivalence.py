"""Is the answer from a pack the answer from text? HotpotQA questions with their gold facts, greedy answers.

All gold facts of a question make one pack, stored in a `PackStore` and delivered by its handle at the start of the
user message. Before each answer from a pack the engine's cache is cleared, so that the KV comes out of the store; the
run stops with an error when a single pack token was computed instead of reused.

Conditions:

- none: instruction and question only.
- text: the pack's prompt on this engine with nothing cached (`reuse=False`).
- pack: the same prompt, the pack's KV from the store.
- hf: the same token ids through plain `model.generate`, default attention, a model loaded apart from the engine.
- raw: the same text without the chat template, through plain `model.generate`.
- split: facts and question rendered in two template calls, so that a second default system header stands between
  them, through plain `model.generate`.

`none`, `raw` and `split` are only scored. Scores: the first line that is not blank,
normalised as SQuAD and HotpotQA do, against the gold answer, equal (EM) or by words shared (F1). The table shows
besides how often the first line at least contains the gold answer, which is no exact match. Outputs are compared as
token ids up to the end of turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import track

from benchmarks import common
from kp_core import Message, PackStore, Session

__all__ = ["main", "run"]

_CONDITIONS = ("none", "text", "pack", "raw", "split")
_BATCH = 1  # Padded batches are slower than one prompt after another on a CPU, and round otherwise in bfloat16.


@dataclass
class _Outcome:
    """What was said to one question, and how pack compares with the others."""

    said: dict[str, str] = field(default_factory=dict)
    pack_is_text: bool = False
    pack_is_hf: bool = False
    same_logits: bool = False


def question_text(question: str) -> str:
    """What is asked, below the facts."""
    return f"{common.INSTRUCTION}\nQuestion: {question}"


def split_prompt(engine: Session, facts: str, question: str) -> str:
    """The facts' user message as one template call renders it, then the question's as a second call does."""
    turns: list[list[Message]] = [[{"role": "user", "content": facts}], [{"role": "user", "content": question}]]
    parts = [engine.template.render(turn, add_generation_prompt=turn is turns[-1]) for turn in turns]
    return "".join(engine.template.text(part) for part in parts)


def compare(engine: Session, twin: common.Twin, store: PackStore, example: common.Example, tokens: int) -> _Outcome:
    """Text, pack and plain Hugging Face on one question.

    Raises `RuntimeError` when the handle's prompt is not the text's, or when the stored KV was not reused.
    """
    facts, ask = _facts(example), question_text(example.question)
    handle, view = store.put(engine.build_pack(facts)), store.view("default")
    said = f"{handle}\n\n{ask}"
    text = engine.generate(said, view=view, reuse=False, max_tokens=tokens)
    engine.clear_cache()
    pack = engine.generate(said, view=view, max_tokens=tokens)
    if not pack.usage.reused_tokens >= pack.usage.pack_tokens > 0 or text.usage.reused_tokens:
        raise RuntimeError(
            f"{example.question}: expected the pack to be reused when warm and computed when cold, got "
            f"{pack.usage} and {text.usage}."
        )
    if engine.template.render(f"{facts}\n\n{ask}").token_ids != pack.prompt.token_ids:
        raise RuntimeError(f"{example.question}: the prompt with the handle is not the prompt with the text.")
    plain = twin.generate([pack.prompt.token_ids], tokens)[0]
    packed = twin.without_end(pack.token_ids)
    return _Outcome(
        {"text": text.text, "pack": pack.text},
        pack_is_text=packed == twin.without_end(text.token_ids),
        pack_is_hf=packed == plain,
        same_logits=common.same_bits(pack.first_logits, text.first_logits),
    )


def answer_batches(
    engine: Session, twin: common.Twin, examples: Sequence[common.Example], outcomes: Sequence[_Outcome], tokens: int
) -> None:
    """The conditions that are only scored: prompts of similar length together."""
    jobs: list[tuple[_Outcome, str, list[int]]] = []
    for example, outcome in zip(examples, outcomes, strict=True):
        facts, ask = _facts(example), question_text(example.question)
        jobs.append((outcome, "none", list(engine.template.render(ask).token_ids)))
        jobs.append((outcome, "raw", _encode(twin, f"{facts}\n\n{ask}", special=True)))
        jobs.append((outcome, "split", _encode(twin, split_prompt(engine, facts, ask), special=False)))
    jobs.sort(key=lambda job: len(job[2]))
    batches = [jobs[at : at + _BATCH] for at in range(0, len(jobs), _BATCH)]
    for batch in track(batches, "None, raw and split"):
        answers = twin.generate([ids for _, _, ids in batch], tokens)
        for (outcome, condition, _), answer in zip(batch, answers, strict=True):
            outcome.said[condition] = twin.tokenizer.decode(answer, skip_special_tokens=True)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float | None]]:
    """The figures, as the JSON file holds them, and strict EM beside them."""
    examples = common.read_examples(arguments.data, arguments.limit)
    engine = common.load_engine(arguments)
    twin = common.Twin(arguments, engine.tokenizer)
    with common.scratch(engine) as folder:
        store = PackStore(folder)
        outcomes = [
            compare(engine, twin, store, example, arguments.tokens)
            for example in track(examples, "Text, pack and plain Hugging Face")
        ]
    if not arguments.compare_only:
        answer_batches(engine, twin, examples, outcomes, arguments.tokens)
    pairs = list(zip(examples, outcomes, strict=True))

    def scored(score: Callable[[str, str], float]) -> dict[str, float | None]:
        return {
            name: common.mean(
                score(common.first_line(outcome.said[name]), example.answer) for example, outcome in pairs
            )
            if name in outcomes[0].said
            else None
            for name in _CONDITIONS
        }

    return {
        "n": len(examples),
        "dtype": arguments.dtype,
        "em": scored(common.contains),
        "f1": scored(common.f1),
        "differ": {
            "pack_text": sum(not outcome.pack_is_text for outcome in outcomes),
            "pack_hf": sum(not outcome.pack_is_hf for outcome in outcomes),
        },
        "bit_identical": sum(outcome.same_logits for outcome in outcomes),
    }, scored(common.exact_match)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print the table, write the JSON file."""
    parser = common.argument_parser(__doc__, "hotpotqa_gold.jsonl")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="most tokens of an answer; default: 24")
    parser.add_argument(
        "--compare-only", action="store_true", help="only what is compared: text, pack and plain Hugging Face"
    )
    arguments = parser.parse_args(argv)
    figures, strict = run(arguments)
    n = figures["n"]
    common.show_table(
        f"Equivalence: {n} questions, {figures['dtype']}",
        ("condition", "EM", "EM, strict", "F1"),
        [
            (name, *(f"{scores[name]:.1%}" for scores in (figures["em"], strict, figures["f1"])))
            for name in _CONDITIONS
            if figures["em"][name] is not None
        ],
        (
            f"Outputs where pack differs from text on this engine: {figures['differ']['pack_text']} of {n}",
            f"Outputs where pack differs from plain model.generate: {figures['differ']['pack_hf']} of {n}",
            f"First logits of pack and text bit-identical: {figures['bit_identical']} of {n}",
        ),
    )
    common.write_json(arguments.json, figures)
    return figures


def _facts(example: common.Example) -> str:
    return "\n".join(map(str, example.paragraphs))


def _encode(twin: common.Twin, text: str, *, special: bool) -> list[int]:
    return list(twin.tokenizer.encode(text, add_special_tokens=special))


if __name__ == "__main__":
    main()
