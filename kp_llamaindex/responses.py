"""The engine's answers as LlamaIndex's responses."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from kp_core import Delta, Generation, ToolCallDelta
from kp_core.prompt.conversation import tool_call

__all__ = ["Answer", "to_completion"]


@dataclass
class _Call:
    """A tool call so far: `arguments` is JSON, or its beginning; `parsed` is its value once it is complete."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    parsed: dict[str, Any] | None = None


class Answer:
    """Builds the responses for one answer. Each response holds the whole message so far.

    The message holds a `ThinkingBlock`, a `TextBlock` and `ToolCallBlock`s, if there are any. The arguments of a call
    are a string while they stream, and a dictionary in the last response. `additional_kwargs["tool_calls"]` of the
    message repeats the calls in OpenAI's form, which LlamaIndex's structured streaming looks for.

    Only the last response has `raw`: `usage`, `timings` in seconds and `finish_reason`, all as plain values.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._text, self._reasoning = "", ""
        self._calls: list[_Call] = []

    def piece(self, delta: Delta) -> ChatResponse:
        """The response for `delta`."""
        self._text += delta.text
        self._reasoning += delta.reasoning
        if delta.tool_call is not None:
            self._take(delta.tool_call)
        extra = {"thinking_delta": delta.reasoning} if delta.reasoning else {}
        message = _message(self._text, self._reasoning, self._calls)
        return ChatResponse(message=message, delta=delta.text, additional_kwargs=extra)

    def whole(self, generation: Generation) -> ChatResponse:
        """The response with all of `generation`."""
        calls = [
            _Call(call.id, call.name, json.dumps(call.arguments), dict(call.arguments))
            for call in generation.tool_calls
        ]
        message = _message(generation.text, generation.reasoning, calls)
        return ChatResponse(message=message, raw=self._raw(generation))

    def last(self, generation: Generation) -> ChatResponse:
        """As `whole`, at the end of a stream: only the counts are new."""
        response = self.whole(generation)
        response.delta = ""
        return response

    def _take(self, piece: ToolCallDelta) -> None:
        while len(self._calls) <= piece.index:
            self._calls.append(_Call())
        call = self._calls[piece.index]
        call.id, call.name = piece.id or call.id, piece.name or call.name
        call.arguments += piece.arguments

    def _raw(self, generation: Generation) -> dict[str, Any]:
        usage = generation.usage.to_dict()
        ttft = usage.pop("ttft_s")
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return {
            "usage": usage,
            "timings": {"ttft_s": ttft, "total_s": time.perf_counter() - self._began},
            "finish_reason": generation.finish_reason,
        }


def to_completion(response: ChatResponse) -> CompletionResponse:
    """A chat response as a completion response."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


def _message(text: str, reasoning: str, calls: Sequence[_Call]) -> ChatMessage:
    blocks: list[ContentBlock] = [ThinkingBlock(content=reasoning)] if reasoning else []
    # Templates separate calls by blank lines, which are not text of the answer.
    if text.strip() or not calls:
        blocks.append(TextBlock(text=text))
    for call in calls:
        arguments = call.arguments if call.parsed is None else call.parsed
        blocks.append(ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments))
    extra = {"tool_calls": [tool_call(call.name, call.arguments, call.id) for call in calls]} if calls else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
