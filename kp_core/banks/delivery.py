"""Delivers search results as handles of packs, compiled by fact, bank or document."""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from kp_core.banks import Added, Fact, FactStore, Filter, Hit
from kp_core.banks.base import content_id
from kp_core.banks.compiling import Unit, compile_facts, find_compiled
from kp_core.errors import FactError, ModelError, OptionError, PackError, PackNotFoundError, PromptError, gone
from kp_core.events import log_event, warn_once
from kp_core.packs.codec import Compression
from kp_core.packs.handle import Handle, check_namespace, inert
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.store import open_packs
from kp_core.packs.view import Packs
from kp_core.plan.request import CompiledFor
from kp_core.session.session import Session

logger = logging.getLogger(__name__)

KV: TypeAlias = Literal["stored", "lazy"]
Precompile: TypeAlias = Literal["idle", "now"]

_QUIET_S = 0.2  # Between the end of a request and background compiling.
_BATCH = 1000  # Digests per query; SQLite takes at most 32,766 values.
_GROWTH = 4  # Facts fetched per wanted unit, and the growth factor if those were too few.


@dataclass(frozen=True)
class Found:
    """A unit that a search found: its best fact, the unit as one fact, and the handle of its pack if there is one."""

    hit: Hit
    unit: Fact
    handle: Handle | None

    @property
    def content(self) -> str:
        """What a model gets: the handle, else the text. Handles inside the text are made inert and not resolved."""
        return inert(self.unit.text) if self.handle is None else str(self.handle)


