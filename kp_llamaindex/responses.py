"""What the engine said, as LlamaIndex's responses."""

from __future__ import annotations

import time
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
)

from kp_core import Generation

__all__ = ["Answer", "to_completion"]


class Answer:
    """One answer on its way: each piece as a response that holds the whole message so far.

    The last response alone has `raw`: `usage`, `timings` in seconds and `finish_reason`, plain values throughout.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._text = ""

    def piece(self, delta: str) -> ChatResponse:
        """The response that brings the piece `delta`."""
        self._text += delta
        return ChatResponse(message=_message([TextBlock(text=self._text)]), delta=delta)

    def whole(self, generation: Generation) -> ChatResponse:
        """The response that holds all of `generation`."""
        return ChatResponse(message=_message(_blocks(generation)), raw=self._raw(generation))

    def last(self, generation: Generation) -> ChatResponse:
        """As `whole`, at the end of a stream: nothing is new in it but the counts."""
        response = self.whole(generation)
        response.delta = ""
        return response

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
    """A chat response as that of a completion endpoint."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


def _blocks(generation: Generation) -> list[ContentBlock]:
    return [TextBlock(text=generation.text)]


def _message(blocks: list[ContentBlock]) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)
