"""Conversations as turns of text and packs, with memory, errata and instructions in their places."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias, get_args

from kp_core.errors import PromptError
from kp_core.events import warn_once
from kp_core.packs.handle import Handle, handles_like
from kp_core.packs.pack import root_of
from kp_core.packs.view import PackRef, PackView, Segment

Message: TypeAlias = Mapping[str, Any]
"""A chat message as chat templates take it: `role`, `content`, and for tools `tool_calls`, `tool_call_id`, `name`.
`cache_control` marks the end of a beginning to keep (`is_marked`). `before` are `Handle`s of packs
that a tool found, which stand in front of the content. Text from outside holds no such objects."""
Placement: TypeAlias = Literal["in_place", "system"]
_Call: TypeAlias = Mapping[str, Any]
GAP = "\n\n"
SLOT = "{pack}"
"""Placeholder for a pack in messages."""
_ROLES = ("system", "user", "assistant", "tool")
# Content that is an error wherever it stands: a model of text would answer without having seen it.
_MEDIA = ("image", "audio", "video", "screenshot", "inline_data", "inlineData", "file_data", "fileData")
_FILES = frozenset({"file", "input_file", "document", "media", "container_upload"})
# Left out without a word: calls are also in `tool_calls`, reasoning is not sent again, and cache points say nothing.
_CACHE_POINTS = frozenset({"cachePoint", "cache_point"})
_CALLS = ("tool_call", "tool_use", "function_call", "tool_call_chunk", "invalid_tool_call", "toolUse")
_THOUGHTS = ("reasoning", "thinking", "redacted_thinking", "reasoning_content", "reasoningContent")
_UNSENT = frozenset((*_CALLS, *_THOUGHTS))
# Parts that wrap content, under their own name or one of these keys.
_HOLDERS = ("non_standard", "tool_result", "search_result", "toolResult", "citationsContent", "guardContent")
_INSIDE = ("value", "content", "text")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """One message: its role, its content as text and packs, and its tool fields."""

    role: str
    segments: tuple[Segment, ...] = ()
    tool_calls: tuple[_Call, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    marked: bool = False
    """Whether the KV of the conversation up to its end is to be kept."""

    @property
    def content(self) -> str:
        """The content, with packs as their text."""
        return "".join(segment.text if isinstance(segment, PackRef) else segment for segment in self.segments)

    def with_segments(self, segments: Sequence[Segment]) -> Turn:
        """Return the turn with other content."""
        return replace(self, segments=tuple(segment for segment in segments if segment != ""))


def to_turns(messages: Sequence[Message], view: PackView | None) -> tuple[Turn, ...]:
    """Resolve the handles in `messages`; raises `PromptError` for an empty conversation or an unknown role."""
    if messages is not None and not isinstance(messages, Iterable):
        raise PromptError(f"Got the conversation {messages!r}; expected a string or messages.")
    if not messages:
        raise PromptError("Got an empty conversation; expected at least one message.")
    turns = []
    for message in messages:
        texts, role = texts_of(message), message["role"]
        if role not in _ROLES:
            raise PromptError(f"Got the role {role!r}; expected one of {', '.join(_ROLES)}.")
        parts = texts if view is None else [part for text in texts for part in view.split(text, role)]
        segments = tuple(_joined([*_before(message, view), *parts]))
        raw_calls = message.get("tool_calls") or ()
        if not isinstance(raw_calls, Iterable):
            raise PromptError(f"Got the tool calls {raw_calls!r}; expected a list of them.")
        calls = tuple(map(_normalised, raw_calls))
        extra = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
        turns.append(Turn(role, segments, calls, extra, is_marked(message)))
    return tuple(turns)


def _before(message: Message, view: PackView | None) -> Iterator[Segment]:
    """What stands before the content of a message: packs, without those that do not resolve."""
    handles = message.get("before")
    for handle in handles if isinstance(handles, list | tuple) else ():
        name = str(handle)
        if view and isinstance(handle, Handle) and (parts := view.split(name, "tool")) != (name,):
            yield from (*parts, GAP)


def _joined(parts: Iterable[Segment]) -> Iterator[Segment]:
    """`parts`, with neighbouring texts as one."""
    for is_text, run in groupby(parts, lambda part: isinstance(part, str)):
        if not is_text:
            yield from run
        elif text := "".join(map(str, run)):
            yield text


def placed(
    messages: Sequence[Message] | str,
    *,
    view: PackView | None = None,
    packs: Sequence[PackRef] = (),
    placement: Placement = "in_place",
) -> tuple[Turn, ...]:
    """Turn `messages` (a string is one user message) into turns, with handles resolved through `view` and packs placed.

    `packs` go to the start of the system message. With `placement="system"` the packs of all messages go there too, in
    order of first appearance, and the messages keep only the handles. Raises `PromptError`.
    """
    if placement not in get_args(Placement):
        raise PromptError(f"Got placement {placement!r}; expected 'in_place' or 'system'.")
    turns = to_turns([{"role": "user", "content": messages}] if isinstance(messages, str) else messages, view)
    memory = [*packs]
    if placement == "system":
        memory += (segment for turn in turns for segment in turn.segments if isinstance(segment, PackRef))
        turns = tuple(
            turn.with_segments([s.handle if isinstance(s, PackRef) else s for s in turn.segments]) for turn in turns
        )
    if not memory:
        return turns
    # Each once, at the start of the system message, which is added if there is none.
    ordered = dict[str, PackRef]()
    for reference in memory:
        ordered.setdefault(reference.handle, replace(reference, memory=True))
    if turns[0].role == "system":
        return (turns[0].with_segments((*ordered.values(), *turns[0].segments)), *turns[1:])
    return (Turn("system", tuple(ordered.values())), *turns)


def unresolved(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """Return what looks like a handle and brought no pack to the conversation, each with the role that named it."""
    segments = [(segment, turn.role) for turn in turns for segment in turn.segments]
    packs = {segment.handle for segment, _ in segments if isinstance(segment, PackRef)}
    texts = ((segment, role) for segment, role in segments if isinstance(segment, str) and "kp:" in segment)
    return list(dict.fromkeys((name, role) for text, role in texts for name in handles_like(text) if name not in packs))


def with_errata(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Shorten each pack that follows an earlier version of itself to the corrections since then.

    Not one that takes a correction back without another one of the same words: it is sent whole.
    """
    sent: dict[tuple[str, str], dict[str, tuple[int, int] | None]] = {}  # Errata that hold, and what they correct.

    def shortened(part: Segment) -> Segment:
        if not isinstance(part, PackRef):
            return part
        pack = part.pack
        root = (pack.namespace, pack.edits.root or root_of(pack.text))
        earlier, now = sent.get(root), dict[str, tuple[int, int] | None].fromkeys(pack.edits.said)
        now |= {each.line: (each.start, each.stop) for each in pack.edits.corrections}
        unsent = [line for line in pack.edits.errata if line not in (earlier or ())]
        renewed = [place for line in unsent if (place := now[line])]
        taken_back = [
            place
            for line, place in (earlier or {}).items()
            if line not in now and not (place and any(a < place[1] and place[0] < b for a, b in renewed))
        ]
        sent[root] = now
        if earlier is None or not unsent or taken_back:
            return part
        lines = replace(pack, text="\n".join(unsent), token_ids=(), prefix=(), kv=None, stored_bytes=0)
        return replace(part, pack=lines, is_erratum=True)

    return tuple(turn.with_segments([shortened(part) for part in turn.segments]) for turn in turns)


