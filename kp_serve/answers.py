"""Filter for the served model's answers: removes handles, and adds pack counts to the usage."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

from kp_core.session.reading import VisibleText
from kp_serve.asked import COMPUTED
from kp_serve.wire import Send

_TEXTS = {"text", "content", "reasoning", "reasoning_content", "refusal", "arguments"}
_PARTS = {"message", "delta", "function", "function_call"}
_END = b"\n\n"


class Answer:
    """Filters the ASGI messages of an answer, and passes them to `send`.

    A model must not emit handles, because its text may come back in a message of a trusted role. In a stream, text that
    may begin a handle is held back until this is decided; the joined pieces equal the text of the whole answer.
    `delivered` has the number of prompt tokens that handles delivered (`pack_tokens`) and of handles that brought
    nothing (`unresolved`); with it, the usage is split as `kp_core.Usage` is. `computed` is the number of tokens
    computed before the prompt could be answered; it goes into a header.
    """

    def __init__(self, send: Send, delivered: dict[str, int] | None = None, computed: int | None = None) -> None:
        self._send, self._delivered = send, delivered
        self._headers = [] if computed is None else [(COMPUTED.encode(), str(computed).encode())]
        self._start: MutableMapping[str, Any] | None = None
        self._data = bytearray()
        self._is_stream = False
        self._texts = defaultdict[tuple[Any, ...], VisibleText](VisibleText)

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Filter one ASGI message."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *self._headers]}
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._is_stream = any(b"event-stream" in kind for kind in kinds)
            self._start = None if self._is_stream else message
            if self._is_stream:
                await self._send(message)
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._data += message.get("body", b"")
        is_last = not message.get("more_body")
        if self._is_stream:
            *events, unfinished = bytes(self._data).split(_END)
            self._data = bytearray(unfinished)
            data = b"".join(self._event(event) + _END for event in events) + (unfinished if is_last else b"")
            if data or is_last:
                await self._send({**message, "body": data})
        elif is_last and self._start is not None:
            data = self._filtered(bytes(self._data))
            headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(data)).encode()))
            await self._send({**self._start, "headers": headers})
            await self._send({"type": "http.response.body", "body": data})

    def _event(self, event: bytes) -> bytes:
        head, data, payload = event.partition(b"data: ")
        return head + data + self._filtered(payload)

    def _filtered(self, data: bytes) -> bytes:
        try:
            response = json.loads(data)
        except ValueError:  # `[DONE]`, or a comment of the stream.
            return data
        for choice in _choices(response):
            index = choice.get("index")
            for part, name, path in list(_texts(choice)):
                part[name] = self._texts[index, *path].push(part[name])
            if choice.get("finish_reason") is not None or not self._is_stream:
                self._end(choice, index)
        return self._counted(response)

    def _end(self, choice: dict[str, Any], index: object) -> None:
        """Append the held-back text of a choice to its last event, or to the whole answer."""
        for path, text in self._texts.items():
            if path[0] != index or not (text_left := text.flush()):
                continue
            part = choice
            for step in path[1:-1]:
                part = _below(part, step)
            part[path[-1]] = (part.get(path[-1]) or "") + text_left

    def _counted(self, response: Any) -> bytes:  # noqa: ANN401 - any JSON
        usage = response.get("usage") if isinstance(response, dict) else None
        if isinstance(usage, dict) and self._delivered is not None:
            prompt = usage.get("prompt_tokens", 0)
            reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            split = {"prompt_tokens": max(prompt - self._delivered["pack_tokens"], 0), **self._delivered}
            usage["knowledge_packs"] = {**split, "reused_tokens": reused, "computed_tokens": prompt - reused}
        return json.dumps(response, ensure_ascii=False).encode("utf-8", "replace")


def _choices(response: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - any JSON
    choices = response.get("choices") if isinstance(response, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _texts(part: dict[str, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[dict[str, Any], str, tuple[Any, ...]]]:
    """Each text of the model in a choice: the mapping that holds it, its field, and its path."""
    for name, value in part.items():
        if name in _TEXTS and isinstance(value, str):
            yield part, name, (*path, name)
        elif name in _PARTS and isinstance(value, dict):
            yield from _texts(value, (*path, name))
        elif name == "tool_calls" and isinstance(value, list):
            for at, call in enumerate(value):
                yield from _texts(call, (*path, call.get("index", at)))


def _below(part: dict[str, Any], step: str | int) -> dict[str, Any]:
    """The value at `step`, a field or the index of a tool call. Creates it if it is missing."""
    if isinstance(step, str):
        if not isinstance(part.get(step), dict):
            part[step] = {}
        child: dict[str, Any] = part[step]
        return child
    calls = part["tool_calls"] = part.get("tool_calls") or []
    call = next((entry for at, entry in enumerate(calls) if entry.get("index", at) == step), None)
    if call is None:
        calls.append(call := {"index": step})
    return call
