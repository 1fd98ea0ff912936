"""An answer and its cost, read from tokens: text, reasoning and tool calls, in pieces."""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

from torch import Tensor

from kp_core.packs.handle import strip_handles
from kp_core.plan.engine import FinishReason, TokenStream
from kp_core.plan.plan import COMPUTED, Plan, Region
from kp_core.plan.request import Request
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.template import ChatTemplate
from kp_core.tools import HARMONY, THINK, AnswerReader, Delta, HarmonyReader, Tool, ToolCall
from kp_core.tools.base import BYTE_TOKEN, TokenLogprob, scored_token, token_bytes

_MAYBE_HANDLE = re.compile(
    r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt])|(?<=/[a-z2-7]{21}))(?:kp:[a-z0-9_-]{1,64}/[a-z2-7]{21})*"
    r"k(?:p(?::[a-z0-9_-]{0,64}(?:/[a-z2-7]{0,21})?)?)?\Z|\\[nrt]?\Z"
)
"""The end of a text that more text could turn into a handle, or into an escape that may precede one."""
_QUOTED = 8  # Tokens.
_SEEN = 22  # Characters before a handle on which it depends: the end of another, or an escape.


@dataclass(frozen=True)
class Usage:
    """Token counts of one generation, and its time to first token in seconds.

    `prompt_tokens + pack_tokens == reused_tokens + computed_tokens` is the length of the prompt.
    """

    prompt_tokens: int
    """Tokens of the canonical prompt outside packs, which the caller sent."""
    pack_tokens: int
    """Tokens of the canonical prompt that packs delivered."""
    reused_tokens: int
    """Tokens whose KV was already in memory or in the store."""
    computed_tokens: int
    """Tokens prefilled by this generation."""
    completion_tokens: int
    """Generated tokens, including the end-of-turn token."""
    ttft_s: float
    """Seconds from the call to the first token, without those before a stream is first read."""
    approximate_tokens: int = 0
    """Tokens whose KV an approximate composer made; 0 unless one was asked for."""
    unread_packs: int = 0
    """Packs that the composer left out. The pass that chose is in `ttft_s`, not in `computed_tokens`."""
    errata_tokens: int = 0
    """Tokens of `pack_tokens` that belong to errata."""
    unresolved_handles: int = 0
    """Handles that brought no pack and were sent as text; see the option `unresolved`."""
    choice: str = ""
    """The composer that was chosen, and why, if the request left that open; or why it could not choose; else empty."""
    miss: str = ""
    """The first token that is neither in memory nor stored, and what put it there; empty if none was computed."""

    def to_dict(self) -> dict[str, int | float | str]:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class Generation:
    """One answer: its text (without handles, stop strings, reasoning and calls), its tokens, why it ended, its cost."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    prompt: Prompt
    logits: Tensor | None = field(default=None, compare=False, repr=False)
    """Logits after the prompt, `(vocabulary,)`; `None` if the engine gives none or the prefill was cancelled."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The complete calls, in order."""
    reasoning: str = ""
    """The text of the `<think>` block."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`, also of reasoning, calls and the end token; `None` unless asked for."""

    @property
    def packs(self) -> tuple[str, ...]:
        """The handles of the packs in the prompt, in the order in which they were sent."""
        return tuple(span.handle for span in self.prompt.spans)


def grammar_of(template: ChatTemplate, prompt: Prompt, request: Request) -> tuple[str | None, bool]:
    """The grammar of the answer, `None` if any answer will do; and whether `prompt` has begun a `<think>` block."""
    form, thought = template.tool_format, template.thought
    thinks = thought == THINK
    opened = thinks and prompt.rendered.rstrip().endswith(THINK[0])
    if request.shape.is_free(form, thought):
        return None, opened
    return request.shape.grammar(form, partial(_special, template.tokenizer), thinks=thinks, opened=opened), opened


