"""The engine's answers as LangChain's messages and chunks."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from kp_core import Delta, Generation

__all__ = ["PROVIDER", "last_chunk", "to_chunk", "to_result", "usage_metadata"]

PROVIDER = "knowledge_packs"


def to_result(generation: Generation, model_name: str) -> ChatResult:
    """The whole answer as one message."""
    message = AIMessage(
        generation.text,
        tool_calls=[tool_call(name=call.name, args=dict(call.arguments), id=call.id) for call in generation.tool_calls],
        additional_kwargs=_reasoning(generation.reasoning),
        usage_metadata=usage_metadata(generation),
        response_metadata=_about(generation, model_name),
    )
    info = {"finish_reason": generation.finish_reason}
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


def to_chunk(delta: Delta) -> ChatGenerationChunk:
    """One chunk of a stream."""
    calls = []
    if delta.tool_call is not None:
        piece = delta.tool_call
        calls = [tool_call_chunk(name=piece.name, args=piece.arguments, id=piece.id, index=piece.index)]
    message = AIMessageChunk(content=delta.text, tool_call_chunks=calls, additional_kwargs=_reasoning(delta.reasoning))
    return ChatGenerationChunk(message=message)


def last_chunk(generation: Generation, model_name: str) -> ChatGenerationChunk:
    """The last chunk of a stream: token counts and finish reason."""
    message = AIMessageChunk(
        content="",
        usage_metadata=usage_metadata(generation),
        response_metadata=_about(generation, model_name),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": generation.finish_reason})


def usage_metadata(generation: Generation) -> UsageMetadata:
    """Tokens that were sent and generated. Tokens that packs delivered were not sent, so they are not counted."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=max(0, usage.reused_tokens - usage.pack_tokens)),
    )


def _reasoning(text: str) -> dict[str, Any]:
    # LangChain makes a reasoning block from this key.
    return {"reasoning_content": text} if text else {}


def _about(generation: Generation, model_name: str) -> dict[str, Any]:
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": generation.finish_reason,
        "kp": generation.usage.to_dict(),
    }