class Delivery:
    """Delivers `facts` as packs in `store` (or its path), compiled by `engine` for the position `compiled_for`.

    `unit`: `fact` is one fact; `bank` all facts of a bank, one per line, in the order they were added; `document` all
    facts of one source (a fact without a source is its own document). No unit crosses namespaces. Searches are limited
    to `namespace`; `None` is all of them. `kv`: `stored`, or `lazy` for only text and tokens. `compress` is how KV is
    stored (`KnowledgePack.compressed`). A unit that is found without a pack is compiled before the
    search returns; with `precompile="idle"` its pack has text and tokens alone until the engine is idle. Without an
    `engine`, a unit without a pack goes as text, with a warning. Without `facts`, only `deliver` works. Raises
    `FactError` for an unknown unit, kv, compress or precompile, `PromptError` for an invalid namespace
    or place.
    """

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        facts: FactStore | None,
        engine: Session | None,
        store: Packs | str | os.PathLike[str],
        *,
        unit: Unit = "fact",
        kv: KV = "stored",
        compiled_for: CompiledFor = "user",
        namespace: str | None = None,
        compress: Compression = "none",
        precompile: Precompile = "now",
    ) -> None:
        words = {"unit": (unit, Unit), "kv": (kv, KV), "precompile": (precompile, Precompile)}
        for name, (value, kind) in (words | {"compress": (compress, Compression)}).items():
            if value not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise FactError(f"Got {name}={value!r}; expected one of {choices}.{gone(name, value)}")
        is_messages = isinstance(compiled_for, Sequence) and all(isinstance(each, Mapping) for each in compiled_for)
        if compiled_for not in ("user", "system") and not is_messages:
            raise PromptError(
                f"Got compiled_for={compiled_for!r}; expected 'user', 'system', or messages with {{pack}}, as "
                "`pack_place(prompt)` of the adapters makes them."
            )
        self._facts, self.engine, self.store = facts, engine, open_packs(store)
        self.unit, self.kv, self.compiled_for, self.precompile = unit, kv, compiled_for, precompile
        self.namespace = None if namespace is None else check_namespace(namespace)
        self.compress = compress

    @property
    def facts(self) -> FactStore:
        """The fact store; raises `FactError` if there is none."""
        if self._facts is None:
            raise FactError(
                "There is no fact store to search or change; pass one: `Delivery(facts, engine, store)`. "
                "Change what an index or vector store of yours finds there."
            )
        return self._facts

    def add(self, facts: Iterable[Fact], *, overwrite: bool = False, progress: bool = True) -> Added:
        """Add `facts` (those without a namespace to this one) and compile their units.

        Packs of expired facts in their namespaces are deleted and, with `overwrite` (see `FactStore.add`), those of
        replaced texts.
        """
        self._compiler  # noqa: B018 - missed before anything is stored
        facts = [fact.moved(self.namespace) for fact in facts]
        texts = {(fact.namespace, fact.id): fact.text for fact in facts} if overwrite else {}
        stored = self.facts.facts(ids=[fact_id for _, fact_id in texts], namespace=self.namespace) if texts else ()
        outdated = [fact for fact in stored if texts.get((fact.namespace, fact.id), fact.text) != fact.text]
        expired: Filter = {"kp:expires": {"$lte": time.time()}}
        for space in dict.fromkeys(fact.namespace for fact in facts):
            outdated += self.facts.stored(where=expired, namespace=space)  # The fact store removes them when it adds.
        report = self.facts.add(facts, overwrite=overwrite)
        self._discard(outdated, texts)
        facts = [fact for fact in facts if fact.id not in report.superseded]
        units = facts
        if self.unit != "fact":  # A source may have the text of a fact under another id.
            stored = self.facts.facts(ids=list(dict.fromkeys(fact.id for fact in facts)))
            held = {(fact.namespace, fact.id) for fact in stored}
            units = self._units([fact for fact in facts if (fact.namespace, fact.id) in held], self.unit)
        logger.info("Compiling %d packs of %d facts.", len(units), len(facts))
        self.compile(units, progress=progress)
        return report

    def update(self, fact: Fact) -> Fact:
        """Replace the fact with the same id by `fact`; deletes its old pack and compiles the new one."""
        fact = fact.moved(self.namespace)
        stored = self.facts.get(fact.id, namespace=fact.namespace)
        fact = self.facts.update(fact)
        if stored.text != fact.text:
            self._discard([stored], {(fact.namespace, fact.id): fact.text})
        self.compile(self._units([fact], self.unit), progress=False)
        return fact

    def change(self, fact_id: str, changed: Callable[[KnowledgePack, Session], KnowledgePack]) -> Fact:
        """Put the pack that `changed` makes of a fact's pack in its place, and its text in that of the fact.

        Searches return the handle of the new pack from now on; that of the old text stays until `gc`. Returns the
        changed fact. Raises `FactError` for an unknown fact.
        """
        fact = self.facts.get(fact_id, namespace=self.namespace)
        if self.compile([fact], progress=False) == [None]:
            fact = self.facts.get(fact_id, namespace=self.namespace)  # Raises if it was deleted meanwhile.
        compiled_for = self.compiled_for
        plan = self._compiler.build_pack(fact.text, namespace=fact.namespace, compiled_for=compiled_for, lazy=True)
        pack = self.store.get(self.store.handle(fact.text, fact.namespace), plan.key)
        edited = changed(pack, self._compiler)
        self.store.put(pack)  # Writes nothing: a store that is only read raises here, before the fact changes.
        if not self._is_current(fact):
            self._discard([fact])
        fact = self.facts.update(replace(fact, text=edited.text))
        self.store.bury(self.store.handle(pack.text, fact.namespace), self.store.put(edited))
        if not self._is_current(fact):
            self._discard([fact])
        return fact

    def delete(
        self, ids: Iterable[str] | None = None, *, where: Filter | None = None, source: str | None = None
    ) -> list[Fact]:
        """Delete facts by id, by filter or by source document, and the packs that no fact uses any more.

        Expired facts are deleted, too. Returns the deleted facts. Packs of this object's unit are deleted now, those of
        other units by `gc`.
        """
        if ids is None and not where and not source:
            raise FactError("Got nothing to delete by; expected ids, where or source.")
        tests = [test for test in (where, source and {"kp:source": source}) if test]
        match: Filter | None = {"$and": tests} if tests else None
        fact_ids = None if ids is None else list(ids)
        deleted = list(self.facts.stored(ids=fact_ids, where=match, namespace=self.namespace))
        for space in dict.fromkeys(fact.namespace for fact in deleted):
            self.facts.delete([fact.id for fact in deleted if fact.namespace == space], namespace=space)
        self._discard(deleted)
        return deleted

    def orphans(self) -> list[Handle]:
        """Return the packs, in the namespaces of this object, whose facts no longer exist."""
        return self.used_and_not()[1]

    def used_and_not(self) -> tuple[list[Handle], list[Handle]]:
        """The packs in the namespaces of this object that facts of its collection use, and all others."""
        compiled = self.compiled()
        kinds = {str(pack.provenance["unit"]) for pack in compiled.values()}
        live = set[Handle]()
        for kind in kinds & set(get_args(Unit)):
            units = self._units(self.facts.facts(namespace=self.namespace), kind)  # type: ignore[arg-type]
            live |= {self.store.handle(unit.text, unit.namespace) for unit in units}
        return [each for each in compiled if each in live], [each for each in compiled if each not in live]

    def compiled(self) -> dict[Handle, KnowledgePack]:
        """Return the packs, without KV, that were made of facts or documents in the namespaces of this object."""
        handles = [handle for handle in self.store if self.namespace in (None, handle.namespace)]
        packs = {handle: pack for handle in handles if (pack := self.store.peek(handle))}
        return {handle: pack for handle, pack in packs.items() if "unit" in pack.provenance}

    def sync(self, texts: Callable[[Mapping[Handle, KnowledgePack]], Iterable[str]]) -> list[Handle]:
        """Delete packs of single facts or documents that have changed or are gone; returns their handles.

        `texts` is called with these packs (`provenance["id"]` is the id of the document) and returns the texts that
        still exist. A pack that others add meanwhile stays. If it raises, nothing is deleted. What waits to be compiled
        is cancelled first; the next search that finds it compiles it.
        """
        self.cancel()
        packs = {handle: pack for handle, pack in self.compiled().items() if pack.provenance["unit"] == "fact"}
        live = {content_id(text) for text in texts(packs)}
        stale = [handle for handle, pack in packs.items() if content_id(pack.text) not in live]
        self.forget(*stale)
        if len(stale) == len(packs) > 1:
            logger.warning("All %d packs are removed: none of their texts is there any more.", len(packs))
        log_event(logger, "packs synchronised", packs=len(packs), removed=len(stale))
        return stale

    def discard(self, source: str) -> list[Handle]:
        """Delete the packs of this source and return their handles; none that waits to be compiled is written.

        A source that has none is logged as a warning, with the one that may be meant.
        """
        self.cancel()
        of = {handle: pack.provenance for handle, pack in self.compiled().items()}
        handles = [handle for handle, about in of.items() if about.get("source", "") == source]
        sources = [about.get("source", "") for about in of.values()]
        alike = [each for each, about in zip(sources, of.values(), strict=True) if about.get("id") == source]
        alike += [each for each in sources if each.endswith(f"/{source}")]
        if not handles:
            near = alike or difflib.get_close_matches(source, sources, 1, cutoff=0.8)
            meant = f" One is of {near[0]!r}: is it meant?" if near else ""
            logger.warning("No pack is of %r, and none was removed.%s", source, meant)
        self.forget(*handles)
        return handles

    def gc(self) -> list[Handle]:
        """Delete the packs that `orphans` returns."""
        stale = self.orphans()
        self.forget(*stale)
        return stale

    def search(  # noqa: PLR0913 - what may be asked for, each with a default that works
        self,
        question: str,
        k: int = 4,
        *,
        probes: int | None = None,
        where: Filter | None = None,
        namespace: str | None = None,
        score_threshold: float | None = None,
    ) -> list[Found]:
        """Return the `k` units with the best facts, best first; raises as `FactStore.search`.

        Facts with equal texts are one unit, with the best hit of these facts. Ignores facts with a cosine
        below `score_threshold`.
        """
        namespace = self.namespace if namespace is None else check_namespace(namespace)
        threshold = -math.inf if score_threshold is None else score_threshold
        if not isinstance(threshold, int | float) or math.isnan(threshold):
            raise OptionError(f"Got score_threshold={threshold!r}; expected a number.")
        count = k if self.unit == "fact" else _GROWTH * k
        while True:
            by_unit: dict[object, Hit] = {}
            hits = self.facts.search(question, count, probes=probes, where=where, namespace=namespace)
            passing = [hit for hit in hits if hit.score >= threshold]
            for key, hit in zip(self._keys([hit.fact for hit in passing], self.unit), passing, strict=True):
                by_unit.setdefault(key, hit)
            # Hits come in order of similarity: behind one below the threshold there is none above it.
            if len(by_unit) >= k or len(passing) < count:
                break
            count *= _GROWTH
        if not hits and where is None:
            logger.warning("There is no fact of the namespace %r.", namespace)
        return self.deliver(list(by_unit.values())[:k])

    def deliver(self, hits: Sequence[Hit], *, since: object = None) -> list[Found]:
        """Turn hits, of this or any other search, into units with the handles of their packs, in the same order.

        `since`: `store.cancelled` when that search began, so that a `cancel` during it counts.
        """
        since = since or self.store.cancelled
        units = [self._around(hit.fact, self.unit) for hit in hits]
        if self.engine is None:
            handles = [self._lookup(unit) for unit in units]
        elif self.precompile == "idle":
            handles = self._compiled_when_idle(units, self.engine, since)
        else:
            handles = self.compile(units, progress=False, since=since)
        log_event(logger, "packs found", units=len(units), packs=sum(handle is not None for handle in handles))
        return [Found(hit, unit, handle) for hit, unit, handle in zip(hits, units, handles, strict=True)]

    def compile(
        self,
        units: Iterable[Fact],
        *,
        stored: bool = True,
        lazy: bool = False,
        progress: bool = True,
        since: object = None,
    ) -> list[Handle | None]:
        """Run `compile_facts` with the settings of this object; `lazy` as there, whatever `kv` says.

        A unit whose facts are deleted before its pack is stored has none. Facts that are not `stored` yet are compiled
        in any case. `since` is as in `deliver`.
        """
        since = since or self.store.cancelled
        return compile_facts(
            *(units, self._compiler, self.store),
            unit=self.unit,
            compiled_for=self.compiled_for,
            lazy=lazy or self.kv == "lazy",
            compress=self.compress,
            is_document=self._facts is None,
            is_current=lambda unit: not stored or self._is_current(unit, since),
            progress=progress,
        )

    def cancel(self) -> None:
        """Without a fact store: forget what waits to be compiled into this store by this process.

        Call it when texts were deleted elsewhere, before their packs are deleted. What a delivery that has begun finds
        is forgotten, too; the next one lets it wait again.
        """
        self.store.cancelled = object()

    def _is_current(self, unit: Fact, since: object = None) -> bool:
        """Whether the fact store would make `unit` of its facts now; without one, whether `cancelled` is `since`."""
        if self._facts is None:
            return self.store.cancelled is since
        try:
            members = self._parts(unit, self.unit, unit.title)
        except FactError:  # The bank has gone.
            return False
        return _joined(members) == unit.text

    def _parts(self, unit: Fact, kind: Unit, bank: str) -> Iterable[Fact]:
        """The facts of a unit, or those with its text; raises `FactError` for a `bank` that has gone."""
        if kind == "bank":
            return self.facts.bank_facts(bank)
        by_source = kind == "document" and unit.source
        where: Filter = {"kp:source": unit.source} if by_source else {"kp:digest": unit.digest}
        return self.facts.facts(where=where, namespace=unit.namespace)

    def refuse_unreadable(self, facts: Iterable[Fact]) -> None:
        """Raise `PackError` for a text longer than half of the model's context: requests that find it would fail."""
        engine = self._compiler
        limit = engine.max_positions // 2
        settings: dict[str, Any] = {"compiled_for": self.compiled_for, "lazy": True, "progress": False}
        for pack in engine.build_packs([fact.text for fact in facts], on_short=lambda *_: None, **settings):
            if (count := len(pack.token_ids)) > limit:
                raise PackError(
                    f"Got a text of {count:,} tokens (it begins {pack.text[:40]!r}); expected at most {limit:,}, half "
                    "of what the model reads. Cut it into several."
                )

    def forget(self, *handles: Handle, successor: Handle | None = None) -> None:
        """Delete packs, as far as they exist, and mark their handles as deleted, or as replaced by `successor`."""
        for handle in handles:
            with suppress(PackNotFoundError):
                self.store.remove(handle)
                self.store.bury(handle, successor)

    def all_units(self) -> list[Fact]:
        """Return all units in the namespace of this object."""
        return self._units(self.facts.facts(namespace=self.namespace), self.unit)

    def _keys(self, facts: Sequence[Fact], unit: Unit) -> list[object]:
        """Return a key per fact that identifies its unit."""
        if unit == "bank":
            return list(self.facts.bank_of(facts)) if facts else []
        by_source = unit == "document"
        return [(f.namespace, f.source, "") if by_source and f.source else (f.namespace, "", f.text) for f in facts]

    def _units(self, facts: Iterable[Fact], unit: Unit) -> list[Fact]:
        """Return the units of these facts, each once."""
        facts = list(facts)
        by_key: dict[object, Fact] = {}
        for key, fact in zip(self._keys(facts, unit), facts, strict=True):
            by_key.setdefault(key, fact)
        return [self._around(fact, unit) for fact in by_key.values()]

    def _around(self, fact: Fact, unit: Unit) -> Fact:
        """Return the unit of `fact`: a fact with the texts of its members, whose ids are in the metadata."""
        if unit == "fact" or (unit == "document" and not fact.source):
            return fact
        [title] = self.facts.bank_of([fact]) if unit == "bank" else [""]
        members = tuple(self._parts(fact, unit, title))
        titles = {member.title for member in members}
        return Fact(
            _joined(members),
            title=title or (titles.pop() if len(titles) == 1 else ""),
            source="" if unit == "bank" else fact.source,
            metadata={"facts": [member.id for member in members]},
            namespace=fact.namespace,
        )

    @property
    def _compiler(self) -> Session:
        if self.engine is None:
            raise FactError("There is no engine to compile packs with; pass one: `Delivery(facts, engine, store)`.")
        return self.engine

    def _compiled_when_idle(self, units: Sequence[Fact], engine: Session, since: object) -> list[Handle | None]:
        """Return the handles of packs, which need no KV yet; when idle, compile those that are not for this place."""
        is_lazy = self.kv == "lazy" or engine.is_lazy
        find = partial(find_compiled, session=engine, store=self.store, compiled_for=self.compiled_for, lazy=is_lazy)
        compiled, stored = find(units)
        missing = [unit for unit in units if (unit.namespace, unit.text) not in compiled]
        # KV for another place is computed where the handle stands, as that of the text is. An edited pack may differ.
        for unit, pack in stored.items():
            if pack.fingerprint == engine.fingerprint and not pack.history:
                compiled[unit] = self.store.handle(pack.text, pack.namespace)
        # Not as text, which would stay in the conversation: nobody could say later whose words the KV behind it holds.
        new = [unit for unit in missing if (unit.namespace, unit.text) not in compiled]
        try:
            handles = self.compile(new, lazy=True, progress=False, since=since)
        except (PackError, OSError) as error:  # Such as a store that is only read, or a full disk.
            warn_once(logger, "What a search found goes as text: %s", str(error))
            return [compiled.get((unit.namespace, unit.text)) for unit in units]
        found = zip(new, handles, strict=True)
        compiled |= {(unit.namespace, unit.text): handle for unit, handle in found if handle is not None}
        if missing:
            with suppress(ModelError):  # The next search finds them again.
                engine.when_idle(partial(self._compiling, missing, find, since))
        return [compiled.get((unit.namespace, unit.text)) for unit in units]

    def _compiling(
        self, units: Sequence[Fact], find: Callable[[list[Fact]], tuple[Any, Any]], since: object
    ) -> Iterator[object]:
        """The steps of compiling units that `find` finds no KV of, and of forgetting those that are gone."""
        for unit in units:
            if find([unit])[0]:  # It was compiled meanwhile.
                continue
            # Steps that hold nothing: the question that found the unit, and one right behind it, go first.
            began = -math.inf
            while time.monotonic() - began > 2 * _QUIET_S:
                began = time.monotonic()
                time.sleep(_QUIET_S)
                yield None  # While a request is answered, this takes as long.
            if self._is_current(unit, since):
                yield self.compile([unit], progress=False, since=since)
            elif self._facts is not None:
                self.forget(self.store.handle(unit.text, unit.namespace))

    def _lookup(self, unit: Fact) -> Handle | None:
        handle = self.store.handle(unit.text, unit.namespace)
        if self.store.peek(handle) is not None:
            return handle
        logger.warning("There is no pack of fact %r in %r; it goes as text.", unit.id, self.store)
        return None

    def _discard(self, gone: Sequence[Fact], replaced: Mapping[tuple[str, str], str] = {}) -> None:
        """Delete the packs of deleted facts: their own, and those of units that contained them.

        `replaced` are the new texts of facts by namespace and id.
        """
        texts = set[tuple[str, str]]()  # Another fact may have the same text.
        for at in range(0, len(gone), _BATCH):
            digests = [fact.digest for fact in gone[at : at + _BATCH]]
            remaining = self.facts.facts(where={"kp:digest": {"$in": digests}}, namespace=self.namespace)
            texts |= {(fact.namespace, fact.text) for fact in remaining}
        for fact in gone:
            if (fact.namespace, fact.text) not in texts:
                text = replaced.get((fact.namespace, fact.id))
                successor = None if text is None else self.store.handle(text, fact.namespace)
                self.forget(self.store.handle(fact.text, fact.namespace), successor=successor)
        if self.unit == "fact" or not gone:
            return
        ids = {(fact.namespace, fact.id) for fact in gone}
        for handle in list(self.store):
            pack = self.store.peek(handle) if handle.namespace in {space for space, _ in ids} else None
            members = [] if pack is None else _members(pack)
            if pack and any((handle.namespace, member) in ids for member in members):
                left = self.facts.facts(ids=members, namespace=handle.namespace)
                if _joined(left) != pack.text:  # Another fact of the unit may have the same text.
                    self.forget(handle)


def _members(pack: KnowledgePack) -> list[str]:
    """Return the ids of the facts of a unit's pack. The provenance of a pack of others may hold anything."""
    with suppress(ValueError, RecursionError):
        members = json.loads(pack.provenance.get("facts", "[]"))
        return list(map(str, members)) if isinstance(members, list) else []
    return []


def _joined(members: Iterable[Fact]) -> str:
    """Return the text of a unit: each text of its members once, one per line."""
    return "\n".join(dict.fromkeys(member.text for member in members))
