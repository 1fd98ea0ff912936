"""From facts to packs to handles: what a search finds, compiled by fact, by bank or by document."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import BankError, ShortTextError
from kp_core.facts import ChromaFactBank, Fact, FactBank, Filter, Hit, MemoryFactBank, Reranker
from kp_core.facts.embed import Embedder, SentenceTransformerEmbedder
from kp_core.facts.rerank import hits_wanted
from kp_core.packs.handle import Handle, check_namespace
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import Packs
from kp_core.rates import Rates, measure_rates

__all__ = ["KV", "Delivery", "Found", "Unit", "compile_facts", "open_bank"]

logger = logging.getLogger(__name__)

Unit: TypeAlias = Literal["fact", "bank", "document"]
KV: TypeAlias = Literal["stored", "lazy", "auto"]

_GROWTH = 4  # Facts looked at per unit wanted, and how many times more when those were too few.


@dataclass(frozen=True)
class Found:
    """A unit that a search found: its best fact, the unit as one fact, and the handle of its pack where it has one."""

    hit: Hit
    unit: Fact
    handle: Handle | None

    @property
    def content(self) -> str:
        """What a model is sent: the handle, else the text."""
        return self.unit.text if self.handle is None else str(self.handle)


class Delivery:
    """Delivers what a bank of `facts` finds as packs in `store`, compiled by `engine` for the position `compiled_for`.

    `unit`: `fact` is one fact; `bank` all facts of a bank, one per line, in the order they came in; `document` all
    facts of one source in that order (a fact without a source is its own document). No unit crosses namespaces: its
    pack is in that of its facts. Searches see `namespace` alone; `None` is all of them. `kv`: `stored` compiles a pack
    when it is first found and keeps its KV, `lazy` keeps text and tokens, `auto` stores where this machine reads KV
    faster than it computes it. Without an `engine` packs are only looked up.

    What has no pack goes as text, with a warning. Raises `BankError` for a unit or kv that is none of these,
    `HandleError` for a namespace that is none.
    """

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        facts: FactBank,
        engine: Session | None,
        store: Packs,
        *,
        unit: Unit = "fact",
        kv: KV = "auto",
        compiled_for: CompiledFor = "user",
        namespace: str | None = None,
        rates: Rates | None = None,
    ) -> None:
        if unit not in {"fact", "bank", "document"} or kv not in {"stored", "lazy", "auto"}:
            raise BankError(f"Got unit={unit!r}, kv={kv!r}; expected fact, bank or document, and stored, lazy or auto.")
        self.facts, self.engine, self.store = facts, engine, store
        self.unit, self.kv, self.compiled_for = unit, kv, compiled_for
        self.namespace = None if namespace is None else check_namespace(namespace)
        self.rates = rates
        self.used: Counter[int] = Counter()
        """How often each bank gave the best fact of a unit that was found; `warm` goes by it."""

    @property
    def stores(self) -> bool:
        """Whether KV is stored; under `auto` that is measured once."""
        if self.kv != "auto":
            return self.kv == "stored"
        self.rates = self.rates or measure_rates(
            self._compiler, Path(getattr(self.store, "path", tempfile.gettempdir()))
        )
        return self.rates.stores

    def add(self, facts: Iterable[Fact], *, progress: bool = True) -> None:
        """Put `facts` into the bank, those without a namespace of their own into this one, and compile their units.

        With units larger than facts, those of the whole bank: facts that come regroup the others.
        """
        facts = [fact.moved(self.namespace) for fact in facts]
        self.facts.build(facts)
        spaces = {self.namespace, *(fact.namespace for fact in facts)}
        units = facts if self.unit == "fact" else self._units(range(self.facts.banks), spaces)
        self.compile(units, progress=progress)

    def search(  # noqa: PLR0913 - what may be asked for, each with a default that works
        self,
        question: str,
        k: int = 4,
        *,
        probes: int | None = None,
        where: Filter | None = None,
        namespace: str | None = None,
        score_threshold: float | None = None,
        rerank: Reranker | None = None,
    ) -> list[Found]:
        """The `k` units with the best facts, best first; raises as `FactBank.search`.

        A unit's facts count whose cosine is at least `score_threshold`. With units that are banks, at least `k` of them
        are searched.
        """
        namespace = self.namespace if namespace is None else check_namespace(namespace)
        least = -math.inf if score_threshold is None else score_threshold
        # All that a reranker saw counts: a unit may have its first fact anywhere in it.
        asked = max(hits_wanted(k, rerank), k if self.unit == "fact" else _GROWTH * k)
        probes = probes and max(k, probes) if self.unit == "bank" else probes
        while True:
            best: dict[object, Hit] = {}
            hits = self.facts.search(question, asked, probes=probes, where=where, namespace=namespace, rerank=rerank)
            kept = [hit for hit in hits if hit.score >= least]
            for hit in kept:
                best.setdefault(self._key(hit.fact, hit.bank), hit)
            # Behind a hit that is not similar enough there is none that is.
            if len(best) >= k or len(kept) < asked:
                break
            asked *= _GROWTH
        if not hits and where is None:
            logger.warning("The bank holds no fact of the namespace %r.", namespace)
        chosen = list(best.values())[:k]
        self.used.update(hit.bank for hit in chosen)
        units = [self._unit(hit.fact, hit.bank) for hit in chosen]
        handles = [self._lookup(unit) for unit in units] if self.engine is None else self.compile(units, progress=False)
        return [Found(hit, unit, handle) for hit, unit, handle in zip(chosen, units, handles, strict=True)]

    def compile(self, units: Iterable[Fact], *, kv: bool | None = None, progress: bool = True) -> list[Handle | None]:
        """As `compile_facts`; `kv` says whether with KV, by default as this object does."""
        return compile_facts(
            units,
            self._compiler,
            self.store,
            compiled_for=self.compiled_for,
            lazy=not (self.stores if kv is None else kv),
            progress=progress,
        )

    def warm(self, count: int = 4) -> list[Handle | None]:
        """Compile, with KV, what the `count` banks most used hold: whole banks, or their facts one by one."""
        return self.compile(self._units((bank for bank, _ in self.used.most_common(count)), {self.namespace}), kv=True)

    @property
    def _compiler(self) -> Session:
        if self.engine is None:
            raise BankError("There is no engine to compile packs with; pass one: `Delivery(facts, engine, store)`.")
        return self.engine

    def _lookup(self, unit: Fact) -> Handle | None:
        handle = self.store.handle(unit.text, unit.namespace)
        if self.store.peek(handle) is not None:
            return handle
        logger.warning("There is no pack of fact %s in %r; it goes as text.", unit.id, self.store)
        return None

    def _units(self, banks: Iterable[int], namespaces: Collection[str | None]) -> list[Fact]:
        """The units that have facts in `banks`; `None` among `namespaces` is all of them."""
        found: dict[object, Fact] = {}
        for bank in banks:
            for fact in self.facts.bank_facts(bank):
                key = self._key(fact, bank)
                if key not in found and (None in namespaces or fact.namespace in namespaces):
                    found[key] = self._unit(fact, bank)
        return list(found.values())

    def _key(self, fact: Fact, bank: int) -> object:
        if self.unit == "bank":
            return (fact.namespace, bank)
        return (fact.namespace, fact.source) if self.unit == "document" and fact.source else fact.id

    def _unit(self, fact: Fact, bank: int) -> Fact:
        """What `fact`, found in `bank`, stands for."""
        if self.unit == "fact" or (self.unit == "document" and not fact.source):
            return fact
        among = self.facts.bank_facts(bank) if self.unit == "bank" else self.facts.facts()
        members = [other for other in among if self._key(other, bank) == self._key(fact, bank)]
        about = {other.title for other in members}, {other.source for other in members}
        title, source = (next(iter(values)) if len(values) == 1 else "" for values in about)
        return Fact(
            "\n".join(other.text for other in members),
            title=f"bank {bank}" if self.unit == "bank" else title,
            source=source,
            metadata={"facts": " ".join(other.id for other in members)},
            namespace=fact.namespace,
        )


def compile_facts(  # noqa: PLR0913 - one keyword per part it is made of
    facts: Iterable[Fact],
    engine: Session,
    store: Packs,
    *,
    namespace: str | None = None,
    compiled_for: CompiledFor = "user",
    lazy: bool = False,
    progress: bool = True,
) -> list[Handle | None]:
    """The handles of the packs of `facts`, compiled into `store` for the position `compiled_for`.

    Each is in its fact's namespace, or in `namespace` where the fact has none of its own. Each is stored as soon as it
    is made, and what is stored already for this model and position is not made again: an interrupted run goes on where
    it stopped. `lazy` packs are computed on first use instead. A text too short to own a token has no pack: `None`,
    with a warning that names it.
    """
    facts = [fact.moved(namespace) for fact in facts]
    made: dict[tuple[str, str], Handle] = {}
    for space in dict.fromkeys(fact.namespace for fact in facts):
        wanted: dict[str, Fact] = {}
        for fact in facts:
            if fact.namespace == space:
                wanted.setdefault(fact.text, fact)

        def short(text: str, error: ShortTextError, wanted: dict[str, Fact] = wanted) -> None:
            logger.warning("The text %r of fact %s goes as text: %s", text, wanted[text].id, error)

        build = partial(engine.build_packs, namespace=space, compiled_for=compiled_for, on_short=short)
        known = [text for text in wanted if store.peek(store.handle(text, space)) is not None]
        missing = dict.fromkeys(text for text in wanted if text not in known)
        for plan in build(known, lazy=True, progress=progress):
            if _is_stored(store, plan, lazy=lazy):
                made[space, plan.text] = store.handle(plan.text, space)
            else:
                missing[plan.text] = None
        about = [
            {name: said for name in ("title", "source") if (said := getattr(wanted[text], name))} for text in missing
        ]
        for pack in build(list(missing), lazy=lazy, provenance=about, progress=progress):
            made[space, pack.text] = store.put(pack)
    return [made.get((fact.namespace, fact.text)) for fact in facts]


def open_bank(
    bank: FactBank | None = None, embedder: Embedder | None = None, path: str | os.PathLike[str] | None = None
) -> FactBank:
    """`bank`, or one made with `embedder` (by default the bundled MiniLM): in Chroma at `path`, or in memory.

    Raises `BankError` for what is no bank or no embedder, and for a bank together with what only a new one takes.
    """
    if bank is not None and not isinstance(bank, FactBank):
        raise BankError(f"Got {type(bank)} as bank; expected a FactBank, e.g. `ChromaFactBank(path, embedder)`.")
    if bank is not None and (embedder is not None or path is not None):
        raise BankError("Got a bank together with an embedder or a path; a bank brings its own.")
    if embedder is not None and not callable(getattr(embedder, "embed", None)):
        raise BankError(
            f"Got {type(embedder)} as embedder; expected an Embedder of this project, with `name`, `dimensions`, "
            "`embed(texts)` and `embed_query(text)`, e.g. `SentenceTransformerEmbedder(model)`."
        )
    if bank is None:
        embedder = embedder or SentenceTransformerEmbedder()
        return MemoryFactBank(embedder) if path is None else ChromaFactBank(path, embedder)
    return bank


def _is_stored(store: Packs, plan: KnowledgePack, *, lazy: bool) -> bool:
    """Whether the store holds what `plan` would become."""
    handle = store.handle(plan.text, plan.namespace)
    held = store.peek(handle)
    if held is None or (held.token_ids, held.prefix) != (plan.token_ids, plan.prefix):
        return False
    has_kv = lazy or held.stored_bytes > 0 or not store.get(handle).is_lazy
    return held.fingerprint == plan.fingerprint and has_kv
