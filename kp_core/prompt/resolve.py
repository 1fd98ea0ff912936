"""The text of messages, with the packs that its handles stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kp_core.errors import PromptError, UnsupportedContentError
from kp_core.packs.view import PackView, Segment

__all__ = ["Message", "split_content", "text_of", "tool_call"]

Message: TypeAlias = Mapping[str, Any]
"""A chat message as chat templates take it: `role`, `content`, and for tools `tool_calls`, `tool_call_id`, `name`."""


def tool_call(name: str, arguments: object, call_id: object = None) -> dict[str, Any]:
    """A call as `tool_calls` of a message hold it, with its id where it has one."""
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": call_id} if call_id else call


def split_content(message: Message, view: PackView | None) -> tuple[Segment, ...]:
    """The text of a message, with its handles resolved through `view`.

    Raises `UnsupportedContentError` for content that is neither a string nor a list of text parts.
    """
    text = text_of(message)
    if view is not None:
        return view.split(text, str(message["role"]))
    return (text,) if text else ()


def text_of(message: Message) -> str:
    """The text of a message; raises as `split_content`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"Got the message {message!r}; expected a mapping with a string under 'role'.")
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_text_of_part(part) for part in content)
    raise UnsupportedContentError(f"Got content of type {type(content).__name__}; expected a string or text parts.")


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnsupportedContentError(
        f"Got a content part of type {kind!r}; a text model takes parts of the form {{'type': 'text', 'text': ...}}."
    )
