"""Packs from banks: what a search finds, compiled by fact, by bank or by document, with KV stored or made on use."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import BankError
from kp_core.facts import Fact, FactBank, Filter, Hit, Reranker
from kp_core.facts.rerank import hits_wanted
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.store import PackStore

__all__ = ["KV", "BankPacks", "Found", "Rates", "Unit", "measure_rates"]

Unit: TypeAlias = Literal["fact", "bank", "document"]
KV: TypeAlias = Literal["stored", "lazy", "auto"]

_PROBE_TEXT = "The lighthouse keeper counts ships, and writes each of them into a long book.\n" * 32
_READ_BYTES = 64 * 2**20
_FACTS_PER_UNIT = 4


@dataclass(frozen=True)
class Rates:
    """What was measured of this machine: whether KV is read from the disk faster than it is computed.

    `prefill_tokens_per_s` of the model, `read_bytes_per_s` of the disk (where the system lets go of what it has in
    memory; else of memory), `bytes_per_token` of KV.
    """

    prefill_tokens_per_s: float
    read_bytes_per_s: float
    bytes_per_token: float

    @property
    def read_tokens_per_s(self) -> float:
        """Tokens whose KV the disk gives in a second."""
        return self.read_bytes_per_s / self.bytes_per_token

    @property
    def stores(self) -> bool:
        """Whether reading KV beats computing it."""
        return self.read_tokens_per_s > self.prefill_tokens_per_s

    def to_dict(self) -> dict[str, float | bool]:
        """The fields and what follows from them, by name."""
        return asdict(self) | {"read_tokens_per_s": self.read_tokens_per_s, "stores": self.stores}


def measure_rates(engine: Session, folder: Path) -> Rates:
    """Build a pack of about 500 tokens twice and time the second; write 64 MiB to `folder`, read them, remove them."""
    engine.build_pack(_PROBE_TEXT)
    began = time.perf_counter()
    pack = engine.build_pack(_PROBE_TEXT)
    prefill = len(pack.prefix.token_ids + pack.token_ids) / (time.perf_counter() - began)
    return Rates(prefill, _read_bandwidth(folder), pack.nbytes / len(pack.token_ids))


@dataclass(frozen=True)
class Found:
    """A unit that a search found: its best fact, its whole text, and the handle of its pack."""

    hit: Hit
    text: str
    handle: Handle


class BankPacks:
    """Delivers what `bank` finds as packs in `store`, compiled by `engine` for the place `compiled_for`.

    `unit`: `fact` is one fact; `bank` all facts of a bank, one per line, in the order they came in; `document` all
    facts of one source in that order (a fact without a source is its own document). `kv`: `stored` compiles a pack when
    it is first found and keeps its KV, `lazy` keeps text and tokens, `auto` stores where this machine reads KV faster
    than it computes it (see `rates`, measured on first use).

    Raises `BankError` for a unit or kv that is none of these.
    """

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        bank: FactBank,
        engine: Session,
        store: PackStore,
        *,
        unit: Unit = "fact",
        kv: KV = "auto",
        compiled_for: CompiledFor = "user",
        rates: Rates | None = None,
    ) -> None:
        if unit not in {"fact", "bank", "document"} or kv not in {"stored", "lazy", "auto"}:
            raise BankError(f"Got unit={unit!r}, kv={kv!r}; expected fact, bank or document, and stored, lazy or auto.")
        self.bank, self.engine, self.store = bank, engine, store
        self.unit, self.kv, self.compiled_for = unit, kv, compiled_for
        self._rates = rates
        self.used: Counter[int] = Counter()
        """How often each bank gave the best fact of a unit that was found; `warm` goes by it."""

    @property
    def rates(self) -> Rates:
        """What decides under `auto`."""
        if self._rates is None:
            self._rates = measure_rates(self.engine, self.store.path)
        return self._rates

    @property
    def stores(self) -> bool:
        """Whether KV is stored."""
        return self.kv == "stored" or (self.kv == "auto" and self.rates.stores)

    def search(  # noqa: PLR0913 - what may be asked for, each with a default that works
        self,
        question: str,
        k: int = 4,
        *,
        probes: int | None = None,
        where: Filter | None = None,
        namespace: str | None = None,
        rerank: Reranker | None = None,
    ) -> list[Found]:
        """The `k` units with the best facts, best first, each with a pack in the store; raises as `FactBank.search`."""
        # All that a reranker saw counts: a unit may have its first fact anywhere in it.
        asked = k if self.unit == "fact" else hits_wanted(_FACTS_PER_UNIT * k, rerank)
        while True:
            best: dict[object, Hit] = {}
            hits = self.bank.search(question, asked, probes=probes, where=where, namespace=namespace, rerank=rerank)
            for hit in hits:
                best.setdefault(self._key(hit.fact, hit.bank), hit)
            if len(best) >= k or len(hits) < asked:
                break
            asked *= _FACTS_PER_UNIT
        chosen = list(best.values())[:k]
        self.used.update(hit.bank for hit in chosen)
        texts = [self.text(hit) for hit in chosen]
        handles = self.compile(zip(texts, (hit.fact for hit in chosen), strict=True))
        return [Found(hit, text, handle) for hit, text, handle in zip(chosen, texts, handles, strict=True)]

    def text(self, hit: Hit) -> str:
        """The text of the unit that a hit stands for."""
        return "\n".join(fact.text for fact in self._members(hit))

    def compile(self, units: Iterable[tuple[str, Fact]], *, kv: bool | None = None) -> list[Handle]:
        """Put packs of texts into the store, each of the namespace of a fact; what is there already is not made again.

        `kv` says whether with KV; by default as this object does.
        """
        wanted = list(units)
        stored = self.stores if kv is None else kv
        for namespace in dict.fromkeys(fact.namespace for _, fact in wanted):
            texts = list(dict.fromkeys(text for text, fact in wanted if fact.namespace == namespace))
            about = dict(reversed(wanted))
            build = partial(self.engine.build_packs, namespace=namespace, compiled_for=self.compiled_for)
            plans = list(build(texts, lazy=True, progress=False))
            missing = [plan.text for plan in plans if not self._holds(plan, with_kv=stored)]
            provenance = [_provenance(about[text]) for text in missing]
            for pack in build(missing, lazy=not stored, provenance=provenance):
                self.store.put(pack)
        return [self.store.handle(text, fact.namespace) for text, fact in wanted]

    def warm(self, count: int = 4) -> list[Handle]:
        """Compile, with KV, what the `count` banks most used hold: whole banks, or their facts one by one."""
        units: list[tuple[str, Fact]] = []
        for number, _ in self.used.most_common(count):
            facts = self.bank.bank_facts(number)
            hits = [Hit(fact, 1.0, number) for fact in (facts[:1] if self.unit == "bank" else facts)]
            units += [(self.text(hit), hit.fact) for hit in hits]
        return self.compile(dict.fromkeys(units), kv=True)

    def _key(self, fact: Fact, bank: int) -> object:
        if self.unit == "bank":
            return bank
        return (fact.namespace, fact.source) if self.unit == "document" and fact.source else fact.id

    def _members(self, hit: Hit) -> Sequence[Fact]:
        # A unit never crosses namespaces: a pack belongs to one.
        fact = hit.fact
        if self.unit == "bank":
            return [other for other in self.bank.bank_facts(hit.bank) if other.namespace == fact.namespace]
        if self.unit == "document" and fact.source:
            same = (fact.namespace, fact.source)
            return [other for other in self.bank.facts() if (other.namespace, other.source) == same]
        return [fact]

    def _holds(self, plan: KnowledgePack, *, with_kv: bool) -> bool:
        handle = self.store.handle(plan.text, plan.namespace)
        held = self.store.peek(handle)
        if held is None or (held.token_ids, held.prefix, held.fingerprint) != (
            plan.token_ids,
            plan.prefix,
            plan.fingerprint,
        ):
            return False
        return not with_kv or not self.store.get(handle).is_lazy


def _provenance(fact: Fact) -> dict[str, str]:
    return {name: value for name, value in (("title", fact.title), ("source", fact.source)) if value}


def _read_bandwidth(folder: Path) -> float:
    path = folder / f"probe-{secrets.token_hex(8)}.tmp"
    try:
        with path.open("wb") as file:
            file.write(os.urandom(2**20) * (_READ_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb", buffering=0) as file:
            with suppress(AttributeError, OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = memoryview(bytearray(2**22))
            began = time.perf_counter()
            while file.readinto(buffer):
                pass
            return _READ_BYTES / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
