"""Decoding an answer behind a prefilled prompt, and reading it as it comes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kp_core.engines.hf.sampling import Sampler
from kp_core.engines.local.fill import Cancelled, Prefilled, Prefiller
from kp_core.engines.local.grammar import Grammars
from kp_core.engines.request import FinishReason, Generation, Limit, Sampling
from kp_core.engines.text import AnswerText
from kp_core.errors import GenerationTimeoutError
from kp_core.prompt.prompt import Prompt
from kp_core.prompt.template import ChatTemplate
from kp_core.tools import AnswerReader, AnswerShape, Delta
from kp_core.usage import Usage

__all__ = ["Answerer", "usage_of"]


@dataclass(frozen=True)
class _Reading:
    """From tokens to text, and from text to what is in it."""

    text: AnswerText
    parts: AnswerReader


class Answerer:
    """Decodes answers with one model; `end_tokens` end them."""

    def __init__(
        self,
        prefiller: Prefiller,
        tokenizer: Any,  # noqa: ANN401
        template: ChatTemplate,
        end_tokens: frozenset[int] | set[int],
    ) -> None:
        self._prefiller, self._tokenizer, self._template = prefiller, tokenizer, template
        self._end_tokens = frozenset(end_tokens)
        self._grammars = Grammars(tokenizer, prefiller.model.vocabulary, self._end_tokens)

    def plan(self, prompt: Prompt, shape: AnswerShape, sampling: Sampling, room: int) -> tuple[Sampler, _Reading]:
        """How the tokens of an answer of `shape` are chosen, and how it is read.

        Raises `ToolError` for a schema that no grammar expresses, `SamplingError` when no answer fits into `room`.
        """
        template, form = self._template, self._template.tool_format
        opened = template.thinks and prompt.rendered.rstrip().endswith("<think>")
        names = tuple(tool.name for tool in shape.callable)
        markers = form.markers if names else ()
        kept = {token: marker for marker in markers if (token := self._special(marker)) is not None}
        reading = _Reading(
            AnswerText(self._tokenizer, sampling.stop, kept),
            AnswerReader(form if names else None, names, thinks=template.thinks, opened=opened),
        )
        constraint = None
        if not shape.is_free:
            grammar = shape.grammar(form, self._special, thinks=template.thinks, opened=opened)
            constraint = self._grammars.constraint(grammar, room, opened=opened)
        return Sampler(sampling, prompt.token_ids, self._prefiller.model.shape.device, constraint), reading

    def answer(  # noqa: PLR0913 - what was planned, and what it is planned for
        self,
        start: Callable[[], Prefilled],
        prompt: Prompt,
        sampler: Sampler,
        reading: _Reading,
        room: int,
        limit: Limit,
    ) -> Generator[Delta, None, Generation]:
        """The answer piece by piece, behind the prompt that `start` prefills."""
        text, parts = reading.text, reading.parts
        try:
            run = start()
        except Cancelled:
            _check_time(limit, 0)
            nothing = Usage(len(prompt) - prompt.pack_tokens, prompt.pack_tokens, 0, 0, 0, 0.0)
            return Generation("", (), "cancelled", nothing, prompt)
        tokens: list[int] = []
        ttft = 0.0
        reason: FinishReason = "length"
        first_logits = run.logits
        try:
            for token in self._tokens(run, sampler, room):
                tokens.append(token)
                ttft = ttft or limit.spent
                if token in self._end_tokens:
                    reason = "stop"
                    break
                if piece := text.push(token):
                    yield from parts.push(piece)
                if text.stopped:
                    reason = "stop"
                    break
                _check_time(limit, len(tokens))
                if limit.is_set():
                    reason = "cancelled"
                    break
            yield from parts.push(text.flush())
            yield from parts.finish()
            usage, calls = usage_of(prompt, run, len(tokens), ttft), tuple(parts.calls)
            reason = "tool_calls" if calls and reason == "stop" else reason
            return Generation(parts.text, tuple(tokens), reason, usage, prompt, first_logits, calls, parts.reasoning)
        finally:
            self._finish(run, prompt, tokens)

    def _special(self, marker: str) -> int | None:
        """The id of `marker`, when it is a special token."""
        added = self._tokenizer.added_tokens_decoder
        return next((number for number, token in added.items() if token.special and token.content == marker), None)

    def _tokens(self, run: Prefilled, sampler: Sampler, room: int) -> Iterator[int]:
        """Up to `room` tokens behind `run`; the KV of each is computed when the next is asked for."""
        for left in range(room, 0, -1):
            if run.logits is None:
                raise AssertionError("a prefilled prompt has logits")
            token = sampler(run.logits, left)
            yield token
            if left > 1:
                run.logits = self._prefiller.forward((token,), run.buffer)

    def _finish(self, run: Prefilled, prompt: Prompt, tokens: Sequence[int]) -> None:
        """Let the next turn find what was decoded, and give the memory back."""
        decoded = run.buffer.length - len(prompt)
        if decoded > 0 and run.path.is_open and run.path.tokens == len(prompt):
            kv = run.buffer.read(len(prompt), run.buffer.length)
            run.path.extend(tuple(tokens[:decoded]), kv, is_decoded=True)
        self._prefiller.finish(run)


def usage_of(prompt: Prompt, run: Prefilled, completion: int, ttft: float) -> Usage:
    """What a request cost: `ttft` in seconds, all else in tokens."""
    return Usage(
        prompt_tokens=len(prompt) - prompt.pack_tokens,
        pack_tokens=prompt.pack_tokens,
        reused_tokens=len(prompt) - run.computed,
        computed_tokens=run.computed,
        completion_tokens=completion,
        ttft_s=ttft,
    )


def _check_time(limit: Limit, tokens: int) -> None:
    if limit.is_over:
        raise GenerationTimeoutError(
            f"The answer was not complete after {limit.timeout} s ({tokens} tokens were generated). Raise the timeout, "
            "lower max_tokens, or send less to prefill."
        )
