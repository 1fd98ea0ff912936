"""Reads the text, the reasoning and the tool calls of an answer from its tokens."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from kp_core.engines.base import TokenStream
from kp_core.engines.request import Generation, Request
from kp_core.errors import GenerationTimeoutError
from kp_core.packs.handle import strip_handles
from kp_core.plan import Limit, Plan
from kp_core.prompt.prompt import Prompt
from kp_core.prompt.template import ChatTemplate
from kp_core.tools import HARMONY, THINK, AnswerReader, Delta, HarmonyReader
from kp_core.usage import Usage

__all__ = ["AnswerText", "Reading", "WithoutHandles", "check_time", "usage_of"]

_MAYBE_HANDLE = re.compile(
    r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))k(?:p(?::[a-z0-9_-]{0,63}(?:/[a-z2-7]{0,21})?)?)?\Z|\\[nrt]?\Z"
)
"""The end of a text that more text could turn into a handle, or into an escape that may precede one."""


class Reading:
    """Reads the answer to one prompt. Its `grammar` enforces the shape of the answer; `None` if the shape is free."""

    def __init__(self, template: ChatTemplate, tokenizer: Any, prompt: Prompt, request: Request) -> None:  # noqa: ANN401
        form, shape, thought = template.tool_format, request.shape, template.thought
        self._tokenizer, self._stop = tokenizer, request.stop
        thinks = thought == THINK
        self.opened = thinks and prompt.rendered.rstrip().endswith(THINK[0])
        """Whether the prompt has begun a `<think>` block."""
        tools = {tool.name: tool.parameters for tool in shape.callable}
        is_harmony = form is HARMONY
        self._parts = (
            HarmonyReader(tools)
            if is_harmony
            else AnswerReader(form if tools else None, tools, thought=thought, opened=self.opened)
        )
        markers = form.markers if tools or is_harmony else ()
        if thought is not None:
            # `<|channel>thought` is a special token and then a word.
            markers += tuple(match[0] for mark in thought if (match := re.match(r"<[^<>]*>|\[[^\[\]]*\]", mark)))
        self._kept = {token: marker for marker in markers if (token := self._special(marker)) is not None}
        self.grammar = None
        if not shape.is_free(form, thought):
            self.grammar = shape.grammar(form, self._special, thinks=thinks, opened=self.opened)

    def read(self, plan: Plan, stream: TokenStream) -> Generator[Delta, None, Generation]:
        """Yields the answer in pieces and returns all of it. Raises `GenerationTimeoutError` when its time is up."""
        text, parts = AnswerText(self._tokenizer, self._stop, self._kept), self._parts
        tokens: list[int] = []
        ttft = 0.0
        try:
            for token in stream:
                tokens.append(token)
                ttft = ttft or stream.limit.spent
                if stream.finish == "stop":
                    break
                if piece := text.push(token):
                    yield from parts.push(piece)
                if text.stopped:
                    break
                check_time(stream.limit, len(tokens))
                if stream.limit.is_set():
                    stream.finish = "cancelled"
                    break
            if not tokens:
                check_time(stream.limit, 0)
            yield from parts.push(text.flush())
            yield from parts.finish()
            reason = "stop" if text.stopped else stream.finish
            if parts.calls and reason == "stop":
                reason = "tool_calls"
            usage, calls = usage_of(plan, stream, len(tokens), ttft), tuple(parts.calls)
            ids, logits = tuple(tokens), stream.first_logits
            return Generation(parts.text, ids, reason, usage, plan.prompt, logits, calls, parts.reasoning)
        finally:
            stream.close()

    def _special(self, marker: str) -> int | None:
        """The id of `marker`, if it is a special token or llguidance treats it as one; else `None`."""
        in_brackets = marker.startswith("<") and marker.endswith(">")
        for number, token in self._tokenizer.added_tokens_decoder.items():
            if token.content == marker and (token.special or in_brackets):
                return int(number)
        return None


class WithoutHandles:
    """Removes handles from a text that comes in pieces. Holds back text that may still become a handle."""

    def __init__(self) -> None:
        self._before = self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain after `piece`; may be empty."""
        self._held += piece
        match = _MAYBE_HANDLE.search(self._held)
        return self._give(match.start() if match else len(self._held))

    def flush(self) -> str:
        """All text that was held back; call it at the end."""
        return self._give(len(self._held))

    def _give(self, until: int) -> str:
        # After an inner handle is removed, text that was already returned may form another handle with the rest.
        stripped = strip_handles(self._before + self._held[:until])[len(self._before) :]
        self._before, self._held = (self._before + stripped)[-2:], self._held[until:]
        return stripped


class AnswerText:
    """Decodes an answer token by token, ends it at a stop string, and removes handles.

    Holds back text that may still become a stop string or a handle, so that the pieces of a stream join to exactly
    `text`. Removes special tokens, except those in `kept`, which become the text given there.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], kept: Mapping[int, str] | None = None) -> None:  # noqa: ANN401
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop, self._kept = tuple(stop), dict(kept or {})
        self._held, self._handles = "", WithoutHandles()
        self.text = ""
        """The text returned so far."""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, token: int) -> str:
        """The text that is certain after `token`; may be empty."""
        self._held += self._kept.get(token) or self._stream.step(self._backend, token) or ""
        if self._stop:
            positions = [at for at in map(self._held.find, self._stop) if at >= 0]
            if positions:
                self._held, self.stopped = self._held[: min(positions)], True
                return self.flush()
        until = next((at for at in range(len(self._held)) if self._may_stop(self._held[at:])), len(self._held))
        certain, self._held = self._held[:until], self._held[until:]
        return self._give(self._handles.push(certain))

    def flush(self) -> str:
        """All text that was held back; call it at the end of the answer."""
        held_back, self._held = self._held, ""
        return self._give(self._handles.push(held_back) + self._handles.flush())

    def _may_stop(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)

    def _give(self, piece: str) -> str:
        self.text += piece
        return piece


def usage_of(plan: Plan, stream: TokenStream, completion: int, ttft: float) -> Usage:
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
        recognised_tokens=prompt.recognised_tokens,
        approximate_tokens=stream.approximate_tokens,
        reordered_packs=prompt.reordered,
        errata_tokens=sum(span.errata_tokens for span in prompt.spans if not span.recognised),
        state_bytes=stream.state_bytes,
    )


def check_time(limit: Limit, tokens: int) -> None:
    """Raise `GenerationTimeoutError` when the time of `limit` is up; `tokens` is how many were generated."""
    if limit.is_over:
        raise GenerationTimeoutError(
            f"The answer was not complete after {limit.timeout} s ({tokens} tokens were generated). Raise the timeout, "
            "lower max_tokens, or send less to prefill."
        )
