"""Compiles facts to packs, except those that are already stored."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import FactError, PackError, PromptError
from kp_core.facts import ChromaFactStore, Fact, FactStore, MemoryFactStore
from kp_core.facts.embed import Embedder, SentenceTransformerEmbedder, as_embedder
from kp_core.packs.codec import Compression, check_compression
from kp_core.packs.file import encode_pack
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import Packs
from kp_core.units import Unit

__all__ = [
    "MUCH_BYTES",
    "CompileCost",
    "compile_cost",
    "compile_facts",
    "open_facts",
    "provenance_of",
    "refuse_unreadable",
]

logger = logging.getLogger(__name__)

_MANY = 256  # Below this number of packs, the cost is not estimated.
_LOOKED_AT, _SAMPLE = 1024, 64
_COUNTED, _TIMED = 256, 8
MUCH_BYTES = 10**9
"""A compile that writes more bytes logs a warning."""


def compile_facts(  # noqa: PLR0913 - one keyword per part it is made of
    facts: Iterable[Fact],
    engine: Session,
    store: Packs,
    *,
    namespace: str | None = None,
    unit: Unit = "fact",
    compiled_for: CompiledFor = "user",
    lazy: bool = False,
    compress: Compression = "none",
    accept: bool = False,
    progress: bool = True,
) -> list[Handle | None]:
    """Compile `facts` into `store` for the position `compiled_for`; returns the handles of their packs.

    A pack is in the namespace of its fact, or in `namespace` if the fact has none of its own. Each pack is stored as
    soon as it is compiled, and packs already stored for this model and position are skipped, so an interrupted run
    continues where it stopped. `lazy` packs are computed on first use. With `compress="int8"` or `accept`, packs that
    this model made in other numerics count as stored, too. A text too short to have a token of its own, or too long for
    the model, has no pack: its handle is `None`, and a warning names it. Raises `PackError` for an unknown `compress`.
    """
    check_compression(compress)
    accept = accept or compress == "int8"
    facts = [fact.moved(namespace) for fact in facts]
    results: dict[tuple[str, str], Handle] = {}
    for space in dict.fromkeys(fact.namespace for fact in facts):
        units: dict[str, Fact] = {}
        for fact in facts:
            if fact.namespace == space:
                units.setdefault(fact.text, fact)

        def short(text: str, error: PromptError, wanted: dict[str, Fact] = units) -> None:
            # A template that carries no packs has already logged a warning.
            level = logging.WARNING if engine.template.carries_packs else logging.DEBUG
            logger.log(level, "The text %r of fact %s goes as text: %s", text, wanted[text].id, error)

        is_current = partial(_is_stored, store, lazy=lazy, accept=accept)
        build = partial(engine.build_packs, namespace=space, compiled_for=compiled_for, on_short=short)
        is_there = set(store).__contains__ if len(units) > _LOOKED_AT else lambda handle: store.peek(handle) is not None
        stored = {text: handle for text in units if is_there(handle := store.handle(text, space))}
        compiled = _done(stored, build, store, is_current, progress=progress)
        results |= {(space, text): stored[text] for text in compiled}
        missing = [text for text in units if text not in compiled]
        history = {text: _edited(store.peek(stored[text])) for text in missing if text in stored}
        provenances = [provenance_of(units[text], unit) | history.get(text, {}) for text in missing]
        if progress and len(missing) >= _MANY:
            _say_cost(compile_cost(missing, engine, lazy=lazy, compress=compress))
        for pack in build(missing, lazy=lazy, compress=compress, provenance=provenances, progress=progress):
            results[space, pack.text] = store.put(pack)
    return [results.get((fact.namespace, fact.text)) for fact in facts]


@dataclass(frozen=True)
class CompileCost:
    """The cost of compiling texts: packs, their tokens, the bytes of their files, and seconds of computing."""

    packs: int
    tokens: int
    nbytes: int
    seconds: float


def compile_cost(
    texts: Sequence[str], engine: Session, *, lazy: bool = False, compress: Compression = "none"
) -> CompileCost:
    """Estimate the cost of compiling `texts` from the tokens of up to 256 of them, and by compiling 8 of these."""
    if not texts:
        return CompileCost(0, 0, 0, 0.0)
    sample = texts[:: -(-len(texts) // _COUNTED)]
    scale = sum(map(len, texts)) / sum(map(len, sample))
    counted = list(engine.build_packs(sample, lazy=True, progress=False, on_short=lambda *_: None))
    tokens = round(scale * sum(len(pack.token_ids) for pack in counted))
    nbytes = scale * sum(encode_pack(pack).nbytes + len(pack.text.encode()) for pack in counted)
    # The first pack of a process is slow: kernels load, and the common prefix is computed.
    timed = [pack.text for pack in counted[:: max(1, len(counted) // _TIMED)]]
    list(engine.build_packs(timed[:1], lazy=lazy, progress=False))
    began = time.perf_counter()
    packs = list(engine.build_packs(timed, lazy=lazy, compress=compress, progress=False))
    seconds = (time.perf_counter() - began) * sum(map(len, texts)) / max(1, sum(map(len, timed)))
    stored = sum(encode_pack(pack).nbytes - encode_pack(pack.without_kv()).nbytes for pack in packs)
    kv = stored / max(1, sum(len(pack.token_ids) for pack in packs))
    return CompileCost(len(texts), tokens, round(nbytes + kv * tokens), seconds)


def _say_cost(cost: CompileCost) -> None:
    level = logging.WARNING if cost.nbytes > MUCH_BYTES else logging.INFO
    logger.log(
        level,
        "Compiling %d packs of %d tokens: %.1f MB on disk, about %.1f minutes; lazy packs keep text alone.",
        *(cost.packs, cost.tokens, cost.nbytes / 1e6, cost.seconds / 60),
    )


def provenance_of(fact: Fact, unit: Unit) -> dict[str, str]:
    """Return the provenance of a unit's pack; `Delivery.gc` uses it to find packs made of facts."""
    facts = str(fact.metadata.get("facts", "")) if unit != "fact" else ""
    fields = {"title": fact.title, "source": fact.source, "unit": unit, "facts": facts}
    return {name: value for name, value in fields.items() if value}


