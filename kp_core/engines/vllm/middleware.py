"""What stands before vLLM's own endpoints: keys, handles, rights. Named to vLLM with `--middleware` by `kp serve`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from kp_core.engines.vllm.access import Access
from kp_core.engines.vllm.altering import counted, steered
from kp_core.engines.vllm.desk import Desk
from kp_core.engines.vllm.rights import Rights, salt_of
from kp_core.engines.vllm.wire import App, HTTPError, Receive, Scope, Send, read_json, replay, send_json
from kp_core.errors import KnowledgePackError
from kp_core.packs.view import PackRef

__all__ = ["PackMiddleware"]

logger = logging.getLogger(__name__)

_GET = {"/v1/models", "/metrics", "/version"}
_BOTH = {
    *("model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "response_format"),
    *("seed", "stop", "stream", "stream_options", "temperature", "top_p", "user", "top_k", "min_p", "stop_token_ids"),
    *("repetition_penalty", "ignore_eos", "min_tokens", "skip_special_tokens", "structured_outputs", "metadata"),
    *("return_token_ids", "store", "service_tier"),
}
_FIELDS = {
    "/v1/completions": {*_BOTH, "prompt", "suffix", "best_of", "kp"},
    "/v1/chat/completions": {
        *_BOTH,
        *("messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "include_reasoning", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "functions", "function_call"),
    },
}
_DROPPED = {"cache_salt", "kv_transfer_params"}
_REFUSED = {"echo", "prompt_logprobs", "prompt_embeds"}
_ROLES = {"developer": "system", "function": "tool"}


class PackMiddleware:
    """Lets through listed endpoints alone, with handles in chat messages resolved for the key, and its rights signed.

    A client's own `cache_salt` and `kv_transfer_params` are dropped, unknown fields and what would show the prompt are
    refused. Everything else, templates and parsers included, is vLLM's own.
    """

    def __init__(self, app: App) -> None:
        self.app, self.desk = app, Desk.of_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        try:
            await self._answer(scope, receive, send)
        except HTTPError as error:
            await send_json(send, error.status, error.body)
        except KnowledgePackError as error:
            await send_json(send, 400, HTTPError(400, str(error)).body)
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/health"):
            return await self.app(scope, receive, send)
        access = self.desk.keys.access(_key_of(scope))
        if access is None:
            raise HTTPError(401, "The API key is missing or not one of this server. Send 'Authorization: Bearer KEY'.")
        if path == "/v1/packs" or path.startswith("/v1/packs/"):
            return await self.desk.answer(self.app, scope, access, receive, send)
        if method == "GET" and path in _GET:
            return await self.app(scope, receive, send)
        if method != "POST" or path not in _FIELDS:
            raise HTTPError(404, f"This server has no {method} {path}; it has {', '.join(sorted(_FIELDS))}, /v1/packs.")
        body = _checked(await read_json(receive), path)
        if path == "/v1/chat/completions":
            # The store may be far away, and other requests wait for this thread.
            body["messages"] = await asyncio.to_thread(self._resolved, body.get("messages"), access)
            self.desk.refuse_special([body["messages"], body.get("tools"), body.get("functions")])
        rights = Rights(access.namespaces, salt_of(access.namespaces, self.desk.key), save=access.write)
        if "kp" in body:
            rights, computed = await steered(self.desk, self.app, scope, access, body)
            send = counted(send, computed)
        body |= {"cache_salt": rights.salt, "kv_transfer_params": rights.sign(self.desk.key)}
        data, given = replay(body, receive)
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in (b"content-length", b"content-type")]
        headers += [(b"content-length", str(len(data)).encode()), (b"content-type", b"application/json")]
        inner = {**scope, "headers": headers, "query_string": b""}
        return await self.app(inner, given, send)

    def _resolved(self, messages: object, access: Access) -> list[Any]:
        """The messages with texts in the place of handles."""
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise HTTPError(400, "Got no list of messages; expected 'messages': [{'role': …, 'content': …}].")
        view = self.desk.store.view(*access.namespaces, trusted_roles=access.trusted_roles)

        def text(said: str, role: str) -> str:
            parts = view.split(said, role)
            return "".join(part.text if isinstance(part, PackRef) else part for part in parts)

        found = []
        for message in messages:
            role, content = str(message.get("role")), message.get("content")
            role = _ROLES.get(role, role)
            if isinstance(content, str):
                content = text(content, role)
            elif isinstance(content, list):
                content = "".join(text(each, role) for each in _texts(content))
            found.append({**message, "content": content} if "content" in message else message)
        return found


def _texts(content: list[Any]) -> Iterator[str]:
    for part in content:
        said = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(said, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
            raise HTTPError(400, "Got a part of a message that is no text; this model reads text alone.")
        yield said


def _checked(body: dict[str, Any], path: str) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name not in _DROPPED}
    refused = sorted(name for name in _REFUSED if body.pop(name, None))
    if refused:
        raise HTTPError(400, f"This server does not take {', '.join(refused)}, as they show what packs hold.")
    unknown = sorted(body.keys() - _FIELDS[path])
    if unknown:
        raise HTTPError(400, f"Got the unknown fields {unknown}; expected some of {sorted(_FIELDS[path])}.")
    return body


def _key_of(scope: Scope) -> str | None:
    given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
    kind, _, key = given.decode("latin-1").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None
