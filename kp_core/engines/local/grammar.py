"""Constrains answers to a grammar, and makes them end within their token budget (llguidance)."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kp_core.bundled import needing
from kp_core.errors import OptionError, PromptError
from kp_core.tools import JsonScan
from kp_core.tools.shape import refused_part

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KEPT = 64  # Compiled grammars in the cache.
_FEW = 200  # Top-ranked tokens, enough to write nearly every string.
_SPARE = 256  # The search for an end goes this many tokens beyond the room, so that errors can say how many it takes.
_MARGIN = 32  # With so many tokens to spare, a token may be taken whose ending is not found yet.
_FEW_STATES, _STATES = 3000, 20_000  # Most states of a search: a few hundredths of a second, and a tenth.
# Seconds of this thread that a search may take, and all searches of an answer. Each state stays in memory with the
# grammar, which may only have so many; in most grammars a search takes milliseconds.
_SECONDS, _ALL_SECONDS = 0.5, 3.0
_ZEROS = 24  # Zeros that the search for the end of a number appends.
_LETTERS = 100  # Letters that the search for the end of a string tries in one place.
_FORKS, _FORKS_HERE = 64, 8  # Alternatives that a search tries in all, and in one place.
_DIGITS, _CLOSERS = "0123456789.-", "},]"  # What writes a number, and what may stand behind it.
_PLAIN = "aA0-_.@:/+ "  # Enough for most strings, one of a kind.
_MIN_LENGTH = re.compile(r'"minLength": (\d+)')
_THOUGHT, _THOUGHT_END = "<think>", "</think>"


class Grammars:
    """Compiles grammars for one tokenizer.

    `vocabulary` is the length of the model's logits; `end_tokens` are the tokens that may end an answer. Raises
    `MissingDependencyError` without llguidance.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: frozenset[int] | set[int]) -> None:  # noqa: ANN401
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(end_tokens)
        self.end = min(end_tokens, default=0)
        """The token with which a constraint ends an answer."""
        self._lock = threading.Lock()
        self._compiled = lru_cache(_KEPT)(self._compile)

    def constraint(self, grammar: str, room: int, *, opened: bool = False) -> Constraint:
        """A new constraint for `grammar`, for an answer of at most `room` tokens.

        `opened` says that the prompt has begun a `<think>` block. Raises `PromptError` for a schema that cannot be
        enforced, and `OptionError` when no answer of the grammar fits into `room` tokens.
        """
        with self._lock:
            matcher = self._compiled(grammar).deep_copy()
            return Constraint(self, matcher, room, _THOUGHT if opened else "", grammar)

    @cached_property
    def _llm(self) -> Any:  # noqa: ANN401
        with needing("Tools and response schemas need llguidance", "tools"):
            from llguidance import LLTokenizer
            from llguidance.hf import from_tokenizer
        form: dict[str, Any] = {"n_vocab": self._vocabulary, "eos_token": self._ends}
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # `from_tokenizer` copies the tokenizer to drop these settings, which takes a quarter of its time.
        if backend is None or backend.padding or backend.truncation:
            return from_tokenizer(self._tokenizer, **form)
        return LLTokenizer(backend.to_str(), **form)

    def _compile(self, grammar: str) -> LLMatcher:
        llm = self._llm
        from llguidance import LLMatcher

        def fault(grammar: str) -> str:
            failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, llm)
            return (messages or ["unknown reason"])[0].splitlines()[0] if failed else ""

        if reason := fault(grammar):
            where = refused_part(grammar, lambda part: not fault(part))
            reason = re.sub(r"^at [\d()]+: ", "", reason)
            raise PromptError(
                f"Got a JSON Schema that cannot be enforced{where and ' ' + where} ({reason}). Rewrite that part of "
                "the schema of the tool or of the answer with types, enums, properties, items, anyOf and $ref."
            )
        return LLMatcher(llm, grammar)

    @cached_property
    def thought_end(self) -> list[int]:
        """The tokens that close a `<think>` block."""
        return list(self._llm.tokenize_str(_THOUGHT_END))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        return str(self._llm.decode_str(list(tokens)))

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token."""
        return [self.text([token]) for token in range(min(len(self._tokenizer), self._vocabulary))]

    @cached_property
    def preferred(self) -> tuple[Tensor, Tensor]:
        """All tokens in the order in which they lead to an end, best first: inside a JSON string, and outside."""
        # Equal ranks keep their order.
        inside, outside = (
            torch.tensor([-rank(text) for text in self._texts]).argsort(stable=True)
            for rank in (_rank_inside, _rank_outside)
        )
        return inside, outside

    @cached_property
    def _signs(self) -> dict[str, int]:
        return {text: token for token in self.preferred[0].tolist() if len(text := self._texts[token]) == 1}

    @cached_property
    def letters(self) -> Tensor:
        """The tokens that neither end a JSON string nor begin an escape, in the order of `preferred`."""
        ranked = self.preferred[0]
        return ranked[torch.tensor([not ('"' in text or "\\" in text) for text in self._texts])[ranked]]

    def tokens_of(self, signs: str) -> tuple[int, ...]:
        """The tokens of these single characters, as far as there are any."""
        return tuple(self._signs[sign] for sign in signs if sign in self._signs)


class Constraint:
    """Decides which tokens may come next in one answer, of which the prompt has begun to say `said`.

    The answer ends within `room` tokens, as long as an ending is known. Where none is found in time, the answer is held
    to the grammar all the same, but may be cut off. Raises `PromptError` when the grammar needs text that contains a
    control token, and `OptionError` when a complete answer takes more than `room` tokens.
    """

    def __init__(self, grammars: Grammars, matcher: LLMatcher, room: int, said: str, grammar: str = "") -> None:
        self._grammars, self._matcher, self._end = grammars, matcher, grammars.end
        self._scan, self._said = JsonScan(), said
        self._least = max(map(int, _MIN_LENGTH.findall(grammar)), default=0)
        self._unwritable, self._closing, self._seconds = "", False, _ALL_SECONDS
        self._way: list[int] | None = []  # A known ending, if there is one.
        way = self._search(matcher, self._scan, said, room + _SPARE, room)
        if way is None and self._unwritable:
            raise PromptError(
                f"Got a schema or tool in which something reads like {self._unwritable!r}, a control token of this "
                "model, so the model cannot write it. Give it another name."
            )
        if way is not None and len(way) > room:
            is_whole = len(way) <= room + _SPARE
            minimum = f"takes about {len(way)} at least" if is_whole else "was not found within that"
            raise OptionError(
                f"Got room for {room} tokens; a complete answer of this schema {minimum}. Raise max_tokens, or ask for "
                "less: fewer items, shorter strings, nothing that requires itself."
            )
        self._way = way

    def mask(self, scores: Tensor) -> Tensor:
        """`scores`, `(1, vocabulary)`, with minus infinity for the tokens that the grammar forbids.

        Raises `OptionError` when the grammar has become too complex to go on.
        """
        mask = self._matcher.compute_bitmask()
        if reason := self._matcher.get_error():  # The mask then allows nothing but the end.
            raise OptionError(
                f"Got an answer that its grammar cannot follow any further ({reason.splitlines()[0]}). Simplify the "
                "schema of the tools or of the answer: fewer choices in one place, shorter patterns."
            )
        allowed = _bits(mask)[: scores.shape[-1]]
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def accept(self, token: int, left: int) -> int:
        """Take the next token and return it: `token` if the answer can still end in time, else one of a known ending.

        `left` is how many tokens may still come, this one included.
        """
        if not self._closing and token != self._end:
            lookahead = self._matcher.deep_copy()
            lookahead.consume_token(token)
            lookahead.compute_bitmask()
            is_lost = bool(lookahead.get_error())  # The grammar is too complex behind this token.
            way = None if is_lost else self._way_from(lookahead, token, left - 1)
            is_roomy = not self._way or (left > len(self._way) + _MARGIN and self._seconds > 0)
            if (way is None and is_roomy and not (is_lost and self._way)) or (way is not None and len(way) < left):
                self._way = way
            elif self._way:
                self._closing = True
            else:  # Ending here would pass for a whole answer, but the model has begun a call.
                self._way = None
        if self._closing:
            token, *self._way = self._way or [self._end]
        # Quotes open no JSON string in free text, where the answer may end anywhere, nor in thoughts.
        self._scan = JsonScan() if self._matcher.is_accepting() or _is_thinking(self._said) else self._scan
        self._matcher.consume_token(token)
        text = self._grammars.text([token])
        self._scan, self._said = self._scan.feed(text), _and_said(self._said, text)
        return token

    def _way_from(self, ahead: LLMatcher, token: int, left: int) -> list[int] | None:
        """Tokens that end the answer after `token`: the rest of the known ending, all of it, or a new one."""
        if ahead.is_accepting():
            return []
        way = self._way or []
        for ending in [way[1:]] if way[:1] == [token] else [way]:
            trial = ahead.deep_copy()
            if trial.try_consume_tokens(ending) == len(ending) and trial.is_accepting():
                return ending
        text = self._grammars.text([token])
        return self._search(ahead, self._scan.feed(text), _and_said(self._said, text), left, left)

    def _search(self, matcher: LLMatcher, scan: JsonScan, said: str, far: int, room: int) -> list[int] | None:
        """A short ending of the answer, or the first `far` tokens of a longer one; `None` if none is found.

        Where the straight way is too long, other tokens are tried at its first forks: another tool may end sooner, or
        another member of `anyOf`.
        """
        began = time.thread_time()
        self._until = began + min(_SECONDS, self._seconds)
        try:
            best = self._straight(matcher, scan, said, far, None)
            # With a known ending, or none found so far, it will be searched for again after the next token.
            if self._way is None or (len(best) <= room if best is not None else self._way):
                return best
            forks = list[list[int]]()  # Listing them takes as long as the search itself.
            self._straight(matcher, scan, said, far, forks)
            for begun in forks:
                lookahead, text = matcher.deep_copy(), self._grammars.text(begun)
                if lookahead.try_consume_tokens(begun) == len(begun):
                    behind = JsonScan() if _is_thinking(said) else scan.feed(text)
                    rest = self._straight(lookahead, behind, _and_said(said, text), room - len(begun), None)
                    if rest is not None and len(begun) + len(rest) <= room:
                        return begun + rest
            return best
        finally:
            self._seconds -= time.thread_time() - began

    def _straight(  # noqa: C901 - one step after another
        self, matcher: LLMatcher, scan: JsonScan, said: str, far: int, forks: list[list[int]] | None
    ) -> list[int] | None:
        """As `_search`, without alternatives: at every step the allowed token that closes most.

        Adds the first alternatives to `forks`, each as the tokens up to it.
        """
        lookahead, ending = matcher.deep_copy(), list[int]()
        while not lookahead.is_accepting():
            if len(ending) > far:
                return ending
            step: list[int] | None = (
                list(self._grammars.thought_end) if _is_thinking(said) else lookahead.compute_ff_tokens()
            )
            if lookahead.is_stopped():
                return None
            if not step:
                mask, ranked = lookahead.compute_bitmask(), self._grammars.preferred[0 if scan.inside else 1]
                digits = self._grammars.tokens_of(_DIGITS)
                most = 1 if forks is None else 1 + len(digits) + _FORKS_HERE
                chosen, *others = _first_allowed(mask, ranked, most) or [self._end]
                if forks is not None and len(forks) < _FORKS:
                    others = [token for token in others if token not in digits]
                    forks += [[*ending, other] for other in others[:_FORKS_HERE]]
                step = [chosen]
                if not scan.inside and chosen in digits:
                    step = self._number(lookahead)
                elif scan.inside and not scan.escaped and not _closes(self._grammars.text(step)):
                    step = self._string(lookahead, scan, far)
                if step is None or len(step) > far:
                    return step
                step = step or [chosen]
            accepted = lookahead.try_consume_tokens(step)
            if "ff_tokens" in lookahead.get_error():  # Too many items: what must follow has no end in sight.
                return [self._end] * (far + 1)
            if accepted < len(step):
                if forks is not None and not lookahead.get_error():
                    self._unwritable = self._grammars.text([step[accepted]])
                return None
            ending += step
            text = self._grammars.text(step)
            scan, said = JsonScan() if _is_thinking(said) else scan.feed(text), _and_said(said, text)
        return ending

    def _number(self, matcher: LLMatcher) -> list[int] | None:
        """Tokens after which the number in `matcher` can end: the fewest, or a few and then zeros."""
        for most in (_FEW, _FEW_STATES, _STATES):
            states: list[tuple[LLMatcher, bytes, list[int]]] = []
            if found := self._shortest(matcher, _DIGITS, _CLOSERS, most, states):
                return found
            for state, _, path in states if most < _STATES else ():
                if zeros := self._shortest(state, "0", _CLOSERS, _ZEROS):
                    return path + zeros
        return None

    def _string(self, matcher: LLMatcher, scan: JsonScan, far: int) -> list[int] | None:
        """Tokens after which the string in `matcher` can be closed; more than `far` if it must be longer."""
        if found := self._shortest(matcher, _PLAIN, '"', _FEW_STATES):
            return found
        if self._least > far:
            return [self._end] * (far + 1)
        return self._varied(matcher, scan, far) or self._shortest(matcher, "", '"', _STATES)

    def _shortest(
        self,
        matcher: LLMatcher,
        alphabet: str,
        goals: str,
        most: int,
        last: list[tuple[LLMatcher, bytes, list[int]]] | None = None,
    ) -> list[int] | None:
        """The fewest tokens of `alphabet` after which one of `goals` is allowed.

        It gives up after `most` states, and leaves those with the most tokens that it has all of in `last`.

        Without an alphabet, it takes the letters that the grammar allows. Of states in a string that allow the same
        tokens after as many steps, one goes on: a long string is one path. Digits of a number are all tried, because
        what is left of a division is not seen in the tokens that may follow.
        """
        is_number, tried = goals == _CLOSERS, 0
        tokens_of_alphabet, tokens_of_goals = map(self._grammars.tokens_of, (alphabet, goals))
        level: list[tuple[LLMatcher, bytes, list[int]]] = [(matcher, matcher.compute_bitmask(), [])]
        while level:
            states: dict[bytes | int, tuple[LLMatcher, bytes, list[int]]] = {}
            for state, mask, path in level:
                tokens = [token for token in tokens_of_alphabet if _allows(mask, token)]
                if not tokens and not is_number:
                    tokens = _first_allowed(mask, self._grammars.letters, _LETTERS)
                for token in tokens:
                    tried += 1
                    after = state.deep_copy()
                    if tried > most or time.thread_time() > self._until or not after.consume_token(token):
                        if last is not None:
                            last += level
                        return None
                    follows = after.compute_bitmask()
                    if after.is_accepting() or any(_allows(follows, goal) for goal in tokens_of_goals):
                        return [*path, token]
                    states.setdefault(tried if is_number else follows, (after, follows, [*path, token]))
            level = list(states.values())
        return None

    def _varied(self, matcher: LLMatcher, scan: JsonScan, far: int) -> list[int] | None:
        """Tokens after which the string in `matcher` can be closed: at every step the one that was used least."""
        lookahead, path, uses = matcher.deep_copy(), list[int](), Counter[int]()
        ranked = self._grammars.preferred[0]
        while len(path) <= far:
            step = lookahead.compute_ff_tokens()
            if not step:
                mask = lookahead.compute_bitmask()
                choices = _first_allowed(mask, ranked[:_FEW], _FEW) or _first_allowed(mask, ranked, 1)
                if not choices or (not scan.escaped and _closes(self._grammars.text(choices[:1]))):
                    return path
                step = [min(choices, key=lambda token: uses[token])]
                uses[step[0]] += 1
            if lookahead.try_consume_tokens(step) < len(step):
                return None
            path += step
            for sign in self._grammars.text(step):  # Forced tokens may close this string and open the next.
                scan = scan.feed(sign)
                if not scan.inside:
                    return path
        return None


def _bits(mask: bytes) -> Tensor:
    """Whether each token is allowed."""
    return torch.from_numpy(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).bool()


def _first_allowed(mask: bytes, ranked: Tensor, most: int) -> list[int]:
    tokens: list[int] = ranked[_bits(mask)[ranked]][:most].tolist()
    return tokens


def _allows(mask: bytes, token: int) -> int:
    return mask[token >> 3] >> (token & 7) & 1


def _closes(text: str) -> bool:
    """Whether `text` closes a JSON string."""
    return text.startswith('"') and not text.strip('"}] \n')


def _is_thinking(said: str) -> bool:
    """Whether the answer so far is an open `<think>` block."""
    return said.startswith(_THOUGHT) and _THOUGHT_END not in said


def _and_said(said: str, text: str) -> str:
    # An answer that does not begin with a thought, or has closed it, needs no more text.
    is_decided = len(said) >= len(_THOUGHT) and not _is_thinking(said)
    return said if is_decided else said + text


def _rank_inside(text: str) -> int:
    """Rank inside a string: tokens that end the string are highest, then short text."""
    if _closes(text):
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