def read_answer(
    plan: Plan, stream: TokenStream, template: ChatTemplate, request: Request
) -> Generator[Delta, None, Generation]:
    """Yields the answer in pieces and returns all of it. Raises `GenerationTimeoutError` when its time is up.

    Each piece has the log-probabilities of new tokens, if the stream has any; the last piece may have nothing else.
    """
    parts, decoder = _readers(plan, template, request)
    text, tokens = VisibleText(request.stops), list[int]()
    bytes_of, logprobs = token_bytes(template.tokenizer) if request.gives_logprobs else None, list[TokenLogprob]()

    def told(deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            scores = stream.logprobs[len(logprobs) :]
            latest = tuple(scored_token(each, bytes_of) for each in scores) if bytes_of else ()
            logprobs.extend(latest)
            yield replace(delta, logprobs=latest) if latest else delta

    with closing(stream):
        for token in stream:
            tokens.append(token)
            if stream.finish == "stop":
                break
            yield from told(parts.push(text.push(decoder.push(token))))
            if text.stopped:
                break
            stream.limit.check(len(tokens))
            if stream.limit.is_set():
                stream.finish = "cancelled"
                break
        if not tokens:
            stream.limit.check(0)
        rest = "" if text.stopped else text.push(decoder.flush())
        yield from told(chain(parts.push(rest + text.flush()), parts.finish()))
        if len(logprobs) < len(stream.logprobs):
            yield from told([Delta()])
        reason = "stop" if text.stopped else stream.finish
        if parts.calls and reason == "stop":
            reason = "tool_calls"
        miss, calls = miss_of(plan, stream.found_tokens, template, request.shape.tools), tuple(parts.calls)
        usage = usage_of(plan, stream, len(tokens), stream.ttft_s if tokens else 0.0, miss)
        return Generation(
            *(parts.text, tuple(tokens), reason, usage, plan.prompt, stream.first_logits, calls, parts.reasoning),
            logprobs=tuple(logprobs) if bytes_of else None,
        )


def _readers(plan: Plan, template: ChatTemplate, request: Request) -> tuple[AnswerReader, StreamDecoder]:
    """What tells the parts of an answer from one another, and what decodes its tokens one by one.

    Of special tokens, only the marks of calls and thoughts have text.
    """
    form, thought, shape = template.tool_format, template.thought, request.shape
    tools = {tool.name: tool.parameters for tool in shape.callable}
    untagged = 0
    if tools and shape.choice == "auto" and shape.schema is None:
        untagged = 1 if shape.parallel is False else sys.maxsize
    parts: AnswerReader = HarmonyReader(tools, untagged=untagged)
    if form is not HARMONY:
        parts = AnswerReader(form if tools else None, tools, thought=thought, opened=plan.opened, untagged=untagged)
    markers = form.markers if tools or form is HARMONY else ()
    if thought is not None:
        # `<|channel>thought` is a special token and then a word.
        markers += tuple(match[0] for mark in thought if (match := re.match(r"<[^<>]*>|\[[^\[\]]*\]", mark)))
    kept = {token: marker for marker in markers if (token := _special(template.tokenizer, marker)) is not None}
    return parts, StreamDecoder(template.tokenizer.backend_tokenizer, kept)


class StreamDecoder:
    """The text of tokens that come one by one. All pieces join to the tokenizer's decoding of all of them.

    `backend` is a tokenizer of `tokenizers`. Special tokens have no text, except `kept`. Text is held back while later
    tokens may change it: part of a character, and tokens that stand for bytes (`<0xE2>`), as one wrong byte changes the
    text of all bytes beside it. `DecodeStream` of `tokenizers` raises there, and never gives what it still holds.
    """

    def __init__(self, backend: Any, kept: Mapping[int, str] = MappingProxyType({})) -> None:  # noqa: ANN401
        self._backend, self._kept = backend, kept
        self._said, self._held = list[int](), list[int]()  # The tokens of the last piece, and those held back.

    def push(self, token: int) -> str:
        """The text that is certain after `token`; may be empty."""
        if token in self._kept:
            return self.flush() + self._kept[token]
        self._held.append(token)
        # A token without text, such as a special one, ends no run of bytes.
        is_open = BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or "") or not self._backend.decode([token])
        return "" if is_open else self._take(is_over=False)

    def flush(self) -> str:
        """All text that was held back; call it at the end."""
        return self._take(is_over=True)

    def _take(self, *, is_over: bool) -> str:
        # Decoded behind the last piece, because the first token of a text may lose its blank.
        known, text = self._backend.decode(self._said), self._backend.decode([*self._said, *self._held])
        is_certain = text.startswith(known) and not text.endswith("\N{REPLACEMENT CHARACTER}")
        piece: str = text[len(known) :] if is_certain or is_over else ""
        if piece:
            self._said, self._held = self._held if is_certain else [], []
        return piece


def _special(tokenizer: Any, marker: str) -> int | None:  # noqa: ANN401
    """The id of `marker`, if it is a special token or llguidance treats it as one; else `None`."""
    in_brackets = marker.startswith("<") and marker.endswith(">")
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.content == marker and (token.special or in_brackets):
            return int(number)
    return None


