"""What the benchmarks share: data, scores, arguments, the plain Hugging Face twin, tables."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import quantile_test
from transformers import AutoModelForCausalLM

import kp_core
from benchmarks import models
from kp_core.engines.hf.loading import best_dtype

__all__ = [
    "INSTRUCTION",
    "Example",
    "Paragraph",
    "Twin",
    "argument_parser",
    "contains",
    "data_folder",
    "exact_match",
    "f1",
    "first_line",
    "load_engine",
    "mean",
    "median_ratio",
    "model_path",
    "normalise",
    "perplexity",
    "prompt",
    "read_examples",
    "read_passages",
    "reset",
    "same_bits",
    "scratch",
    "show_table",
    "write_json",
]

INSTRUCTION = "Answer the question with a few words, using the facts."
"""Stands before every question, whatever the knowledge comes as."""

_NAMES = ", ".join(models.MODELS)
_WIDTH = 120  # Of tables that go to a file.
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of knowledge; `is_supporting` when the answer needs it."""

    title: str
    text: str
    is_supporting: bool = True

    def __str__(self) -> str:
        return f"{self.title}: {self.text}"


@dataclass(frozen=True)
class Example:
    """A HotpotQA question with its answer and paragraphs."""

    question: str
    answer: str
    paragraphs: tuple[Paragraph, ...]


def data_folder() -> Path:
    """Where the data lies: `KP_DATA`, else `../shared/data` beside the repository."""
    return Path(os.environ.get("KP_DATA") or Path(__file__).parents[1] / "../shared/data").resolve()


def argument_parser(description: str | None, data: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes; `data` is the file in `data_folder` to use by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data_folder() / data, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N rows of the data; default: all")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    best = str(best_dtype(torch.device(device))).removeprefix("torch.")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default=best, choices=dtypes, help="default: %(default)s, the best of this machine")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument(
        "--model",
        help=f"Hugging Face id, folder, or {', '.join(models.MODELS)}; default: the bundled SmolLM2-135M-Instruct",
    )
    parser.add_argument("--device", default=device, help="default: %(default)s")
    return parser


def read_examples(path: Path, limit: int | None = None) -> list[Example]:
    """The HotpotQA questions of a JSON-lines file, with `gold_facts` or with `paragraphs`.

    Raises `ValueError` for a row that has neither.
    """
    examples = []
    for row in _rows(path, limit):
        if "gold_facts" in row:
            found = tuple(Paragraph(fact["title"], fact["text"].strip()) for fact in row["gold_facts"])
        elif "paragraphs" in row:
            supporting = set(row.get("supporting_titles", ()))
            found = tuple(
                Paragraph(part["title"], "".join(part["sentences"]).strip(), part["title"] in supporting)
                for part in row["paragraphs"]
            )
        else:
            raise ValueError(f"{path}: got a row with {sorted(row)}; expected 'gold_facts' or 'paragraphs'.")
        examples.append(Example(row["question"], row["answer"], found))
    return examples


def read_passages(path: Path, limit: int | None = None) -> list[Paragraph]:
    """The passages of any JSON-lines file with `text` (and `title`), or all paragraphs of a HotpotQA file."""
    rows = _rows(path, limit)
    if rows and "text" not in rows[0]:
        return [paragraph for example in read_examples(path, limit) for paragraph in example.paragraphs]
    return [Paragraph(row.get("title", "Note"), row["text"]) for row in rows]


def _rows(path: Path, limit: int | None) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return rows if limit is None else rows[:limit]


def first_line(text: str) -> str:
    """The answer in what a model said: its first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def normalise(answer: str) -> str:
    """As SQuAD and HotpotQA normalise: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(said: str, expected: str) -> bool:
    """Whether the two are the same answer once normalised."""
    return normalise(said) == normalise(expected)


def contains(said: str, expected: str) -> bool:
    """Whether the normalised answer stands somewhere in what was said, as whole words; lenient, and no exact match."""
    return f" {normalise(expected)} " in f" {normalise(said)} "


