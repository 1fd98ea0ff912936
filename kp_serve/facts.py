"""Facts over HTTP: `/v1/facts` stores texts, finds them by meaning, and returns handles of their packs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain, dropwhile, islice
from typing import Any

from kp_core import Fact, FactStore, Hit
from kp_core.banks.compiling import provenance_of
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError
from kp_serve.access import Access
from kp_serve.state import ServerState, refuse_unknown
from kp_serve.wire import HTTPError, Visit

_FIELDS = ("text", "title", "source", "metadata", "id", "expires")
_MOST, _AT_ONCE = 1000, 16  # Most facts of one request; most that vLLM compiles at a time.


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
    results = await asyncio.gather(*map(compiled, units.values()), return_exceptions=True)
    for error in results:
        if error is not None:
            raise error
    report = await asyncio.to_thread(store.add, facts)
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
