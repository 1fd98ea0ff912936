"""Answers held to a grammar, and brought to an end within their budget (llguidance)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kp_core.errors import MissingDependencyError, SamplingError, ToolError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Constraint", "Grammars"]

_KEPT = 64  # Compiled grammars that are kept.
_FAR = 4096  # Tokens after which looking for an end is given up.


class Grammars:
    """Compiles grammars for one tokenizer.

    `vocabulary` is the length of the model's logits, `end_tokens` what may end an answer. Raises
    `MissingDependencyError` without llguidance.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: frozenset[int] | set[int]) -> None:  # noqa: ANN401
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(end_tokens)
        self._lock = threading.Lock()
        self._llm: Any = None
        self._compiled: dict[str, LLMatcher] = {}
        self._ranks: tuple[Tensor, Tensor] | None = None

    def constraint(self, grammar: str, trigger: str, room: int) -> Constraint:
        """A fresh constraint to `grammar`; raises `ToolError` for a schema that it cannot express.

        `trigger` opens the part that must be well-formed, in answers that begin with free text. Raises `SamplingError`
        when no answer of the grammar fits into `room` tokens.
        """
        with self._lock:
            matcher = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = matcher
            while len(self._compiled) > _KEPT:
                del self._compiled[next(iter(self._compiled))]
            return Constraint(matcher.deep_copy(), self._text, self._preferences(), trigger, self._ends[0], room)

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingDependencyError(
                "Tools and response schemas need llguidance, which is not installed: "
                "pip install 'knowledge-packs[tools]'"
            ) from error
        if self._llm is None:
            self._llm = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._llm)
        if failed:
            reason = messages[0].splitlines()[0] if messages else "unknown reason"
            raise ToolError(
                f"Got a JSON Schema that cannot be enforced ({reason}). Rewrite that part of the schema of the tool or "
                "of the answer with types, enums, properties, items, anyOf and $ref."
            )
        return LLMatcher(self._llm, grammar)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._llm.decode_str(list(tokens)))

    def _preferences(self) -> tuple[Tensor, Tensor]:
        """How well each token leads to an end: inside of a JSON string, and outside."""
        if self._ranks is None:
            known = len(self._tokenizer)
            texts = [self._text([token]) if token < known else "" for token in range(self._vocabulary)]
            inside, outside = ([rank(text) for text in texts] for rank in (_rank_inside, _rank_outside))
            self._ranks = torch.tensor(inside, dtype=torch.int32), torch.tensor(outside, dtype=torch.int32)
        return self._ranks


class Constraint:
    """Which tokens may come next, for one answer."""

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        matcher: LLMatcher,
        text: Callable[[Sequence[int]], str],
        ranks: tuple[Tensor, Tensor],
        trigger: str,
        end: int,
        room: int,
    ) -> None:
        self._matcher, self._text, self._ranks, self._trigger, self._end = matcher, text, ranks, trigger, end
        self._tokens: list[int] = []
        way = self._search(matcher, self._tokens)
        if way is not None and len(way) > room:
            raise SamplingError(
                f"Got room for {room} tokens; an answer of this schema takes about {len(way)} at least. Raise "
                "max_tokens."
            )
        self._way, self._closing = way, False

    def mask(self, scores: Tensor) -> Tensor:
        """`scores` of shape `(1, vocabulary)` with minus infinity where the grammar forbids the token."""
        allowed = _allowed(self._matcher, scores.shape[-1]).to(scores.device)
        return scores.masked_fill(~allowed, float("-inf"))

    def accept(self, token: int, left: int) -> int:
        """`token`, or the one to take in its place so that the answer ends within `left` tokens, this one included."""
        if not self._closing and token != self._end:
            ahead = self._matcher.deep_copy()
            ahead.consume_token(token)
            way = self._way_from(ahead, token)
            # A step is taken only when an end can still be reached behind it.
            self._closing = self._way is not None and (way is None or len(way) > left - 1)
            if not self._closing:
                self._way = way
        if self._closing:
            token, *self._way = self._way or [self._end]
        self._matcher.consume_token(token)
        self._tokens.append(token)
        return token

    def _way_from(self, ahead: LLMatcher, token: int) -> list[int] | None:
        """A way out behind `token`: what is left of the known one, the known one, or else a new one."""
        if ahead.is_accepting():
            return []
        for known in [] if self._way is None else [self._way[1:]] if self._way[:1] == [token] else [self._way]:
            trial = ahead.deep_copy()
            if trial.try_consume_tokens(known) == len(known) and trial.is_accepting():
                return known
        return self._search(ahead, [*self._tokens, token])

    def _search(self, matcher: LLMatcher, tokens: Sequence[int]) -> list[int] | None:
        """A short way to a complete answer, by the token that closes most at every step; `None` when none was found."""
        ahead, way = matcher.deep_copy(), list[int]()
        written = self._text(tokens)
        written = written[written.rfind(self._trigger) :] if self._trigger else written
        while not ahead.is_accepting():
            if ahead.is_stopped() or len(way) > _FAR:
                return None
            step = ahead.compute_ff_tokens()
            if not step:
                rank = self._ranks[0 if _in_string(written) else 1]
                allowed = _allowed(ahead, len(rank))
                step = [int(torch.where(allowed, rank, -1).argmax())]
            if ahead.try_consume_tokens(step) < len(step):
                return None
            way += step
            written += self._text(step)
        return way


def _allowed(matcher: LLMatcher, vocabulary: int) -> Tensor:
    """Which tokens may come next, `(vocabulary,)`."""
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    return ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten()[:vocabulary]


def _in_string(written: str) -> bool:
    inside = escaped = False
    for sign in written:
        if escaped:
            escaped = False
        elif sign == "\\":
            escaped = inside
        elif sign == '"':
            inside = not inside
    return inside


def _rank_inside(text: str) -> int:
    """Inside a string: end it; else say something short."""
    if text.startswith('"') and not text.strip('"}] \n'):
        return 100 + len(text)
    return _RANK_WORD if text.isalnum() and text.isascii() else 1 if text else 0


def _rank_outside(text: str) -> int:
    """Outside of strings: close what is open; else take what needs least after it."""
    core = text.strip()
    if core and not core.strip("}]"):
        return 100 + len(core)
    return _OUTSIDE.get(core, _RANK_WORD if core.isalnum() else 2 if core else 1)


_RANK_WORD = 10
_OUTSIDE: Mapping[str, int] = {
    "{}": 95, "[]": 95, '""': 94, "null": 90, "true": 80, "false": 80, **{str(digit): 85 for digit in range(10)},
    '"': 70, "[": 60, "{": 50, ",": 5,
}  # fmt: skip
