"""From the tokens of an answer to its text, its reasoning and its calls."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kp_core.engines.base import TokenStream
from kp_core.engines.request import Generation, Request
from kp_core.engines.text import AnswerText
from kp_core.errors import GenerationTimeoutError
from kp_core.plan import Limit, Plan
from kp_core.prompt.prompt import Prompt
from kp_core.prompt.template import ChatTemplate
from kp_core.tools import AnswerReader, Delta
from kp_core.usage import Usage

__all__ = ["Reading", "check_time", "usage_of"]


class Reading:
    """How the answer to one prompt is read, and the grammar that holds it to the shape asked for."""

    def __init__(self, template: ChatTemplate, tokenizer: Any, prompt: Prompt, request: Request) -> None:  # noqa: ANN401
        form, shape = template.tool_format, request.shape
        self._tokenizer, self._stop = tokenizer, request.stop
        self.opened = template.thinks and prompt.rendered.rstrip().endswith("<think>")
        """Whether the prompt has begun a `<think>` block."""
        names = tuple(tool.name for tool in shape.callable)
        self._parts = AnswerReader(form if names else None, names, thinks=template.thinks, opened=self.opened)
        markers = form.markers if names else ()
        self._kept = {token: marker for marker in markers if (token := self._special(marker)) is not None}
        self.grammar = None
        if not shape.is_free:
            self.grammar = shape.grammar(form, self._special, thinks=template.thinks, opened=self.opened)

    def read(self, plan: Plan, stream: TokenStream) -> Generator[Delta, None, Generation]:
        """The answer piece by piece; raises `GenerationTimeoutError` when its time is up."""
        text, parts = AnswerText(self._tokenizer, self._stop, self._kept), self._parts
        tokens: list[int] = []
        ttft = 0.0
        try:
            for token in stream:
                tokens.append(token)
                ttft = ttft or plan.limit.spent
                if stream.finish == "stop":
                    break
                if piece := text.push(token):
                    yield from parts.push(piece)
                if text.stopped:
                    break
                check_time(plan.limit, len(tokens))
            if not tokens:
                check_time(plan.limit, 0)
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
        """The id of `marker`, when it is a special token."""
        added = self._tokenizer.added_tokens_decoder
        return next((number for number, token in added.items() if token.special and token.content == marker), None)


def usage_of(plan: Plan, stream: TokenStream, completion: int, ttft: float) -> Usage:
    """What a request cost: `ttft` in seconds, all else in tokens."""
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
    )


def check_time(limit: Limit, tokens: int) -> None:
    """Raise `GenerationTimeoutError` when the time is up."""
    if limit.is_over:
        raise GenerationTimeoutError(
            f"The answer was not complete after {limit.timeout} s ({tokens} tokens were generated). Raise the timeout, "
            "lower max_tokens, or send less to prefill."
        )
