"""From messages with handles to messages with packs: who may bring which pack in."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from kp_core.errors import PromptError, UnsupportedContentError
from kp_core.handle import Handle, check_namespace, find_handles
from kp_core.pack import KnowledgePack

__all__ = ["TRUSTED_ROLES", "Message", "PackRef", "PackSource", "PackView", "Segment", "split_content"]

logger = logging.getLogger(__name__)

Message: TypeAlias = Mapping[str, Any]
"""A chat message as chat templates take it: `role`, `content`, and for tools `tool_calls`, `tool_call_id`, `name`."""

TRUSTED_ROLES = frozenset({"system", "user", "tool"})


@dataclass(frozen=True)
class PackRef:
    """A pack at its place in a message, or as memory at the head of the system message."""

    handle: str
    pack: KnowledgePack = field(compare=False, repr=False)
    memory: bool = False

    @property
    def text(self) -> str:
        """The text as it stands in the prompt: memory is a list of paragraphs, each ending its line."""
        return self.pack.text.strip() + "\n" if self.memory else self.pack.text


Segment: TypeAlias = str | PackRef


class PackSource(Protocol):
    """Where packs come from, e.g. `PackStore`."""

    def peek(self, handle: Handle) -> KnowledgePack | None:
        """The pack without its KV, or `None` when there is none under this handle; cheap, asked at every turn."""

    def get(self, handle: Handle) -> KnowledgePack:
        """The pack, with its KV where that is stored and intact."""


@dataclass(frozen=True)
class PackView:
    """The packs a conversation may reach: a source, the namespaces allowed, and the roles trusted to bring handles.

    What does not resolve (namespace not allowed, role not trusted, no such pack) stays plain text and is logged.
    Text that comes out of a pack is never searched for handles.
    """

    source: PackSource
    namespaces: Collection[str]
    trusted_roles: Collection[str] = TRUSTED_ROLES

    def __post_init__(self) -> None:
        if isinstance(self.namespaces, str):
            raise PromptError(f"Got the string {self.namespaces!r} as namespaces; expected a collection of names.")
        object.__setattr__(self, "namespaces", frozenset(check_namespace(name) for name in self.namespaces))
        object.__setattr__(self, "trusted_roles", frozenset(self.trusted_roles))

    def resolve(self, handle: Handle, role: str) -> KnowledgePack | None:
        """The pack without KV, when `role` may bring it in."""
        if role not in self.trusted_roles:
            reason = f"role {role!r} is not trusted"
        elif handle.namespace not in self.namespaces:
            reason = f"namespace {handle.namespace!r} is not allowed"
        else:
            pack = self.source.peek(handle)
            if pack is not None:
                return pack
            reason = "no such pack"
        logger.warning("Handle %s stays text: %s.", handle, reason)
        return None

    def split(self, text: str, role: str) -> tuple[Segment, ...]:
        """`text` cut into plain text and the packs its handles stand for."""
        segments: list[Segment] = []
        done = 0
        for start, stop, handle in find_handles(text):
            pack = self.resolve(handle, role)
            if pack is not None:
                segments += [text[done:start], PackRef(str(handle), pack)]
                done = stop
        segments.append(text[done:])
        return tuple(segment for segment in segments if segment != "")


def split_content(message: Message, view: PackView | None) -> tuple[Segment, ...]:
    """The text of a message, with its handles resolved through `view`.

    Raises `UnsupportedContentError` for content that is neither a string nor a list of text parts.
    """
    text = _text_of(message)
    if view is not None:
        return view.split(text, str(message["role"]))
    return (text,) if text else ()


def _text_of(message: Message) -> str:
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