class VisibleText:
    """Text that comes in pieces: without handles, and ended at a string of `stop`; holds back what may become one."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop, self._before, self._held = tuple(stop), "", ""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, piece: str) -> str:
        """The text that is certain after `piece`; may be empty."""
        self._held += piece
        positions = [at for at in map(self._held.find, self._stop) if at >= 0]
        if positions:
            self._held, self.stopped = self._held[: min(positions)], True
            return self.flush()
        # Behind what was given before, which decides whether a handle may begin here.
        begun = _MAYBE_HANDLE.search(self._before + self._held, len(self._before))
        until = begun.start() - len(self._before) if begun else len(self._held)
        may_stop = (at for at in range(until) if any(stop.startswith(self._held[at:]) for stop in self._stop))
        return self._give(next(may_stop, until))

    def flush(self) -> str:
        """All text that was held back; call it at the end."""
        return self._give(len(self._held))

    def _give(self, until: int) -> str:
        # After an inner handle is removed, text that was already returned may form another handle with the rest.
        stripped = strip_handles(self._before + self._held[:until], len(self._before))
        self._before, self._held = (self._before + stripped)[-_SEEN:], self._held[until:]
        return stripped


def usage_of(plan: Plan, stream: TokenStream, completion: int, ttft: float, miss: str = "") -> Usage:
    """The cost of a request. `completion` is the number of generated tokens, `ttft` the seconds to the first one."""
    prompt = plan.prompt
    was_read = completion > 0 or stream.first_logits is not None
    return Usage(
        prompt_tokens=len(prompt) - prompt.pack_tokens,
        pack_tokens=prompt.pack_tokens,
        reused_tokens=len(prompt) - stream.computed_tokens if was_read else 0,
        computed_tokens=stream.computed_tokens,
        completion_tokens=completion,
        ttft_s=ttft,
        approximate_tokens=stream.approximate_tokens,
        unread_packs=prompt.unread,
        unresolved_handles=prompt.unresolved,
        errata_tokens=sum(span.errata_tokens for span in prompt.spans),
        choice=plan.choice,
        miss=miss if was_read and stream.computed_tokens else "",
    )


def usage_of_all(plans: Sequence[Plan], stream: TokenStream) -> Usage:
    """The cost of several prompts, computed with one `stream`, without answers."""
    first = usage_of(plans[0], stream, 0, stream.limit.spent)
    total, by_packs = (
        sum(parts) for parts in zip(*((len(p.prompt), p.prompt.pack_tokens) for p in plans), strict=True)
    )
    return replace(
        first,
        prompt_tokens=total - by_packs,
        pack_tokens=by_packs,
        reused_tokens=total - first.computed_tokens,
        approximate_tokens=first.approximate_tokens * len(plans),
    )


def miss_of(plan: Plan, found: int, template: ChatTemplate, tools: Iterable[Tool]) -> str:
    """Why tokens are computed, in a sentence: the first of them, and what put it there. Empty if there are none.

    The prefix tree has the first `found` tokens. The sentence quotes the prompt itself, and nothing of others.
    """
    sources = list(plan.sources(found))
    at = next((start for start, _, source, _ in sources if source in COMPUTED), None)
    if at is None:
        return ""
    prompt, tokenizer = plan.prompt, template.tokenizer
    if at == 0:
        return _from_the_first(plan, [part for part in sources if part[2] not in COMPUTED])
    quoted = tokenizer.decode(prompt.token_ids[at : at + _QUOTED])
    number = bisect_right(prompt.breaks, at)
    if quoted.lstrip().startswith(tuple(tokenizer.all_special_tokens)):  # What stands around the next message.
        number += 1
    before = tokenizer.decode(prompt.token_ids[: at + _QUOTED]) if not number and tools else ""
    named = {tool.name: before.rfind(json.dumps(tool.name)) for tool in tools}
    if span := next((span for span in prompt.spans if span.start <= at < span.stop), None):
        where = f"the pack {span.handle}"
        if span in _elsewhere(prompt):
            where += ", which is compiled behind another beginning"
    elif number > len(prompt.roles):
        where = "what the template puts before the answer"
    elif number:
        where = f"a message of the role {prompt.roles[number - 1]!r}"
    elif max(named.values(), default=-1) >= 0:
        where = f"the offer of the tool {max(named, key=named.__getitem__)!r}"
    else:
        where = "the system message"
    return f"Computed from token {at} on, {quoted!r} in {where}: what is in memory or stored ends there, or differs."


def _from_the_first(plan: Plan, held: Sequence[tuple[int, int, str, Region]]) -> str:
    """Why the first token is computed. `held` are the regions that are not."""
    if held:
        count = sum(stop - start for start, stop, *_ in held)
        return f"Computed up to token {held[0][0]:,}, where the first of {count:,} tokens with stored KV stands."
    if not plan.reuse:
        return "Computed from the first token on: the request says reuse=False."
    moved = _elsewhere(plan.prompt)
    other = f"; the pack {moved[0].handle} is compiled behind another beginning" if moved else ""
    return f"Computed from the first token on: no beginning of the prompt is in memory or stored{other}."


def _elsewhere(prompt: Prompt) -> list[Span]:
    """The packs that are compiled behind another beginning than theirs here."""
    return [span for span in prompt.spans if span.pack.prefix and span.pack.prefix != prompt.token_ids[: span.start]]