def f1(said: str, expected: str) -> float:
    """F1 of the words that the normalised answers share; as in HotpotQA, yes and no are right or wrong, not partly."""
    mine, theirs = normalise(said), normalise(expected)
    if mine != theirs and {mine, theirs} & {"yes", "no", "noanswer"}:
        return 0.0
    shared = (Counter(mine.split()) & Counter(theirs.split())).total()
    if not shared:
        return float(mine == theirs)
    precision, recall = shared / len(mine.split()), shared / len(theirs.split())
    return 2 * precision * recall / (precision + recall)


def median_ratio(dividends: Sequence[float], divisors: Sequence[float]) -> dict[str, float | None]:
    """The median `ratio` of pairs, and its 95 % interval by order statistics, `low` to `high` (none below 6 pairs)."""
    ratios = [dividend / divisor for dividend, divisor in zip(dividends, divisors, strict=True)]
    interval = quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)
    low, high = (None if math.isnan(bound) else float(bound) for bound in interval)
    return {"ratio": statistics.median(ratios), "low": low, "high": high}


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def model_path(arguments: argparse.Namespace) -> str:
    """The model asked for, or the bundled one; a name of `benchmarks.models` is fetched first.

    Ends the process with one line where it cannot be had.
    """
    if arguments.model not in models.MODELS:
        return str(arguments.model or kp_core.bundled_model())
    try:
        return str(models.model_folder(arguments.model))
    except models.ModelMissingError as error:
        sys.exit(f"Left out {arguments.model}: {error}")


def load_engine(arguments: argparse.Namespace) -> kp_core.Session:
    """The engine that the arguments ask for."""
    return kp_core.load_engine(model_path(arguments), dtype=arguments.dtype, device=arguments.device)


@contextmanager
def scratch(engine: kp_core.Session) -> Iterator[str]:
    """A folder for packs, which goes when `engine` has written to it what it kept of the answers."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield folder
        finally:
            engine.when_idle(lambda: None).result()


def prompt(documents: Iterable[object], question: str) -> str:
    """A question behind documents: texts, or handles of packs."""
    return "\n\n".join((*map(str, documents), f"{INSTRUCTION}\nQuestion: {question}"))


def reset(engine: kp_core.Session) -> None:
    """Leave nothing in memory but the system head."""
    engine.clear_cache()
    engine.prefill("Hello.")


class Twin:
    """The same model in plain transformers: a load of its own, with transformers' default attention."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Any) -> None:  # noqa: ANN401
        dtype = getattr(torch, arguments.dtype)
        loaded = AutoModelForCausalLM.from_pretrained(model_path(arguments), dtype=dtype, trust_remote_code=False)
        self.model, self.tokenizer = loaded.to(arguments.device).eval(), tokenizer
        ends = self.model.generation_config.eos_token_id
        self.end_tokens = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def generate(self, batch: Sequence[Sequence[int]], max_new_tokens: int) -> list[tuple[int, ...]]:
        """Greedy answers to prompts of token ids, without their end of turn; shorter prompts are padded on the left."""
        longest = max(map(len, batch))
        filler = min(self.end_tokens, default=0)
        ids = torch.tensor([[filler] * (longest - len(row)) + list(row) for row in batch], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch], device=self.model.device)
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=filler,
                eos_token_id=sorted(self.end_tokens) or None,
            )
        return [self.without_end(row[longest:].tolist()) for row in output]

    def without_end(self, ids: Sequence[int]) -> tuple[int, ...]:
        """`ids` up to the first end-of-turn token."""
        return tuple(ids[: next((at for at, token in enumerate(ids) if token in self.end_tokens), len(ids))])


def perplexity(engine: Any, messages: Any, answer: str, **options: Any) -> float:  # noqa: ANN401 - as of `generate`
    """Perplexity per token of `answer` to a conversation; 1.0 without tokens."""
    if not isinstance(engine, kp_core.Session):  # It remembers what an engine said.
        return float(engine.perplexity(messages, answer, **options))
    tokens = tuple(engine.tokenizer.encode(answer, add_special_tokens=False))
    if not tokens:
        return 1.0
    return math.exp(-engine.log_likelihoods([messages], answer, **options)[0] / len(tokens))


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether both are there and equal in value and shape."""
    return left is not None and right is not None and torch.equal(left, right)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], notes: Sequence[str] = ()) -> None:
    """Print a table, numbers to the right, with notes below."""
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(f"\n{title}", style="bold", highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write the figures, when a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
