"""Typed questions about a state: how one is written, and what the logits behind it say of its labels."""

from __future__ import annotations

import math
import string
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kp_core.errors import ModelError, OptionError, PromptError, UnsupportedRequestError
from kp_core.plan.plan import Plan, Region
from kp_core.prompt.conversation import GAP, Message, texts_of
from kp_core.session.reading import Usage

Rotations: TypeAlias = int | Literal["all"]
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


@dataclass(frozen=True)
class Question:
    """Something to decide about a state: what is asked, and the labels to choose from, in their order.

    `labels` are names, or a mapping of names to descriptions (empty for none). Raises `OptionError` for no text, for no
    labels or more than 52, for labels that are blank or equal, and for descriptions that are no text.
    """

    instructions: str
    labels: Sequence[str] | Mapping[str, str] = ("yes", "no")

    def __post_init__(self) -> None:
        labels: object = self.labels
        if not isinstance(self.instructions, str) or not self.instructions.strip():
            raise OptionError(f"Got the instructions {self.instructions!r}; expected the text of a question.")
        if isinstance(labels, str) or not isinstance(labels, Sequence | Mapping):
            raise OptionError(f"Got labels={labels!r}; expected a list of names, or a mapping to descriptions.")
        names = [*self.labels]
        if not 0 < len(names) <= len(_LETTERS):
            raise OptionError(f"Got {len(names)} labels for {self.instructions!r}; expected 1 to {len(_LETTERS)}.")
        for name in names:
            if not isinstance(name, str) or not name.strip() or names.count(name) > 1:
                raise OptionError(f"Got the label {name!r} in {names}; expected different names that are not blank.")
            if name.encode(errors="ignore").decode() != name:
                raise OptionError(f"Got the label {name!r}, which is not Unicode. Decode it with errors='replace'.")
            if isinstance(labels, Mapping) and not isinstance(labels[name] or "", str):
                raise OptionError(f"Got the description {labels[name]!r} of {name!r}; expected a string.")

    def decided(self, shares: Sequence[Tensor]) -> Decision:
        """The answer, from the probabilities of the labels in each rotation."""
        mean = torch.stack([*shares]).mean(0)
        return Decision(dict(zip(self.labels, (mean / mean.sum()).tolist(), strict=True)))


@dataclass(frozen=True)
class Decision:
    """The answer to a question: the probability of each label, in their order; they sum to 1."""

    probabilities: Mapping[str, float]

    @property
    def label(self) -> str:
        """The likeliest label."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of the likeliest label."""
        return self.probabilities[self.label]

    @property
    def score(self) -> float:
        """The expected place of the label, from 0: for labels that are levels in ascending order."""
        return sum(level * share for level, share in enumerate(self.probabilities.values()))


@dataclass(frozen=True)
class Decisions:
    """The answers by the names of their questions, and what they cost.

    `usage` is the sum over all questions and rotations: what they share counts for each, and is reused by all but one.
    """

    answers: Mapping[Any, Decision]
    usage: Usage


@dataclass(frozen=True)
class Ballot:
    """One writing of a question: its text, with the labels from place `turn` on first, and the tokens of each label."""

    key: Hashable
    text: str
    tokens: Sequence[frozenset[int]] = field(repr=False)
    turn: int

    def shares(self, logits: Tensor) -> Tensor:
        """The probability of each label, in their order in the question, from the logits behind the text.

        Raises `ModelError` for logits that are not numbers.
        """
        scores = torch.stack([logits[list(ids)].double().logsumexp(0) for ids in self.tokens]).cpu()
        if not (shares := scores.softmax(0).roll(self.turn)).isfinite().all():
            raise ModelError(f"The logits behind the question {self.key!r} are not finite, so they decide nothing.")
        return shares


