"""Packs and facts over HTTP: `/v1/packs` and `/v1/facts` have the served model compile texts, and return handles."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, dropwhile, islice
from typing import Any, Literal

import torch
from torch import Tensor

from kp_core import ChatTemplate, Fact, FactStore, Handle, Hit, ModelFingerprint, PackStore, find_handles
from kp_core.banks.base import Added
from kp_core.banks.compiling import provenance_of
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError, PackNotFoundError, PromptError
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.prompt.conversation import SLOT
from kp_serve.rights import Rights, salt_of, server_key
from kp_serve.wire import Access, HTTPError, Visit, read_keys, send_bytes

VARIABLE = "KP_SERVE"
"""Environment variable with which `kp serve` passes its settings, as JSON, to the middleware."""

_HOT = 4096
_FIELDS = ("text", "title", "source", "metadata", "id", "expires")
_MOST, _AT_ONCE = 1000, 16  # Most facts of one request; most that vLLM compiles at a time.
_COUNTERS = {
    "packs_delivered": "Packs that handles in chat messages brought",
    "pack_tokens": "Tokens of these packs",
    "handles_left": "Handles in chat messages that brought nothing",
    "packs_compiled": "Texts that were compiled",
    "facts_added": "Facts that were stored",
    "fact_searches": "Searches for facts",
    "requests_refused": "Requests that were answered with an error of ours",
}


@dataclass(frozen=True)
class ServerState:
    """The state of one server: its pack store, model, keys, fact store if it has one, and counters.

    Counters and hot packs change in the event loop's thread alone.
    """

    store: PackStore
    model: str
    identity: ModelFingerprint
    keys: Mapping[str, Access] | Access
    """The rights of each key, or those of everybody, where no key is needed."""
    key: bytes
    facts: FactStore | None = None
    immovable: str = ""
    """Why the model's keys (of its KV) cannot be moved to other positions; empty if they can."""
    packets: bool = False
    """Whether the server wraps packs in soft tokens."""
    unresolved: Literal["error", "text"] = "error"
    """What a handle in a chat message becomes that brings no pack."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counters of `_COUNTERS` since this process started, over all tenants, as every key may read them."""
    hot: dict[Handle, None] = field(default_factory=dict)
    """The packs that this server used last, latest last. Their KV is in vLLM's cache until vLLM evicts it."""

    @classmethod
    def of_environment(cls) -> ServerState:
        """Build it from the settings in `VARIABLE`."""
        from kp_core.banks.chroma import ChromaFactStore

        settings = json.loads(os.environ[VARIABLE])
        key = server_key()
        return cls(
            PackStore(settings["store"], seal=key if settings["sealed"] else None),
            settings["model"],
            ModelFingerprint.from_dict(settings["identity"]),
            read_keys() or Access(tuple(settings["namespaces"]), write=True),
            key,
            None if settings["facts"] is None else ChromaFactStore(settings["facts"]),
            **{name: settings[name] for name in ("immovable", "packets", "unresolved")},
        )

    @cached_property
    def tokenizer(self) -> Any:  # noqa: ANN401
        """The model's tokenizer."""
        from kp_core.engines.hf.identity import load_tokenizer

        return load_tokenizer(self.model)

    @cached_property
    def embeddings(self) -> Callable[[Sequence[int]], Tensor]:
        """The model's input embeddings. Raises `UnsupportedRequestError` if they cannot be read."""
        from kp_core.engines.hf.unloaded import token_embeddings

        return token_embeddings(self.model)

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return ChatTemplate(self.tokenizer)

    def note_used(self, named: str, namespaces: Collection[str]) -> None:
        """Mark the handles in `named` of these namespaces as just used."""
        for _, _, handle in find_handles(named):
            if handle.namespace in namespaces:
                self.hot.pop(handle, None)
                self.hot[handle] = None
        while len(self.hot) > _HOT:
            del self.hot[next(iter(self.hot))]

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.get_added_vocab())

    def refuse_special(self, value: object) -> None:
        """Raise `HTTPError` if a text in `value` contains a special token: it would not stay text."""
        for text in _strings(value):
            if special := next((token for token in self._special if token in text), None):
                said = f"Got the text of the special token {special!r}, which would not stay text. Remove it."
                raise HTTPError(400, said)

    def tokens_of(self, pack: KnowledgePack) -> int:
        """Number of tokens of a pack, without the one or two that may merge with the text around it."""
        if pack.token_ids and pack.fingerprint.same_model(self.identity):
            return len(pack.token_ids)
        return len(self.tokenizer.encode(pack.text, add_special_tokens=False))

    async def answer(self, visit: Visit) -> None:
        """Answer one request below `/v1/packs`."""
        method, name = visit.scope["method"], visit.scope["path"].removeprefix("/v1/packs").strip("/")
        if (method, name) == ("GET", "model"):
            access = visit.access
            report = {"root": self.model, "identity": self.identity.to_dict(), **await _served(visit)}
            return await visit.answer({**report, "namespaces": access.namespaces, "write": access.write})
        if (method, name) == ("POST", ""):
            body = await visit.read()
            refuse_unknown(body, {"text", "namespace", "compiled_for", "provenance"})
            return await visit.answer(await self.compile(visit, **{"text": None} | body))
        if (method, name) == ("GET", ""):
            return await visit.answer({"object": "list", "data": await asyncio.to_thread(self._listed, visit)})
        if method not in ("GET", "DELETE"):
            raise HTTPError(405, f"/v1/packs has no {method}; it has GET, POST and DELETE.")
        if name == "":
            return await visit.answer(await asyncio.to_thread(self._deleted, visit, await visit.read()))
        handle = self.handle("kp:" + name.removeprefix("kp:"), visit.access)
        if method == "GET":
            return await visit.answer(await asyncio.to_thread(self._described, handle))
        visit.need_write()
        with suppress(PackNotFoundError):  # Another client deleted it meanwhile.
            await asyncio.to_thread(self.store.remove, handle)
        return await visit.answer({"handle": str(handle), "deleted": True})

    def _listed(self, visit: Visit) -> list[str]:
        """Handles that the key may read; with `?hot=1` only packs that were used, latest first."""
        if visit.query.get("hot") == ["1"]:
            used = [handle for handle in reversed(self.hot) if handle.namespace in visit.namespaces]
            return [str(handle) for handle in used if handle in self.store]
        return [str(handle) for name in visit.namespaces for handle in self.store.handles(name)]

    async def answer_metrics(self, visit: Visit) -> None:
        """Answer `/metrics` with vLLM's metrics, followed by our counters, in Prometheus' text format."""
        response = await visit.call("GET", f"/metrics?{visit.scope['query_string'].decode('latin-1')}")
        counters = "".join(
            f"# HELP kp_{name}_total {text}.\n# TYPE kp_{name}_total counter\nkp_{name}_total {self.counts[name]}\n"
            for name, text in _COUNTERS.items()
        )
        data = response.content
        if response.is_success:
            data = data.removesuffix(b"\n") + b"\n" + counters.encode()
        await send_bytes(visit.send, response.status_code, data, response.headers.get("content-type", "text/plain"))

    async def compile(
        self,
        visit: Visit,
        text: object,
        namespace: object = None,
        compiled_for: object = "user",
        provenance: object = None,
    ) -> dict[str, Any]:
        """Have the served model compile a text, unless its KV is stored, and describe its pack. Raises `HTTPError`."""
        pack_namespace = visit.writable(namespace)
        if not isinstance(text, str) or compiled_for not in ("user", "system"):
            raise HTTPError(400, "Expected 'text', a string, and 'compiled_for' of 'user' or 'system'.")
        origin = {} if provenance is None else provenance
        if not isinstance(origin, Mapping) or not all(isinstance(detail, str) for detail in origin.values()):
            raise HTTPError(400, "Expected 'provenance' of texts, e.g. {'title': 'Refunds'}.")
        # A client's own errata would stand in conversations in place of the text that the handle shows.
        if any(name.startswith("kp:") for name in origin):
            raise HTTPError(400, "Got a name in 'provenance' that begins with 'kp:'. These are for edits and seals.")
        self.refuse_special(text)
        # Clients of chat have no place for memory, which ends its line: their handle stands in the message itself.
        place = [{"role": str(compiled_for), "content": SLOT}]
        if compiled_for == "system":
            place.append({"role": "user", "content": "?"})
        prefix, token_ids = await asyncio.to_thread(self.template.tokenise_pack, text, place)
        limits = await _served(visit)
        ids = [*prefix, *token_ids]
        if len(ids) >= limits["max_positions"]:
            raise HTTPError(400, f"The text has {len(token_ids)} tokens; the model reads {limits['max_positions']}.")
        pack = KnowledgePack(text, pack_namespace, token_ids, prefix, self.identity, provenance=origin)
        handle = await asyncio.to_thread(self.store.put, pack)
        report = await asyncio.to_thread(self._described, handle, pack.key)
        if report["compiled"]:  # E.g. by an interrupted build that now runs again.
            return report
        await self.fill(visit, pack)
        return await asyncio.to_thread(self._described, handle, pack.key)

    async def fill(self, visit: Visit, pack: KnowledgePack) -> None:
        """Have the server compute and store the KV of a pack that has none."""
        rights = Rights((pack.namespace,), salt_of(visit.access.namespaces, self.key), save=True)
        ids = [*pack.prefix, *pack.token_ids]
        await self.prefill(visit, ids, rights, "The pack is stored as text; compiling it failed")
        self.counts.update(packs_compiled=1)

    async def prefill(self, visit: Visit, prompt: Sequence[int] | Tensor, rights: Rights, failed: str) -> int:
        """Have the server compute the missing KV of a prompt, with these rights. Returns the number of computed tokens.

        The prompt is token ids, or input embeddings `(tokens, hidden)`. Raises `HTTPError` with a message that begins
        with `failed`.
        """
        request: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        if isinstance(prompt, Tensor):
            data = io.BytesIO()
            torch.save(prompt, data)
            request["prompt_embeds"] = base64.b64encode(data.getvalue()).decode()
        else:
            request["prompt"] = list(prompt)
        signed_rights = {"cache_salt": rights.salt, "kv_transfer_params": rights.sign(self.key)}
        response = await visit.call("POST", "/v1/completions", request | signed_rights)
        if response.is_error:
            raise HTTPError(response.status_code, f"{failed}: {response.text[:500]}")
        usage = response.json()["usage"]
        return int(usage["prompt_tokens"] - ((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0))

    def _deleted(self, visit: Visit, body: dict[str, Any]) -> dict[str, Any]:
        """Delete the pack of a text, if there is one, for clients whose stores have other handles."""
        refuse_unknown(body, {"text", "namespace"})
        namespace, text = visit.writable(body.get("namespace")), body.get("text")
        if not isinstance(text, str):
            raise HTTPError(400, "Expected a handle in the path, or 'text' and 'namespace' of a pack.")
        handle, is_there = self.store.handle(text, namespace), True
        try:
            self.store.remove(handle)
        except PackNotFoundError:
            is_there = False
        return {"handle": str(handle), "deleted": is_there}

    def handle(self, name: str, access: Access) -> Handle:
        """Parse a handle that exists and that the key may read. All other names raise the same `HTTPError` 404."""
        with suppress(PromptError):
            handle = Handle.parse(name)
            if handle.namespace in access.namespaces and handle in self.store:
                return handle
        raise HTTPError(404, f"There is no pack {name!r}.")

    def _described(self, handle: Handle, key: PackKey | None = None) -> dict[str, Any]:
        key = key or PackKey(self.identity)
        pack = self.store.peek(handle, key)
        if pack is None:
            raise HTTPError(404, f"There is no pack {str(handle)!r}.")
        report = {"handle": str(handle), "text": pack.text, "tokens": len(pack.token_ids)}
        report["compiled"] = key.fits(pack) and pack.stored_bytes > 0
        return {**report, "bytes": pack.stored_bytes, "provenance": dict(pack.provenance)}


async def _served(visit: Visit) -> dict[str, Any]:
    """The name that vLLM gives its model, and the number of positions it serves."""
    entry = (await visit.call("GET", "/v1/models")).json()["data"][0]
    return {"model": entry["id"], "max_positions": entry["max_model_len"]}


def refuse_unknown(body: Mapping[str, object], fields: Collection[str]) -> None:
    """Raise `HTTPError` for fields of `body` that are not among `fields`."""
    if unknown := body.keys() - set(fields):
        raise HTTPError(400, f"Got the unknown fields {sorted(unknown)}; expected some of {sorted(fields)}.")


def _strings(value: object) -> Iterator[str]:
    """All strings in a JSON value, names of fields included."""
    waiting = [value]
    while waiting:
        element = waiting.pop()
        if isinstance(element, str):
            yield element
        elif isinstance(element, dict | list):
            waiting += element
            waiting += element.values() if isinstance(element, dict) else []


async def answer_facts(state: ServerState, visit: Visit) -> None:
    """Answer one request below `/v1/facts`. Each fact has a pack of its own; both are added and deleted together."""
    if state.facts is None:
        raise HTTPError(
            404, "This server has no facts. Start it with `kp serve MODEL --store PLACE --facts COLLECTION`."
        )
    method, name = visit.scope["method"], visit.scope["path"].removeprefix("/v1/facts").removeprefix("/")
    if (method, name) == ("POST", ""):
        return await visit.answer(await _add(state, state.facts, visit, await visit.read()))
    if (method, name) == ("POST", "search"):
        result = await asyncio.to_thread(_search, state, state.facts, visit.access, await visit.read())
        state.counts.update(fact_searches=1)
        return await visit.answer(result)
    if method not in ("GET", "DELETE"):
        raise HTTPError(405, f"/v1/facts has no {method} of {name!r}; it has GET, POST and DELETE, and POST of search.")
    if method == "GET" and name == "":
        return await visit.answer(await asyncio.to_thread(_listed, state, state.facts, visit))
    if method == "DELETE":
        visit.need_write()
    fact = await asyncio.to_thread(_named, state.facts, name, visit)
    if method == "GET":
        return await visit.answer(await asyncio.to_thread(_about, state, fact))
    delivery = Delivery(state.facts, None, state.store, namespace=fact.namespace)
    await asyncio.to_thread(delivery.delete, [fact.id])
    return await visit.answer({"id": fact.id, "namespace": fact.namespace, "deleted": True})


async def _add(state: ServerState, store: FactStore, visit: Visit, body: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown(body, {"facts", "namespace", "compiled_for"})
    records, compiled_for = body.get("facts"), body.get("compiled_for", "user")
    namespace = visit.writable(body.get("namespace"))
    if not isinstance(records, list) or not all(isinstance(item, dict) for item in records) or len(records) > _MOST:
        raise HTTPError(400, f"Expected 'facts', a list of at most {_MOST} objects, e.g. [{{'text': …}}].")
    for record in records:
        refuse_unknown(record, _FIELDS)
    # Check all facts before the first is compiled.
    facts = [Fact(**{"text": ""} | item, namespace=namespace) for item in records]
    state.refuse_special([fact.text for fact in facts])
    turn = asyncio.Semaphore(_AT_ONCE)

    async def compiled(fact: Fact) -> None:
        async with turn:
            await state.compile(visit, fact.text, namespace, compiled_for, provenance_of(fact, "fact"))

    # Compile first: a fact that cannot be compiled must not be stored, as searches would find it.
    units = {fact.text: fact for fact in facts}
    new = [handle for text in units if (handle := state.store.handle(text, namespace)) not in state.store]

    async def added() -> Added:
        results = await asyncio.gather(*map(compiled, units.values()), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error
        return await asyncio.to_thread(store.add, facts)

    try:
        report = await added()
    except Exception:  # All or none.
        for handle in new:
            with suppress(PackNotFoundError):
                await asyncio.to_thread(state.store.remove, handle)
        raise
    state.counts.update(facts_added=report.added)

    def stored() -> list[dict[str, Any]]:
        where = {"kp:digest": {"$in": [fact.digest for fact in facts]}}
        known = list(store.facts(where=where, namespace=namespace)) if facts else []
        known_by = {(fact.source, fact.text): fact for fact in known}
        ids = {fact.id: fact for fact in known}
        found = (ids.get(fact.id) or known_by.get((fact.source, fact.text)) for fact in facts)
        return [_about(state, fact) for fact in {fact.id: fact for fact in found if fact is not None}.values()]

    counts = {"added": report.added, "duplicates": report.duplicates, "superseded": report.superseded}
    return {"object": "list", "data": await asyncio.to_thread(stored), **counts}


def _search(state: ServerState, store: FactStore, access: Access, body: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown(body, {"question", "k", "namespace", "where"})
    question, k, filters = body.get("question"), body.get("k", 4), body.get("where")
    requested = body.get("namespace", list(access.namespaces))
    if not isinstance(question, str) or type(k) is not int or not 1 <= k <= _MOST:
        raise HTTPError(400, f"Expected 'question', a text, and 'k' from 1 to {_MOST}.")
    if filters is not None and not isinstance(filters, dict):
        raise HTTPError(400, """Expected 'where', a filter, e.g. {"lang": "en"}.""")
    names = [name for name in access.namespaces if name in (requested if isinstance(requested, list) else [requested])]
    hits = list[Hit]()
    for name in set(names) & set(store.namespaces()):
        try:
            delivery = Delivery(store, None, state.store, namespace=name)
            hits += [found.hit for found in delivery.search(question, k, where=filters)]
        except FactError:
            if store.namespaces():  # Otherwise the last facts were deleted meanwhile.
                raise
    best = sorted(hits, key=lambda hit: (-hit.score, hit.fact.namespace, hit.fact.id))[:k]
    return {"object": "list", "data": [{**_about(state, hit.fact), "score": hit.score} for hit in best]}


def _listed(state: ServerState, store: FactStore, visit: Visit) -> dict[str, Any]:
    limit, after = visit.query.get("limit", ["100"])[-1], visit.query.get("after", [""])[-1]
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST:
        raise HTTPError(400, f"Got limit={limit!r}; expected a number from 1 to {_MOST}.")
    facts: Iterator[Fact] = chain.from_iterable(store.facts(namespace=name) for name in visit.namespaces)
    if after:
        facts = islice(dropwhile(lambda fact: fact.id != after, facts), 1, None)
    data = [_about(state, fact) for fact in islice(facts, int(limit))]
    return {"object": "list", "data": data, "has_more": next(facts, None) is not None}


def _named(store: FactStore, name: str, visit: Visit) -> Fact:
    """The fact with this id, if it exists and the key may read it. All other ids raise the same `HTTPError` 404."""
    for namespace in visit.namespaces:
        for fact in store.facts(ids=[name], namespace=namespace):
            return fact
    raise HTTPError(404, f"There is no fact {name!r}.")


def _about(state: ServerState, fact: Fact) -> dict[str, Any]:
    handle = state.store.handle(fact.text, fact.namespace)
    record = {name: getattr(fact, name) for name in (*_FIELDS, "namespace", "version")}
    record["metadata"] = dict(fact.metadata)
    return {**record, "handle": str(handle) if handle in state.store else None}
