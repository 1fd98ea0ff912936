"""Constrains answers to a grammar, and makes them end within their token budget (llguidance)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kp_core.bundled import needing
from kp_core.errors import SamplingError, ToolError
from kp_core.tools import JsonScan

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Constraint", "Grammars"]

_KEPT = 64  # Compiled grammars in the cache.
_FEW = 200  # Top-ranked tokens, enough to write nearly every string.
_SPARE = 256  # The search for an end goes this many tokens beyond the room, so that errors can say how many it takes.
_THOUGHT, _THOUGHT_END = "<think>", "</think>"


class Grammars:
    """Compiles grammars for one tokenizer.

    `vocabulary` is the length of the model's logits; `end_tokens` are the tokens that may end an answer. Raises
    `MissingDependencyError` without llguidance.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: frozenset[int] | set[int]) -> None:  # noqa: ANN401
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(end_tokens)
        self._lock = threading.Lock()
        self._compiled = lru_cache(_KEPT)(self._compile)

    def constraint(self, grammar: str, room: int, *, opened: bool = False) -> Constraint:
        """A new constraint for `grammar`, for an answer of at most `room` tokens.

        `opened` says that the prompt has begun a `<think>` block. Raises `ToolError` for a schema that cannot be
        enforced, and `SamplingError` when no answer of the grammar fits into `room` tokens.
        """
        with self._lock:
            matcher = self._compiled(grammar).deep_copy()
            return Constraint(self, matcher, room, _THOUGHT if opened else "")

    @cached_property
    def _llm(self) -> Any:  # noqa: ANN401
        with needing("Tools and response schemas need llguidance", "tools"):
            from llguidance.hf import from_tokenizer
        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends)

    def _compile(self, grammar: str) -> LLMatcher:
        llm = self._llm
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, llm)
        if failed:
            reason = messages[0].splitlines()[0] if messages else "unknown reason"
            raise ToolError(
                f"Got a JSON Schema that cannot be enforced ({reason}). Rewrite that part of the schema of the tool or "
                "of the answer with types, enums, properties, items, anyOf and $ref."
            )
        return LLMatcher(llm, grammar)

    @property
    def end(self) -> int:
        """The token with which a constraint ends an answer."""
        return self._ends[0]

    @cached_property
    def thought_end(self) -> list[int]:
        """The tokens that close a `<think>` block."""
        return list(self._llm.tokenize_str(_THOUGHT_END))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        return str(self._llm.decode_str(list(tokens)))

    @cached_property
    def preferred(self) -> tuple[list[int], list[int]]:
        """All tokens in the order in which they lead to an end, best first: inside a JSON string, and outside."""
        texts = [self.text([token]) for token in range(min(len(self._tokenizer), self._vocabulary))]
        inside, outside = (
            sorted(range(len(texts)), key=lambda token: -rank(texts[token])) for rank in (_rank_inside, _rank_outside)
        )
        return inside, outside