def ballots_of(questions: Mapping[Any, Question], rotations: Rotations, tokenizer: Any) -> Iterator[Ballot]:  # noqa: ANN401
    """The writings of all questions: `rotations` of each, or as many as it has labels. Raises `OptionError`."""
    if rotations != "all" and (not isinstance(rotations, int) or isinstance(rotations, bool) or rotations < 1):
        raise OptionError(f"Got rotations={rotations!r}; expected an integer >= 1, or 'all'.")
    if not isinstance(questions, Mapping) or not questions:
        raise OptionError(f"Got the questions {questions!r}; expected a mapping of names to at least one `Question`.")
    tokens_of = cache(partial(_tokens, tokenizer=tokenizer))  # Questions often have the same labels.
    for key, question in questions.items():
        if not isinstance(question, Question):
            raise OptionError(f"Got the question {question!r} under {key!r}; expected a `kp_core.Question`.")
        labels = [*question.labels]
        described = question.labels if isinstance(question.labels, Mapping) else dict.fromkeys(labels, "")
        count = len(labels) if rotations == "all" else min(rotations, len(labels))
        words = {label: tokens_of(label, label[0].upper() + label[1:]) for label in labels}
        # Each label stands for itself if one token says which it is, else a letter stands for it.
        is_said = all(words.values()) and len(set().union(*words.values())) == sum(map(len, words.values()))
        for turn in (number * len(labels) // count for number in range(count)):
            turned = labels[turn:] + labels[:turn]
            names = turned if is_said else _LETTERS[: len(labels)]
            tokens = [words[name] if is_said else tokens_of(name) for name in names]
            if not all(tokens):
                raise UnsupportedRequestError("This tokenizer has no tokens for single letters, so it decides nothing.")
            lines = [
                ": ".join(filter(None, (name, None if is_said else label, described[label])))
                for name, label in zip(names, turned, strict=True)
            ]
            listed = [] if is_said and not any(described.values()) else ["\n".join(lines)]
            choice = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            text = GAP.join([question.instructions, *listed, f"Answer with {choice}, and nothing else."])
            yield Ballot(key, text, tokens, turn)


def continued(plan: Plan, tokens: Sequence[int]) -> list[Plan]:
    """A plan for each of `tokens`, with the prompt of `plan` and the tokens before it."""
    length = len(plan.prompt)
    return [
        replace(
            plan,
            prompt=replace(plan.prompt, token_ids=(*plan.prompt.token_ids, *tokens[:at])),
            regions=(*plan.regions, Region(length, length + at, "computed")) if at else plan.regions,
        )
        for at in range(len(tokens))
    ]


def log_probability(logits: Tensor, token: int) -> float:
    """Of a token, from logits as `Branches.branch` gives them. Raises `ModelError` if it is no number."""
    said = logits.double()
    value = float((said if said.isnan().any() else said.log_softmax(-1))[token])
    if math.isnan(value):
        raise ModelError(f"The logits of token {token} are not finite, so they say nothing of its probability.")
    return value


def _tokens(*writings: str, tokenizer: Any) -> frozenset[int]:  # noqa: ANN401
    """The tokens that are one of `writings`, with or without a blank before it. Empty if there is none.

    In prompts the text of a special token is plain text, so none of those.
    """
    encoded = (tokenizer.encode(blank + text, add_special_tokens=False) for text in writings for blank in ("", " "))
    return frozenset(ids[0] for ids in encoded if len(ids) == 1 and ids[0] not in tokenizer.added_tokens_decoder)


def asked_behind(state: Sequence[Message] | str, text: str) -> Sequence[Message]:
    """The conversation `state` with a question at the end of its last user message, or in a new one."""
    if not isinstance(state, Iterable):
        raise PromptError(f"Got the state {state!r}; expected a string or messages.")
    messages = [{"role": "user", "content": state}] if isinstance(state, str) else [*state]
    if messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "user":
        *messages, last = messages
        said = texts_of(last)
        return [*messages, {**last, "content": [*said, GAP + text] if any(said) else text}]
    return [*messages, {"role": "user", "content": text}]
