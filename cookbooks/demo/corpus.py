"""The facts and questions that the demo runs on, and what counts as a right answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kp_core import Fact
from kp_core.errors import KnowledgePackError

__all__ = ["Corpus", "CorpusError", "Question", "load_corpus"]

_BUNDLED = Path(__file__).parent


class CorpusError(KnowledgePackError, ValueError):
    """A file that holds no questions."""


@dataclass(frozen=True)
class Question:
    """A question, and the answers that count as right."""

    text: str
    answers: tuple[str, ...]

    def is_answered_by(self, reply: str) -> bool:
        """Whether `reply` contains one of the answers as whole words, in any case."""
        return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) for answer in self.answers)


@dataclass(frozen=True)
class Corpus:
    """What is known, and what is asked about it."""

    name: str
    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]


def load_corpus(data: Path | None, limit: int) -> Corpus:
    """The corpus that ships with the demo, or HotpotQA's gold facts in the file `data`, with `limit` of its questions.

    Raises `CorpusError` when `data` cannot be read as questions with their `gold_facts`.
    """
    if data is None:
        facts = [
            Fact(row["text"], title=row["title"], source="Orrelay Isles", id=row["id"])
            for row in _read(_BUNDLED / "facts.jsonl")
        ]
        questions = [
            Question(row["question"], (row["answer"], *row["aliases"])) for row in _read(_BUNDLED / "questions.jsonl")
        ]
        return Corpus("the Orrelay Isles, an invented world", tuple(facts), tuple(_spread(questions, limit)))
    try:
        rows = _read(data)
        questions = [Question(row["question"], (row["answer"],)) for row in rows]
        texts = {fact["text"]: fact["title"] for row in rows for fact in row["gold_facts"]}
        facts = [Fact(text, title=title, source="HotpotQA") for text, title in texts.items() if text.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"Cannot read questions from {data}: {type(error).__name__}: {error}. Expected a JSON object per line, "
            "with question, answer and gold_facts (a list of title and text)."
        ) from error
    return Corpus("HotpotQA", tuple(facts), tuple(questions[:limit]))


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise ValueError("the file is empty")
    return rows


def _spread(questions: list[Question], limit: int) -> Iterable[Question]:
    """`limit` of the questions, evenly spread, so that few of them are of all kinds."""
    count = min(limit, len(questions))
    return (questions[number * len(questions) // count] for number in range(count))
