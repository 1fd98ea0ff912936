"""What ASGI and OpenAI's API need to agree on: bodies in, JSON and errors out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

__all__ = ["App", "HTTPError", "Receive", "Scope", "Send", "call", "call_raw", "read_json", "replay", "send_json"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_MOST_BYTES = 32 * 2**20


class HTTPError(Exception):
    """A request that is answered with an error, in OpenAI's form."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's API says it."""
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        about = {"message": str(self), "type": kind.get(self.status, usual)}
        return {"error": {**about, "param": None, "code": self.status}}


async def read_json(receive: Receive) -> dict[str, Any]:
    """The body of a request; raises `HTTPError` unless it is a JSON object of a size that is read."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HTTPError(400, "The client went away.")
        data += message.get("body", b"")
        if len(data) > _MOST_BYTES:
            raise HTTPError(413, f"The body has more than {_MOST_BYTES} bytes. Send less at once.")
        if not message.get("more_body"):
            break
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise HTTPError(400, f"The body is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise HTTPError(400, f"Got a body of type {type(found).__name__}; expected a JSON object.")
    return found


async def send_json(send: Send, status: int, body: object) -> None:
    """Answer with JSON."""
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def replay(body: object, receive: Receive) -> tuple[bytes, Receive]:
    """A body as bytes, and what gives it, and then what the client still sends (that it went away).

    Raises `HTTPError` for what JSON has no word for: numbers without end come of `1e999` as well.
    """
    try:
        data = json.dumps(body, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPError(
            400, f"The body cannot be passed on ({error}). Expected finite numbers, nested less."
        ) from error
    waiting = [{"type": "http.request", "body": data, "more_body": False}]

    async def given() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return data, given


async def call(app: App, scope: Scope, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Ask another endpoint of the same application; the status and the JSON it answers."""

    async def silent() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nobody goes away")

    data, receive = replay(body, silent)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    inner = {
        **scope,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": headers,
        "query_string": b"",
    }
    status, _, data = await call_raw(app, inner, receive)
    try:
        return status, json.loads(data or b"null")
    except ValueError:
        return status, data[:200].decode(errors="replace")


async def call_raw(app: App, scope: Scope, receive: Receive) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """What an application answers, all of it: the status, the headers, the body."""
    status, headers, parts = 500, list[tuple[bytes, bytes]](), bytearray()

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers
        status, headers = message.get("status", status), list(message.get("headers", headers))
        parts.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, bytes(parts)
