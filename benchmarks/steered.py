"""What the sections of `benchmarks.steering` share: the questions, and one engine that remembers its answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from benchmarks import common
from benchmarks.remembered import Remembered
from benchmarks.scores import formality
from benchmarks.steering_range import Calibration, Task, calibrate, likeness
from kp_core import Message, SentenceTransformerEmbedder, Session, Steering
from kp_core.steering import preset

__all__ = ["QUESTIONS", "Bench", "share", "without"]

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
    "What is a volcano?",
    "How do I make tea?",
    "Why do leaves change colour?",
    "What should I pack for a trip?",
    "Tell me about the moon.",
    "How do birds find their way?",
    "What is a library for?",
    "Why should I exercise?",
    "How do I write a letter?",
    "What happens in winter?",
    "What is bread made of?",
    "Why does ice float?",
    "How do I grow tomatoes?",
    "What should I read next?",
    "Tell me about cats.",
    "Why do we dream?",
    "How can I make new friends?",
    "What is money?",
    "What makes a good teacher?",
    "How does a lamp work?",
    "What is a desert?",
    "How do I clean a window?",
    "Why is the sky blue?",
    "What should I wear to a wedding?",
    "Tell me about rivers.",
    "How do bees make honey?",
    "What is a museum for?",
    "Why should I drink water?",
    "How do I plan a party?",
    "What happens in spring?",
    "What is a bridge?",
    "Why do dogs bark?",
    "How do I learn a language?",
    "What should I cook tonight?",
    "Tell me about trains.",
    "Why do we laugh?",
    "How can I wake up early?",
    "What is paint made of?",
    "What makes a good story?",
    "How does a clock work?",
    "What is a forest?",
    "How do I fix a flat tyre?",
    "Why does the wind blow?",
    "What should I give as a present?",
    "Tell me about whales.",
    "How do fish breathe?",
    "What is a school for?",
    "Why should I learn to cook?",
    "How do I choose a phone?",
    "What happens when it rains?",
)


class Bench:
    """One engine, the questions, and what the sections share."""

    def __init__(self, arguments: argparse.Namespace, questions: Sequence[str] = QUESTIONS) -> None:
        self.arguments = arguments
        self.engine: Session = common.load_engine(arguments)
        self.known = Remembered(self.engine, arguments.answers)
        self.questions = questions[: arguments.questions]
        self.formal = self.engine.make_steering(preset("formal"))
        self._embedder = SentenceTransformerEmbedder()

    def answers(self, steering: Steering | None = None, system: str | None = None, **request: Any) -> list[str]:  # noqa: ANN401
        """Greedy answers to the questions."""
        asked, tokens = self._asked(system), self.arguments.tokens
        self.known.ahead(asked, [steering], request.get("scope"), tokens)
        return [
            self.known.generate(messages, steering=steering, max_tokens=tokens, **request).text for messages in asked
        ]

    def _asked(self, system: str | None = None) -> list[list[Message]]:
        head: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return [[*head, {"role": "user", "content": question}] for question in self.questions]

    def effect(self, texts: Sequence[str], score: Callable[[str], float] = formality) -> float:
        """Mean score less that of the unsteered answers."""
        return common.mean(map(score, texts)) - common.mean(map(score, self.plain))

    def likeness(self, name: str) -> Callable[[str], float]:
        """`benchmarks.steering_range` to the pairs of a preset."""
        return likeness(preset(name), self._embedder)

    @cached_property
    def plain(self) -> list[str]:
        """The unsteered answers."""
        return self.answers()

    @cached_property
    def sweep(self) -> Calibration:
        """The alpha sweep."""
        asked, alphas, tokens = self._asked(), self.arguments.alphas, self.arguments.tokens
        self.known.ahead(asked, [None, *(self.formal * alpha for alpha in alphas)], None, tokens)
        tasks = [Task(messages) for messages in asked]
        return calibrate(self.known, self.formal, tasks, formality, alphas=alphas, max_tokens=tokens)

    @cached_property
    def alpha(self) -> float:
        """The alpha to use: asked for, or what the sweep recommends."""
        return self.sweep.recommended if self.arguments.alpha is None else float(self.arguments.alpha)


def share(part: float, whole: float) -> float:
    """What share of `whole` a part is; 0 of nothing."""
    return part / whole if whole else 0.0


def without(steering: Steering, other: Steering) -> Steering:
    """`steering` without its part along `other`."""
    return steering - other * (steering.cosine(other) * _norm(steering) / _norm(other))


def _norm(steering: Steering) -> float:
    return sum(norm**2 for norm in steering.norms.values()) ** 0.5
