"""A client's request over ASGI: the rights of its key, its body, answers and errors in OpenAI's form, calls of vLLM."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import httpx

from kp_core.errors import ModelError
from kp_core.packs.handle import check_namespace
from kp_core.packs.view import TRUSTED_ROLES

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

KEYS_VARIABLE = "KP_API_KEYS"
"""Environment variable with the keys: JSON, a map from each key to the fields of its `Access`."""
_MIN_CHARS = 20  # Of a key.
_JSON = "application/json"
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Access:
    """Rights of a key: namespaces it may read, roles whose messages may hold handles, and whether it may `write` packs.

    Raises `ModelError` for an unknown role or a value of another type.
    """

    namespaces: tuple[str, ...]
    trusted_roles: tuple[str, ...] = tuple(sorted(TRUSTED_ROLES))
    write: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.namespaces, str) or isinstance(self.trusted_roles, str) or not isinstance(self.write, bool):
            raise ModelError(f"Got {self}; expected lists of namespaces and of trusted roles, and true or false.")
        object.__setattr__(self, "namespaces", tuple(map(check_namespace, self.namespaces)))
        object.__setattr__(self, "trusted_roles", tuple(self.trusted_roles))
        if unknown := set(self.trusted_roles) - TRUSTED_ROLES:
            raise ModelError(f"Got the trusted roles {sorted(unknown)}; expected some of {sorted(TRUSTED_ROLES)}.")


def read_keys() -> dict[str, Access]:
    """The keys in `KEYS_VARIABLE`; none without it. Raises `ModelError` if it has another form, or for a short key."""
    try:
        fields_of = json.loads(os.environ.get(KEYS_VARIABLE) or "{}")
        keys = {str(key): Access(**fields) for key, fields in fields_of.items()}
    except (ModelError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{KEYS_VARIABLE} holds no keys ({error}). Expected JSON, such as "
            '{"KEY": {"namespaces": ["NAME"], "write": true}}.'
        ) from error
    if any(len(key) < _MIN_CHARS for key in keys):
        raise ModelError(
            f"{KEYS_VARIABLE} has a key of fewer than {_MIN_CHARS} characters. `openssl rand -hex 32` makes one."
        )
    return keys


def access_of(keys: Mapping[str, Access] | Access, key: str | None) -> Access | None:
    """The rights of `key` among those of `read_keys`, or those of everybody; `None` for an unknown key."""
    if isinstance(keys, Access):
        return keys
    given = (key or "").encode()
    # Compare with all keys, so that the duration does not reveal which one matched.
    matches = [access for known, access in keys.items() if hmac.compare_digest(known.encode(), given)]
    return matches[0] if matches else None


@dataclass(frozen=True)
class Visit:
    """A client's request, the rights of its key, and vLLM's application, which computes for us."""

    app: App
    scope: Scope
    receive: Receive
    send: Send
    access: Access

    @property
    def query(self) -> dict[str, list[str]]:
        """The query parameters."""
        return parse_qs(self.scope.get("query_string", b"").decode("latin-1"))

    @property
    def namespaces(self) -> list[str]:
        """Namespaces in the query (`?namespace=`) that the key may read; without any, all that the key may read."""
        requested = self.query.get("namespace", self.access.namespaces)
        return [name for name in self.access.namespaces if name in requested]

    def need_write(self) -> None:
        """Raise `HTTPError` 403 for a key that may only read."""
        if not self.access.write:
            raise HTTPError(403, "This key reads packs and may not change them. Ask for one with 'write': true.")

    def writable(self, namespace: object) -> str:
        """`namespace`, if the key may write there. Raises `HTTPError` 403 for a key that may only read, else 404."""
        self.need_write()
        if not isinstance(namespace, str) or namespace not in self.access.namespaces:
            raise HTTPError(404, f"Got the namespace {namespace!r}; expected one of {list(self.access.namespaces)}.")
        return namespace

    async def read(self) -> dict[str, Any]:
        """The body. Raises `HTTPError` unless it is a JSON object of at most 32 MiB."""
        data, is_whole = bytearray(), False
        while not is_whole:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise HTTPError(400, "The client went away.")
            data += message.get("body", b"")
            is_whole = not message.get("more_body")
            if len(data) > _MOST_BYTES:
                raise HTTPError(413, f"The body has more than {_MOST_BYTES} bytes. Send less at once.")
        try:
            parsed = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise HTTPError(400, f"The body is not JSON ({error}).") from error
        if not isinstance(parsed, dict):
            raise HTTPError(400, f"Got a body of type {type(parsed).__name__}; expected a JSON object.")
        return parsed

    async def answer(self, body: object) -> None:
        """Answer with JSON."""
        await send_json(self.send, 200, body)

    async def call(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Call another endpoint of the application, with its query in `path`, and return the whole answer."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.app({**self.scope, **scope}, receive, send)  # vLLM keeps its state in the scope.

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
            return await client.request(method, path, json=body)


class HTTPError(Exception):
    """An error that is sent to the client in OpenAI's form."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON in OpenAI's form."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.status}}


async def send_json(send: Send, status: int, body: object) -> None:
    """Answer with JSON."""
    await send_bytes(send, status, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), _JSON)


async def send_bytes(send: Send, status: int, data: bytes, kind: str) -> None:
    """Answer with `data` of the content type `kind`."""
    await send({"type": "http.response.start", "status": status, "headers": _headers(data, kind)})
    await send({"type": "http.response.body", "body": data})


def replay(body: object, receive: Receive) -> tuple[list[tuple[bytes, bytes]], Receive]:
    """Headers for `body`, and a `receive` that first gives `body`, then what the client still sends (its disconnect).

    Raises `HTTPError` for values that JSON cannot express, such as the infinity that `1e999` parses to.
    """
    try:
        data = json.dumps(body, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        reason = f"The body cannot be passed on ({error}). Expected finite numbers, nested less."
        raise HTTPError(400, reason) from error
    waiting = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive_body() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return _headers(data, _JSON), receive_body


def _headers(data: bytes, kind: str) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", kind.encode()), (b"content-length", str(len(data)).encode())]
