"""LlamaIndex's messages in the form that the core takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from kp_core.errors import PromptError, UnsupportedContentError
from kp_core.prompt.conversation import tool_call
from kp_core.settings import core_role

__all__ = ["MEMORY", "to_messages"]

MEMORY = "memory"
"""Key in the provenance of a pack: the name of the memory block that made it."""


def to_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """LlamaIndex messages as dictionaries with `role`, `content`, and for tools `tool_calls`, `tool_call_id`, `name`.

    Text blocks of one message are joined by a line feed, as in `ChatMessage.content`. A tool message gets the name of
    the call that it answers. Tool calls whose arguments did not parse are left out, as no template could show them.
    Thinking is not sent; neither are cache points, which reuse makes needless.

    Raises `UnsupportedContentError` for images, audio, video and files, `PromptError` for other objects than
    `ChatMessage`.
    """
    names: dict[str, str] = {}
    converted = []
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise PromptError(f"Got a {type(message).__name__}; expected a ChatMessage.")
        converted.append(_to_message(message, names))
    return converted


def _to_message(message: ChatMessage, names: dict[str, str]) -> dict[str, Any]:
    """Convert one message. Adds the ids and names of its tool calls to `names`."""
    role = core_role(message.role.value)
    calls = _calls(message) if role == "assistant" else []
    names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    texts = [text for block in message.blocks if (text := _text(block, role)) is not None]
    core_message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        core_message["tool_calls"] = calls
    extra = message.additional_kwargs
    call_id = extra.get("tool_call_id")
    if role == "tool" and call_id:
        core_message["tool_call_id"] = call_id
    name = extra.get("name") or (names.get(str(call_id)) if role == "tool" else None)
    if name:
        core_message["name"] = name
    return core_message


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    parsed_blocks = (
        (block, _arguments(block.tool_kwargs)) for block in message.blocks if isinstance(block, ToolCallBlock)
    )
    return [
        tool_call(block.tool_name, arguments, block.tool_call_id)
        for block, arguments in parsed_blocks
        if arguments is not None
    ]


def _arguments(given: Mapping[str, Any] | str) -> dict[str, Any] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except json.JSONDecodeError:
            return None
    return dict(given) if isinstance(given, Mapping) else None


def _text(block: ContentBlock, role: str) -> str | None:
    """The text of a block; `None` if the block is not sent."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, CachePoint) or (role == "assistant" and isinstance(block, ThinkingBlock | ToolCallBlock)):
        return None
    if isinstance(block, CitableBlock):
        return "\n".join(text for part in block.content if (text := _text(part, role)) is not None)
    if isinstance(block, CitationBlock):
        return _text(block.cited_content, role)
    raise UnsupportedContentError(
        f"Got a content block of type {block.block_type!r} in a {role} message; a text model takes text. "
        "Describe it in words, or leave it out."
    )
