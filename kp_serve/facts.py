"""Facts over HTTP: `/v1/facts` stores texts, finds them by meaning, and returns handles of their packs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, islice
from typing import Any

from kp_core.errors import PackNotFoundError
from kp_core.facts import Fact, FactStore, Hit
from kp_serve.access import Access
from kp_serve.desk import Desk, refuse_unknown
from kp_serve.wire import HTTPError, Visit

__all__ = ["answer_facts"]

_FIELDS = ("text", "title", "source", "metadata", "id", "expires")
_MOST, _AT_ONCE = 1000, 16  # Most facts of one request; most that vLLM compiles at a time.


async def answer_facts(desk: Desk, visit: Visit) -> None:
    """Answer one request below `/v1/facts`. Each fact has a pack of its own; both are added and deleted together."""
    if desk.facts is None:
        raise HTTPError(
            404, "This server has no facts. Start it with `kp serve MODEL --store PLACE --facts COLLECTION`."
        )
    method, name = visit.scope["method"], visit.scope["path"].removeprefix("/v1/facts").removeprefix("/")
    facts = _Facts(desk, desk.facts)
    if (method, name) == ("POST", ""):
        return await visit.answer(await facts.add(visit, await visit.read()))
    if (method, name) == ("POST", "search"):
        result = await asyncio.to_thread(facts.search, visit.access, await visit.read())
        desk.counts.add(fact_searches=1)
        return await visit.answer(result)
    if method not in ("GET", "DELETE"):
        raise HTTPError(405, f"/v1/facts has no {method} of {name!r}; it has GET, POST and DELETE, and POST of search.")
    if method == "GET" and name == "":
        return await visit.answer(await asyncio.to_thread(facts.listed, visit))
    if method == "GET":
        return await visit.answer(await asyncio.to_thread(lambda: facts.about(facts.named(name, visit))))
    visit.need_write()
    return await visit.answer(await asyncio.to_thread(facts.delete, name, visit))


class _Facts:
    def __init__(self, desk: Desk, facts: FactStore) -> None:
        self._desk, self._facts = desk, facts

    async def add(self, visit: Visit, body: dict[str, Any]) -> dict[str, Any]:
        refuse_unknown(body, {"facts", "namespace", "compiled_for"})
        records, where = body.get("facts"), body.get("compiled_for", "user")
        namespace = visit.writable(body.get("namespace"))
        if not isinstance(records, list) or not all(isinstance(item, dict) for item in records) or len(records) > _MOST:
            raise HTTPError(400, f"Expected 'facts', a list of at most {_MOST} objects, e.g. [{{'text': …}}].")
        for record in records:
            refuse_unknown(record, _FIELDS)
        # Check all facts before the first is compiled.
        facts = [Fact(**{"text": ""} | item, namespace=namespace) for item in records]
        self._desk.refuse_special([fact.text for fact in facts])
        turn = asyncio.Semaphore(_AT_ONCE)

        async def compiled(fact: Fact) -> None:
            origin = {"title": fact.title, "source": fact.source, "unit": "fact"}
            async with turn:
                provenance = {key: detail for key, detail in origin.items() if detail}
                await self._desk.compile(visit, fact.text, namespace, where, provenance)

        # Compile first: a fact that cannot be compiled must not be stored, as searches would find it.
        units = {fact.text: fact for fact in facts}
        results = await asyncio.gather(*map(compiled, units.values()), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error
        report = await asyncio.to_thread(self._facts.add, facts)
        self._desk.counts.add(facts_added=report.added)
        facts_by_text = await asyncio.to_thread(self._holding, list(units), namespace)
        data = [await asyncio.to_thread(self.about, facts_by_text[text]) for text in units if text in facts_by_text]
        counts = {"added": report.added, "duplicates": report.duplicates, "superseded": report.superseded}
        return {"object": "list", "data": data, **counts}

    def search(self, access: Access, body: dict[str, Any]) -> dict[str, Any]:
        refuse_unknown(body, {"question", "k", "namespace", "where"})
        question, k, filters = body.get("question"), body.get("k", 4), body.get("where")
        requested = body.get("namespace", list(access.namespaces))
        if not isinstance(question, str) or type(k) is not int or not 1 <= k <= _MOST:
            raise HTTPError(400, f"Expected 'question', a text, and 'k' from 1 to {_MOST}.")
        if filters is not None and not isinstance(filters, dict):
            raise HTTPError(400, """Expected 'where', a filter, e.g. {"lang": "en"}.""")
        names = [
            name for name in access.namespaces if name in (requested if isinstance(requested, list) else [requested])
        ]
        hits = list[Hit]()
        for name in set(names) & set(self._facts.namespaces()):
            # Facts may be deleted or expire meanwhile, and a search without facts raises.
            if next(iter(self._facts.facts(namespace=name)), None) is not None:
                hits += self._facts.search(question, k, where=filters, namespace=name)
        best = sorted(hits, key=lambda hit: (-hit.score, hit.fact.namespace, hit.fact.id))[:k]
        return {"object": "list", "data": [{**self.about(hit.fact), "score": hit.score} for hit in best]}

    def listed(self, visit: Visit) -> dict[str, Any]:
        limit, after = visit.query.get("limit", ["100"])[-1], visit.query.get("after", [""])[-1]
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST:
            raise HTTPError(400, f"Got limit={limit!r}; expected a number from 1 to {_MOST}.")
        facts = self._of(visit.namespaces)
        if after:
            facts = islice(dropwhile(lambda fact: fact.id != after, facts), 1, None)
        page = list(islice(facts, int(limit) + 1))
        data = [self.about(fact) for fact in page[: int(limit)]]
        return {"object": "list", "data": data, "has_more": len(page) > int(limit)}

    def delete(self, name: str, visit: Visit) -> dict[str, Any]:
        fact = self.named(name, visit)
        self._facts.delete([fact.id], namespace=fact.namespace)
        if not self._holding([fact.text], fact.namespace):  # Another fact may have the same text.
            with suppress(PackNotFoundError):
                self._desk.store.remove(self._desk.store.handle(fact.text, fact.namespace))
        return {"id": fact.id, "namespace": fact.namespace, "deleted": True}

    def named(self, name: str, visit: Visit) -> Fact:
        """The fact with this id, if it exists and the key may read it. All other ids raise the same `HTTPError` 404."""
        fact = next(self._of(visit.namespaces, [name]), None)
        if fact is None:
            raise HTTPError(404, f"There is no fact {name!r}.")
        return fact

    def _of(self, namespaces: Sequence[str], ids: Sequence[str] | None = None) -> Iterator[Fact]:
        for name in namespaces:
            yield from self._facts.facts(ids=ids, namespace=name)

    def _holding(self, texts: Sequence[str], namespace: str) -> Mapping[str, Fact]:
        digests = [Fact(text).digest for text in texts]
        stored = self._facts.facts(where={"kp:digest": {"$in": digests}}, namespace=namespace) if texts else ()
        return {fact.text: fact for fact in stored}

    def about(self, fact: Fact) -> dict[str, Any]:
        handle = self._desk.store.handle(fact.text, fact.namespace)
        record = {name: getattr(fact, name) for name in (*_FIELDS, "namespace", "version")}
        record["metadata"] = dict(fact.metadata)
        return {**record, "handle": str(handle) if handle in self._desk.store else None}