def with_instruction(turns: Sequence[Turn], text: str) -> tuple[Turn, ...]:
    """Append `text` as the last paragraph of the system message, which is added if there is none."""
    if turns[0].role == "system":
        last = turns[0].segments[-1] if turns[0].segments else "\n"
        # Memory ends its line. Another line feed would merge with that one, and the pack would lose its last token.
        gap = () if (last.text if isinstance(last, PackRef) else last).endswith("\n") else (GAP,)
        return (turns[0].with_segments((*turns[0].segments, *gap, text)), *turns[1:])
    return (Turn("system", (text,)), *turns)


def schema_instruction(schema: Mapping[str, Any]) -> str:
    """Return the instruction for the form of an answer, for `with_instruction`."""
    # A small model repeats a schema that has only a type.
    if set(schema) == {"type"}:
        return f"Answer with a JSON {schema['type']}, and nothing else."
    return f"Answer with JSON that fits this JSON Schema, and nothing else:\n{json.dumps(schema, ensure_ascii=False)}"


def _normalised(call: object) -> _Call:
    """Return a tool call in the form that templates take: arguments as an object, under `function`."""
    if not isinstance(call, Mapping):
        raise PromptError(f"Got the tool call {call!r}; expected a mapping with a 'function'.")
    function = call.get("function", call)
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        json.dumps(arguments, default=dict)  # Mappings other than dictionaries are fine, too.
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"Got tool call arguments that are not JSON: {error}.") from error
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"Got the tool call {call!r}; expected a function with a name.")
    return tool_call(function["name"], arguments, call.get("id"))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON of any shape
    """Apply `change` to every string in `value`, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_strings(item, change) for item in value]
    return value


def is_marked(message: Message) -> bool:
    """Whether a message or a part of it has a mark of Anthropic's or Amazon's API: what ends there is to be cached."""
    content = message.get("content")
    parts = [message, *(content if isinstance(content, Sequence) and not isinstance(content, str) else ())]
    maps = (part for part in parts if isinstance(part, Mapping))
    return any(part.get("cache_control") or {*part, str(part.get("type"))} & _CACHE_POINTS for part in maps)


def tool_call(name: str, arguments: object, call_id: object = None) -> dict[str, Any]:
    """Return a call as messages store it in `tool_calls`, with its id if it has one."""
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": call_id} if call_id else call


def text_of(message: Message) -> str:
    """Return the text of a message. Raises as `texts_of`."""
    return "".join(texts_of(message))


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message's parts. A handle in one is whole, whatever stands in the next.

    Text parts are read under the names that OpenAI, Anthropic, Google and Amazon give them, refusals and citations
    included. Other parts of answers and tool results (reasoning, calls, searches, code that a provider ran) are left
    out, which the log says once for each kind but calls and reasoning. Raises `PromptError` for images, audio, video
    and files, and for what is no content.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"Got the message {message!r}; expected a mapping with a string under 'role'.")
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, Sequence):
        return [_text_of_part(part, message["role"]) for part in content]
    raise PromptError(f"Got content of type {type(content).__name__}; expected a string or text parts.")


def _text_of_part(part: object, role: str) -> str:
    if isinstance(part, str):
        return part
    kind: object = type(part).__name__
    if isinstance(part, Mapping):
        # Google's and Amazon's parts have no type; their first key names them.
        kind = part.get("type") or next((key for key in part if key != "thought"), None)
    if isinstance(part, Mapping) and isinstance(kind, str):
        source = part.get("source")
        if kind == "document" and isinstance(source, Mapping) and isinstance(source.get("data"), str):
            if source.get("type") == "text":
                return str(source["data"])
        elif kind in _HOLDERS:
            wrapper = part.get(kind, part)
            inside = (
                next((wrapper[key] for key in _INSIDE if key in wrapper), None)
                if isinstance(wrapper, Mapping)
                else None
            )
            return text_of({"role": role, "content": [inside] if isinstance(inside, Mapping) else inside})
        if kind in _CACHE_POINTS or (role == "assistant" and (kind in _UNSENT or part.get("thought") is True)):
            return ""
        is_media = kind in _FILES or any(name in kind for name in _MEDIA)
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str) and not is_media and kind not in _UNSENT:
            return text
        if role in ("assistant", "tool") and not is_media and kind not in _UNSENT | {"text"}:
            warn_once(logger, "Content parts of type %r are no text, and are left out of prompts.", kind[:80])
            return ""
    raise PromptError(
        f"Got a content part of type {kind!r} in a {role} message; a text model takes parts of the form "
        "{'type': 'text', 'text': ...}. Describe it in words, or leave it out."
    )


def filled(messages: Sequence[Message], reference: PackRef) -> tuple[Turn, ...]:
    """Put `reference` in place of `{pack}` in `messages`, as turns."""
    turns = []
    for turn in to_turns(messages, None):
        segments: list[Segment] = []
        for segment in turn.segments:
            before, slot, after = str(segment).partition(SLOT)
            segments += [before, reference, after] if slot else [before]
        turns.append(turn.with_segments(segments))
    if sum(segment is reference for turn in turns for segment in turn.segments) != 1:
        raise PromptError("Expected messages that hold '{pack}' exactly once, where the pack will be.")
    return tuple(turns)


def slotted(messages: Sequence[Message], variable: str, marks: Mapping[str, str]) -> list[Message]:
    """Put `{pack}` at the first place of `variable` in a framework's prompt, and `?` for the other variables.

    `marks` are the texts in `messages` that stand for each variable. Raises `PromptError` if `variable` is missing or
    not the first.
    """
    texts = [text_of(message) for message in messages]
    before, separator, _ = "".join(texts).partition(marks[variable])
    if not separator:
        names = ", ".join(name for name in marks if name != variable)
        raise PromptError(f"Got the variable {variable!r}; the variables of the prompt are: {names}.")
    moving = next((name for name, mark in marks.items() if mark in before), None)
    if moving is not None:
        raise PromptError(
            f"{moving!r} stands before {variable!r} in the prompt, so what precedes the packs changes from call to "
            f"call, and no KV computed beforehand can be exact there. Put {variable!r} first, e.g. in a system message."
        )
    first = next(at for at, text in enumerate(texts) if marks[variable] in text)
    texts[first] = texts[first].replace(marks[variable], SLOT, 1)
    for mark in marks.values():
        texts = [text.replace(mark, "?") for text in texts]
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