def _done(
    stored: Mapping[str, Handle],
    build: Callable[..., Iterator[KnowledgePack]],
    store: Packs,
    stands: Callable[[KnowledgePack, KnowledgePack], bool],
    *,
    progress: bool,
) -> set[str]:
    """Return the texts whose packs need no compiling.

    If there are very many, it checks a sample. If the sample is right, the rest is assumed to be; a search checks it.
    """
    # The prefix is nearly always the same for all packs; the others are planned again.
    first = next(iter(build(list(stored)[:1], lazy=True, progress=False)), None)
    if first is None:
        return set()

    def is_done(text: str) -> bool:
        pack = store.peek(stored[text], first.key)
        return pack is not None and stands(pack, first)

    if len(stored) > _LOOKED_AT and all(map(is_done, list(stored)[:: len(stored) // _SAMPLE])):
        return set(stored)
    compiled = set(filter(is_done, stored))
    for plan in build([text for text in stored if text not in compiled], lazy=True, progress=progress):
        pack = store.peek(stored[plan.text], plan.key)
        if pack and pack.token_ids == plan.token_ids and stands(pack, plan):
            compiled.add(plan.text)
    return compiled


def _edited(pack: KnowledgePack | None) -> dict[str, str]:
    """Return the edits of a stored pack as provenance, for a text that is compiled again."""
    return replace(pack.edits, starts=()).written({}) if pack is not None and pack.history else {}


def _is_stored(store: Packs, pack: KnowledgePack, plan: KnowledgePack, *, lazy: bool, accept: bool) -> bool:
    """Whether a stored pack has the model and position of `plan`, and its KV unless `lazy`."""
    fits = pack.fingerprint.same_model(plan.fingerprint) if accept else pack.fingerprint == plan.fingerprint
    if not fits or pack.prefix != plan.prefix:
        return False
    return lazy or pack.stored_bytes > 0 or not store.get(store.handle(pack.text, pack.namespace), pack.key).is_lazy


def refuse_unreadable(facts: Iterable[Fact], engine: Session, compiled_for: CompiledFor) -> None:
    """See `Delivery.refuse_unreadable`; computes nothing. Meant for texts from strangers and models."""
    limit = engine.max_positions // 2
    for fact in facts:
        for pack in engine.build_packs(
            [fact.text], compiled_for=compiled_for, lazy=True, progress=False, on_short=lambda *_: None
        ):
            if (count := len(pack.token_ids)) > limit:
                raise PackError(
                    f"Got a text of {count:,} tokens (it begins {fact.text[:40]!r}); expected at most {limit:,}, "
                    "half of what the model reads. Cut it into several."
                )


def open_facts(
    facts: FactStore | None = None,
    embedder: Embedder | object | None = None,
    path: str | os.PathLike[str] | None = None,
) -> FactStore:
    """Return `facts`, or a new store with `embedder` (default: the bundled MiniLM), in Chroma at `path` or in memory.

    Raises `FactError` for an invalid fact store or embedder, and for a store given together with an embedder or a path.
    """
    if facts is not None and not isinstance(facts, FactStore):
        raise FactError(f"Got {type(facts)} as fact store; expected a FactStore, e.g. `ChromaFactStore(path)`.")
    if facts is not None and (embedder is not None or path is not None):
        raise FactError("Got a fact store together with an embedder or a path; a store brings its own.")
    if facts is not None:
        return facts
    converted = None if embedder is None else as_embedder(embedder)
    return (
        MemoryFactStore(converted or SentenceTransformerEmbedder())
        if path is None
        else ChromaFactStore(path, converted)
    )
