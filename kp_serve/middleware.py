"""Middleware around vLLM's own endpoints, as `kp serve` passes it: keys, handles, rights; answers without handles."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Collection, Coroutine, Iterator, MutableMapping
from typing import Any

from kp_core.errors import FactError, FactStoreLockedError, KnowledgePackError
from kp_core.packs.handle import handles_like
from kp_core.packs.view import PackRef, PackView, why_unresolved
from kp_core.prompt.conversation import texts_of
from kp_core.session.reading import VisibleText
from kp_serve.asked import COMPUTED, FIRST_PACK
from kp_serve.preparing import prepared
from kp_serve.rights import Rights, salt_of
from kp_serve.state import ServerState, answer_facts, refuse_unknown
from kp_serve.wire import Access, App, HTTPError, Receive, Scope, Send, Visit, access_of, replay, send_json

logger = logging.getLogger(__name__)

_GET = {"/v1/models", "/metrics", "/version"}
_BOTH = (
    "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream "
    "stream_options temperature top_p user top_k min_p stop_token_ids repetition_penalty ignore_eos min_tokens "
    "skip_special_tokens structured_outputs metadata return_token_ids store service_tier"
)
_CHAT = (
    "messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort "
    "include_reasoning chat_template_kwargs add_generation_prompt continue_final_message functions function_call"
)
_PLAIN = "prompt suffix best_of kp logprob_token_ids return_tokens_as_token_ids"
_FIELDS = {
    "/v1/completions": {*_BOTH.split(), *_PLAIN.split()},
    "/v1/chat/completions": {*_BOTH.split(), *_CHAT.split()},
}
_LOOK_SECONDS = 0.5
_DROPPED = {"cache_salt", "kv_transfer_params"}
_REFUSED = {"echo", "prompt_logprobs", "prompt_embeds"}
_ROLES = {"developer": "system", "function": "tool"}
# Headers that are not passed on: the body changes, and answers must come uncompressed, as `Answer` reads them.
_OF_THE_BODY = {b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"accept-encoding"}
_TEXTS = {"text", "content", "reasoning", "reasoning_content", "refusal", "arguments"}
_PARTS = {"message", "delta", "function", "function_call"}
_END = b"\n\n"


class PackMiddleware:
    """Lets only listed endpoints through, resolves handles in chat messages for the key, and signs the key's rights.

    A client's own `cache_salt` and `kv_transfer_params` are dropped. Unknown fields, and fields that would show the
    prompt, are refused. Answers of the model contain no handles. Everything else, templates and parsers included, is
    vLLM's own.
    """

    def __init__(self, app: App) -> None:
        self.app, self.state = app, ServerState.of_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        started = False

        async def tracked(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await until_end(scope, self._answer(scope, receive, tracked))
        except Exception as error:
            if started:
                raise
            refusal = _refusal(error)
            self.state.counts.update(requests_refused=1)
            await send_json(send, refusal.status, refusal.body)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/health"):
            return await self.app(scope, receive, send)
        kind, _, key = _header(scope, "authorization").partition(" ")
        access = access_of(self.state.keys, key.strip() if kind.lower() == "bearer" else None)
        if access is None:
            raise HTTPError(401, "The API key is missing or not one of this server. Send 'Authorization: Bearer KEY'.")
        visit = Visit(self.app, scope, receive, send, access)
        if f"{path}/".startswith("/v1/packs/"):
            return await self.state.answer(visit)
        if f"{path}/".startswith("/v1/facts/"):
            return await answer_facts(self.state, visit)
        if (method, path) == ("GET", "/metrics"):
            return await self.state.answer_metrics(visit)
        if method == "GET" and path in _GET:
            return await self.app(scope, receive, send)
        if method != "POST" or path not in _FIELDS:
            endpoints = ", ".join(sorted(_FIELDS))
            raise HTTPError(404, f"This server has no {method} {path}; it has {endpoints}, /v1/packs, /v1/facts.")
        body, computed = _checked(await visit.read(), path), None
        delivered = await self._delivered(body, path, access)
        self.state.note_used(_header(scope, FIRST_PACK), access.namespaces)
        rights = self._rights(body, access)
        if "kp" in body:
            rights, computed = await prepared(self.state, visit, body)
        body |= {"cache_salt": rights.salt, "kv_transfer_params": rights.sign(self.state.key)}
        headers, replayed = replay(body, receive)
        kept_headers = [pair for pair in scope["headers"] if pair[0].lower() not in _OF_THE_BODY]
        inner = {**scope, "headers": [*kept_headers, *headers], "query_string": b""}
        return await self.app(inner, replayed, Answer(send, delivered, computed))

    async def _delivered(self, body: dict[str, Any], path: str, access: Access) -> dict[str, int] | None:
        """Put texts in place of the handles in a chat's messages. Returns the tokens of these, and the handles left.

        Logs handles that bring no pack. Unless they may be text, raises `HTTPError` for one of a trusted role, and for
        one in the text of a completion, which no chat template would set apart.
        """
        if path != "/v1/chat/completions":
            if self.state.unresolved == "error":
                _refuse_handles(body.get("prompt"))
            return None
        view = PackView(self.state.store, access.namespaces, access.trusted_roles)
        # In another thread: the store may be remote, and all requests share the event loop.
        body["messages"], refs, left = await asyncio.to_thread(_resolved, body.get("messages"), view)
        self.state.counts.update(handles_left=len(left))
        for name, role in left:
            logger.warning("Handle %s does not resolve: %s.", name, why_unresolved(name, view, role))
        if self.state.unresolved == "error":
            for name in (name for name, role in left if role in access.trusted_roles):
                # The same error for packs of others and packs that do not exist.
                raise HTTPError(404, f"There is no pack {name!r}. Nothing was answered without its knowledge.")
        self.state.refuse_special([body["messages"], body.get("tools"), body.get("functions")])
        tokens = sum(map(self.state.tokens_of, (ref.pack for ref in refs)))
        self.state.note_used(" ".join(ref.handle for ref in refs), access.namespaces)
        self.state.counts.update(packs_delivered=len(refs), pack_tokens=tokens)
        return {"pack_tokens": tokens, "unresolved": len(left)}

    def _rights(self, body: dict[str, Any], access: Access) -> Rights:
        """The rights of the key; none for a request with `reuse: false`, which must find no KV."""
        if body.get("kp") != {"reuse": False}:
            return Rights(access.namespaces, salt_of(access.namespaces, self.state.key), save=access.write)
        del body["kp"]
        # A random salt, so that vLLM's own prefix cache has nothing for it either.
        return Rights((), secrets.token_hex(16))


def _resolved(messages: object, view: PackView) -> tuple[list[Any], list[PackRef], Collection[tuple[str, str]]]:
    """The messages with handles replaced by texts, the packs of these, and the handles left as text by role."""
    if not isinstance(messages, list) or not all(isinstance(entry, dict) for entry in messages):
        raise HTTPError(400, "Got no list of messages; expected 'messages': [{'role': …, 'content': …}].")
    delivered, left = list[PackRef](), dict[tuple[str, str], None]()

    def resolve(text: str, role: str) -> str:
        parts = view.split(text, role)
        delivered.extend(part for part in parts if isinstance(part, PackRef))
        names = (name for part in parts if isinstance(part, str) for name in handles_like(part))
        left.update(dict.fromkeys((name, role) for name in names))
        return "".join(part.text if isinstance(part, PackRef) else part for part in parts)

    resolved = []
    for message in messages:
        role = _ROLES.get(str(message.get("role")), str(message.get("role")))
        if (content := message.get("content")) is not None:
            text = "".join(resolve(text, role) for text in texts_of({"role": role, "content": content}))
            message = {**message, "content": text}  # noqa: PLW2901
        resolved.append(message)
    return resolved, delivered, left


def _refuse_handles(prompt: object) -> None:
    """Raise `HTTPError` for a handle in the text of a completion, which no chat template would set apart."""
    texts = (text for text in (prompt if isinstance(prompt, list) else [prompt]) if isinstance(text, str))
    if name := next((name for text in texts for name in handles_like(text)), ""):
        raise HTTPError(400, f"Got {name} in a prompt; handles are read in messages. Ask /v1/chat/completions.")


async def until_end(scope: Scope, answer: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - what it returns
    """Wait for an answer. Raises `HTTPError` 503 at the server's end, as requests would wait for its engine for ever.

    An answer that has begun is cut off, which clients see.
    """
    task = asyncio.ensure_future(answer)
    server = getattr(getattr(scope.get("app"), "state", None), "server", None)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
            if getattr(server, "should_exit", False) and not task.done():
                raise HTTPError(503, "The server is ending. Ask again when it is back, or another one.")
        return await task
    finally:
        task.cancel()


def _refusal(error: Exception) -> HTTPError:
    """The error for the client: never a traceback, nor paths on the server."""
    if isinstance(error, HTTPError):
        return error
    # A `FactError` that a failing database caused has the database's error as its cause. One that the client caused
    # has no cause, a `ValueError` or one of our errors.
    fails = isinstance(error, FactError) and not isinstance(error.__cause__, ValueError | KnowledgePackError | None)
    if fails or isinstance(error, OSError | FactStoreLockedError):
        logger.error("The store of packs or facts cannot be used: %s", error)
        reason = getattr(error, "strerror", None) or type(error.__cause__ or error).__name__
        return HTTPError(503, f"The server's store cannot be used now ({reason}). Try again later.")
    if isinstance(error, KnowledgePackError):
        return HTTPError(400, str(error))
    if isinstance(error, UnicodeEncodeError):
        return HTTPError(400, f"The body holds what is no text ({error.reason}).")
    if isinstance(error, RecursionError):
        return HTTPError(400, "The body is nested too deep.")
    logger.error("A request failed.", exc_info=error)
    return HTTPError(500, "The server failed to answer this request; its log says why.")


def _checked(body: dict[str, Any], path: str) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name not in _DROPPED}
    if refused := sorted(name for name in _REFUSED if body.pop(name, None)):
        raise HTTPError(400, f"This server does not take {', '.join(refused)}, as they show what packs hold.")
    refuse_unknown(body, _FIELDS[path])
    return body


def _header(scope: Scope, wanted: str) -> str:
    header: bytes = next((value for name, value in scope["headers"] if name.lower() == wanted.encode()), b"")
    return header.decode("latin-1")


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