class Constraint:
    """Decides which tokens may come next in one answer, of which the prompt has begun to say `said`.

    Raises `ToolError` when the grammar needs text that contains a control token, and `SamplingError` when no complete
    answer fits into `room` tokens.
    """

    def __init__(self, grammars: Grammars, matcher: LLMatcher, room: int, said: str) -> None:
        self._grammars, self._matcher, self._end = grammars, matcher, grammars.end
        self._scan, self._said, self._far = JsonScan(), said, room + _SPARE
        self._unwritable = ""
        ending = self._search(matcher, self._scan, said)
        if self._unwritable:
            raise ToolError(
                f"Got a schema or tool in which something reads like {self._unwritable!r}, a control token of this "
                "model, so the model cannot write it. Give it another name."
            )
        if ending is None or len(ending) > room:
            minimum = f"takes about {len(ending)} at least" if ending else "was not found within that"
            raise SamplingError(
                f"Got room for {room} tokens; a complete answer of this schema {minimum}. Raise max_tokens, or ask for "
                "less: fewer items, shorter strings, nothing that requires itself."
            )
        self._way: list[int] = ending
        self._closing = False

    def mask(self, scores: Tensor) -> Tensor:
        """`scores`, `(1, vocabulary)`, with minus infinity for the tokens that the grammar forbids."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten()[: scores.shape[-1]]
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def accept(self, token: int, left: int) -> int:
        """Take the next token and return it: `token` if the answer can still end in time, else one of a known ending.

        `left` is how many tokens may still come, this one included.
        """
        if not self._closing and token != self._end:
            lookahead = self._matcher.deep_copy()
            lookahead.consume_token(token)
            ending = self._way_from(lookahead, token)
            # The token is accepted only if the answer can still end in time after it.
            if ending is None or len(ending) > left - 1:
                self._closing = True
            else:
                self._way = ending
        if self._closing:
            token, *self._way = self._way or [self._end]
        # Quotes open no JSON string in free text, where the answer may end anywhere, nor in thoughts.
        self._scan = JsonScan() if self._matcher.is_accepting() or _is_thinking(self._said) else self._scan
        self._matcher.consume_token(token)
        text = self._grammars.text([token])
        self._scan, self._said = self._scan.feed(text), _and_said(self._said, text)
        return token

    def _way_from(self, ahead: LLMatcher, token: int) -> list[int] | None:
        """Tokens that end the answer after `token`: the rest of the known ending, all of it, or a new one."""
        if ahead.is_accepting():
            return []
        for ending in [self._way[1:]] if self._way[:1] == [token] else [self._way]:
            trial = ahead.deep_copy()
            if trial.try_consume_tokens(ending) == len(ending) and trial.is_accepting():
                return ending
        text = self._grammars.text([token])
        return self._search(ahead, self._scan.feed(text), _and_said(self._said, text))

    def _search(self, matcher: LLMatcher, scan: JsonScan, said: str) -> list[int] | None:
        """A short ending of the answer: at every step the allowed token that closes most. `None` if none is found."""
        lookahead, ending = matcher.deep_copy(), list[int]()
        uses: Counter[int] = Counter()
        while not lookahead.is_accepting():
            if lookahead.is_stopped() or len(ending) > self._far:
                return None
            step = list(self._grammars.thought_end) if _is_thinking(said) else lookahead.compute_ff_tokens()
            if not step:
                mask = lookahead.compute_bitmask()
                ranked = self._grammars.preferred[0 if scan.inside else 1]
                # One of the first few is nearly always allowed. Tokens that this string has already come last, so that
                # a string whose pattern needs an "@" gets one.
                chosen = next((token for token in ranked if mask[token >> 3] >> (token & 7) & 1), self._end)
                if uses[chosen]:
                    choices = [token for token in ranked[:_FEW] if mask[token >> 3] >> (token & 7) & 1]
                    chosen = min(choices, key=lambda token: uses[token], default=chosen)
                uses[chosen] += scan.inside
                step = [chosen]
            if (accepted := lookahead.try_consume_tokens(step)) < len(step):
                self._unwritable = "" if lookahead.get_error() else self._grammars.text([step[accepted]])
                return None
            ending += step
            text = self._grammars.text(step)
            was_inside = scan.inside
            scan, said = JsonScan() if _is_thinking(said) else scan.feed(text), _and_said(said, text)
            if was_inside and not scan.inside:  # The next string may use the same tokens again.
                uses.clear()
        return ending


def _is_thinking(said: str) -> bool:
    """Whether the answer so far is an open `<think>` block."""
    return said.startswith(_THOUGHT) and _THOUGHT_END not in said


def _and_said(said: str, text: str) -> str:
    # An answer that does not begin with a thought, or has closed it, needs no more text.
    is_decided = len(said) >= len(_THOUGHT) and not _is_thinking(said)
    return said if is_decided else said + text


def _rank_inside(text: str) -> int:
    """Rank inside a string: tokens that end the string are highest, then short text."""
    if text.startswith('"') and not text.strip('"}] \n'):
        return 100 + len(text)
    if len(text) == 1 and text.isascii() and text.isprintable():
        return 20 if text.isalnum() else 15
    return 1 if text else 0


def _rank_outside(text: str) -> int:
    """Rank outside strings: tokens that close brackets are highest, then those that need the least after them."""
    core = text.strip()
    if core and not core.strip("}]"):
        return 100 + len(core)
    return _OUTSIDE.get(core, _RANK_WORD if core.isalnum() else 2 if core else 1)


_RANK_WORD = 10
_OUTSIDE: Mapping[str, int] = {
    "{}": 95, "[]": 95, '""': 94, "null": 90, "true": 80, "false": 80, **{str(digit): 85 for digit in range(10)},
    '"': 70, "[": 60, "{": 50, ",": 96,
}  # fmt: skip
