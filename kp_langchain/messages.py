"""LangChain's messages and prompts in the form that the core takes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from kp_core.errors import PromptError, UnsupportedContentError
from kp_core.prompt.conversation import Message, slotted, tool_call
from kp_core.settings import core_role

__all__ = ["pack_place", "to_messages"]

# Blocks to leave out: tool calls, which are also in `tool_calls`, and reasoning, which is not sent.
_ASSISTANT_ONLY = frozenset(
    {"tool_call", "tool_use", "function_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking"}
)


def to_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """LangChain messages as dictionaries with `role`, `content`, and for tools `tool_calls`, `tool_call_id`, `name`.

    Content may be a string or text blocks. Tool calls whose arguments did not parse are left out, as no template could
    show them. Raises `UnsupportedContentError` for images, audio and files, `PromptError` for messages of other roles.
    """
    return [_to_message(message) for message in messages]


def pack_place(prompt: ChatPromptTemplate, variable: str = "context") -> list[Message]:
    """The place of the first document of `variable` in `prompt`, as messages for `build_pack(compiled_for=...)`.

    A pack compiled for this place is read straight from the store if it is the first document. So `variable` must begin
    with the documents, and nothing before it may change from call to call: another variable there raises `PromptError`.
    A placeholder for optional messages counts as empty.
    """
    placeholders = {part.variable_name for part in prompt.messages if isinstance(part, MessagesPlaceholder)}
    if variable not in prompt.input_variables or variable in placeholders:
        available = ", ".join(sorted(set(prompt.input_variables) - placeholders)) or "none"
        raise PromptError(f"Got the variable {variable!r}; the variables in the text of the prompt are: {available}.")
    sign = secrets.token_hex(8)
    names = [*prompt.input_variables, *prompt.optional_variables]
    marks = {name: f"slot{sign}n{number}x" for number, name in enumerate(names)}
    values: dict[str, Any] = {
        name: [HumanMessage(mark)] if name in placeholders else mark for name, mark in marks.items()
    }
    values |= {name: [] for name in prompt.optional_variables}
    return slotted(to_messages(prompt.format_messages(**values)), variable, marks)


def _to_message(message: BaseMessage) -> dict[str, Any]:
    kind = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    role = core_role(kind)
    if role not in ("system", "user", "assistant", "tool"):
        raise PromptError(f"Got a {type(message).__name__} ({role}); expected a system, human, AI or tool message.")
    core_message: dict[str, Any] = {"role": role, "content": _to_content(message.content, role)}
    if isinstance(message, AIMessage) and message.tool_calls:
        core_message["tool_calls"] = [
            tool_call(call["name"], call["args"], call.get("id")) for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        core_message["tool_call_id"] = message.tool_call_id
    if message.name:
        core_message["name"] = message.name
    return core_message


def _to_content(content: str | Sequence[str | Mapping[str, Any]], role: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    parts = []
    for block in content:
        kind = "text" if isinstance(block, str) else block.get("type")
        text = block if isinstance(block, str) else block.get("text")
        if kind in ("text", "text-plain") and isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif role != "assistant" or kind not in _ASSISTANT_ONLY:
            raise UnsupportedContentError(
                f"Got a content block of type {kind!r} in a {role} message; a text model takes text. "
                "Describe it in words, or leave it out."
            )
    return parts
