"""The packs of a server over HTTP: `/v1/packs` takes texts and gives handles; the server's own model compiles them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs

from kp_core.engines.vllm.access import Access, Keys
from kp_core.engines.vllm.rights import Rights, salt_of, server_key
from kp_core.engines.vllm.wire import App, HTTPError, Receive, Scope, Send, call, read_json, send_json
from kp_core.errors import HandleError, PackNotFoundError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.store import PackStore
from kp_core.prompt.cuts import prefix_of
from kp_core.prompt.template import ChatTemplate

__all__ = ["VARIABLE", "Desk"]

VARIABLE = "KP_SERVE"
"""The environment variable that hands JSON with the fields below from `kp serve` to its middleware."""


@dataclass(frozen=True)
class Desk:
    """The store, the model's template and the keys of one server."""

    store: PackStore
    model: str
    identity: ModelFingerprint
    keys: Keys
    key: bytes

    @classmethod
    def of_environment(cls) -> Desk:
        """As `kp serve` said in `VARIABLE`."""
        given = json.loads(os.environ[VARIABLE])
        everybody = None if given["keys"] else Access(tuple(given["namespaces"]), write=True)
        identity = ModelFingerprint.from_dict(given["identity"])
        key = server_key()
        store = PackStore(given["store"], seal=key if given["sealed"] else None)
        return cls(store, given["model"], identity, Keys(given["keys"], everybody), key)

    @cached_property
    def tokenizer(self) -> Any:  # noqa: ANN401
        """The model's tokenizer."""
        from kp_core.engines.hf.loading import load_tokenizer

        return load_tokenizer(self.model)

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return ChatTemplate(self.tokenizer)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.get_added_vocab())

    def refuse_special(self, said: object) -> None:
        """Raise `HTTPError` where any text in `said` holds a token that steers the model: it would not stay text."""
        for text in _strings(said):
            if found := next((token for token in self._special if token in text), None):
                raise HTTPError(
                    400, f"Got the text of the special token {found!r}, which would not stay text. Remove it."
                )

    async def answer(self, app: App, scope: Scope, access: Access, receive: Receive, send: Send) -> None:
        """One request below `/v1/packs`."""
        method, name = scope["method"], scope["path"].removeprefix("/v1/packs").strip("/")
        if (method, name) == ("GET", "model"):
            return await send_json(send, 200, await self._about(app, scope, access))
        if (method, name) == ("POST", ""):
            return await send_json(send, 200, await self._compile(app, scope, access, await read_json(receive)))
        if (method, name) == ("GET", ""):
            asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("namespace", access.namespaces)
            names = [each for each in asked if each in access.namespaces]
            found = await asyncio.to_thread(lambda: [str(each) for name in names for each in self.store.handles(name)])
            return await send_json(send, 200, {"object": "list", "data": found})
        if method not in ("GET", "DELETE"):
            raise HTTPError(405, f"/v1/packs has no {method}; it has GET, POST and DELETE.")
        handle = self._handle(name, access)
        if method == "GET":
            return await send_json(send, 200, await asyncio.to_thread(self._told, handle))
        _need_write(access)
        with suppress(PackNotFoundError):  # Deleted meanwhile, by somebody else.
            await asyncio.to_thread(self.store.remove, handle)
        return await send_json(send, 200, {"handle": str(handle), "deleted": True})

    async def _about(self, app: App, scope: Scope, access: Access) -> dict[str, Any]:
        _, models = await call(app, scope, "GET", "/v1/models")
        served = models["data"][0]
        about = {"model": served["id"], "root": self.model, "max_positions": served["max_model_len"]}
        return {**about, "identity": self.identity.to_dict(), "namespaces": access.namespaces, "write": access.write}

    async def _compile(self, app: App, scope: Scope, access: Access, body: dict[str, Any]) -> dict[str, Any]:
        _need_write(access)
        text, namespace, where = body.get("text"), body.get("namespace"), body.get("compiled_for", "user")
        if unknown := body.keys() - {"text", "namespace", "compiled_for"}:
            raise HTTPError(400, f"Got the unknown fields {sorted(unknown)}; expected text, namespace, compiled_for.")
        if not isinstance(text, str) or where not in ("user", "system"):
            raise HTTPError(400, "Expected 'text', a string, and 'compiled_for' of 'user' or 'system'.")
        if namespace not in access.namespaces:
            raise HTTPError(404, f"Got the namespace {namespace!r}; expected one of {list(access.namespaces)}.")
        self.refuse_special(text)
        job = await asyncio.to_thread(self.template.tokenise_pack, text, where)
        prefix = prefix_of(job.prompt, job.prompt.spans[0], int(self.identity.chunk_tokens))
        about = await self._about(app, scope, access)
        ids = [*prefix.token_ids, *job.token_ids]
        if len(ids) >= about["max_positions"]:
            raise HTTPError(400, f"The text has {len(job.token_ids)} tokens; the model reads {about['max_positions']}.")
        pack = KnowledgePack(text, namespace, job.token_ids, prefix, self.identity)
        handle = await asyncio.to_thread(self.store.put, pack)
        salt = salt_of(access.namespaces, self.key)
        rights = Rights((namespace,), salt, save=True).sign(self.key)
        ask = {
            "model": about["model"],
            "prompt": ids,
            "max_tokens": 1,
            "cache_salt": salt,
            "kv_transfer_params": rights,
        }
        status, answer = await call(app, scope, "POST", "/v1/completions", ask)
        if status != 200:
            raise HTTPError(status, f"The pack is stored as text; compiling it failed: {answer}")
        return await asyncio.to_thread(self._told, handle)

    def _handle(self, name: str, access: Access) -> Handle:
        """The handle in a path, where the key may read it and it is there: all else is the same 404."""
        with suppress(HandleError):
            handle = Handle.parse("kp:" + name.removeprefix("kp:"))
            if handle.namespace in access.namespaces and handle in self.store:
                return handle
        raise HTTPError(404, f"There is no pack {name!r}.")

    def _told(self, handle: Handle) -> dict[str, Any]:
        pack = self.store.peek(handle, PackKey(self.identity))
        if pack is None:
            raise HTTPError(404, f"There is no pack {str(handle)!r}.")
        is_ours = pack.fingerprint == self.identity and pack.stored_bytes > 0
        compiled = is_ours and self.store.is_sealed(handle, PackKey(self.identity))
        about = {"handle": str(handle), "text": pack.text, "tokens": len(pack.token_ids), "compiled": compiled}
        return {**about, "bytes": pack.stored_bytes, "provenance": dict(pack.provenance)}


def _need_write(access: Access) -> None:
    if not access.write:
        raise HTTPError(403, "This key reads packs and may not change them. Ask for a key made with --write.")


def _strings(value: object) -> Iterator[str]:
    """All texts in JSON, names of fields included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            waiting += each
