"""Compiles facts to packs, except those that are already stored."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from kp_core.banks import ChromaFactStore, Fact, FactStore, MemoryFactStore
from kp_core.banks.embed import Embedder, SentenceTransformerEmbedder
from kp_core.errors import FactError, PackNotFoundError, PromptError, ShortTextError
from kp_core.events import log_event
from kp_core.packs.codec import Compression, check_compression
from kp_core.packs.entry import Entry, encode_entry
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey, encode_text
from kp_core.packs.view import Packs
from kp_core.plan.request import CompiledFor
from kp_core.session.session import Session

logger = logging.getLogger(__name__)

Unit: TypeAlias = Literal["fact", "bank", "document"]
"""The content of a pack: one fact, all facts of a bank, or all facts of a document."""

DOCUMENT = "document"
"""In the provenance of a pack, under `of`: its text is a document in a store of the caller's own, and no fact."""

_LOOKED_AT, _SAMPLE = 1024, 64
_COUNTED, _TIMED = 256, 8


def compile_facts(  # noqa: PLR0913 - one keyword per part it is made of
    facts: Iterable[Fact],
    session: Session,
    store: Packs,
    *,
    namespace: str | None = None,
    unit: Unit = "fact",
    compiled_for: CompiledFor = "user",
    lazy: bool = False,
    compress: Compression = "none",
    is_document: bool = False,
    is_current: Callable[[Fact], bool] = lambda _fact: True,
    progress: bool = True,
) -> list[Handle | None]:
    """Compile `facts` into `store` for the position `compiled_for`; returns the handles of their packs.

    A fact without a namespace goes to `namespace`. Each pack is stored as soon as it is compiled, and packs already
    stored for this model and position are skipped. `lazy` packs are computed on first use. With `is_document` they note
    that they are of a document in a store of the caller's own. A text too short to have a token of its own, or too long
    for the model, has no pack: its handle is `None`, and a warning names it. A fact for which `is_current` is false
    when its pack is written, because it was deleted meanwhile, has none either. Raises `PackError` for an unknown
    `compress`.
    """
    check_compression(compress)
    facts = [fact.moved(namespace) for fact in facts]
    is_lazy = lazy or session.is_lazy
    results, outdated = find_compiled(facts, session, store, compiled_for=compiled_for, lazy=is_lazy)
    missing = defaultdict[str, dict[str, Fact]](dict)
    for fact in facts:
        if (fact.namespace, fact.text) not in results:
            missing[fact.namespace].setdefault(fact.text, fact)
    for space, units in missing.items():

        def short(text: str, error: PromptError, wanted: dict[str, Fact] = units) -> None:
            # A template that carries no packs has already logged a warning.
            level = logging.WARNING if session.template.carries_packs else logging.DEBUG
            logger.log(level, "The text %r of fact %r goes as text: %s", text, wanted[text].id, error)

        # A text that is compiled again keeps its edits.
        edited = {text: pack for (of, text), pack in outdated.items() if of == space and pack.history}
        edits = {text: replace(pack.edits, starts=()).written({}) for text, pack in edited.items()}
        origin = {"of": DOCUMENT} if is_document else {}
        provenances = [origin | provenance_of(fact, unit) | edits.get(text, {}) for text, fact in units.items()]
        built = session.build_packs(
            list(units),
            namespace=space,
            compiled_for=compiled_for,
            lazy=lazy,
            compress=compress,
            provenance=provenances,
            on_short=short,
            progress=progress,
        )
        sizes = list[int]()
        for pack in built:
            if not is_current(units[pack.text]):
                continue
            handle = store.put(pack)
            # Who deletes a fact deletes its pack afterwards: a fact that is here now loses a pack that is stored.
            if not is_current(units[pack.text]):
                with suppress(PackNotFoundError):
                    store.remove(handle)
                    store.bury(handle)
                continue
            results[space, pack.text] = handle
            sizes.append(len(pack.token_ids))
        log_event(logger, "packs compiled", packs=len(sizes), tokens=sum(sizes), lazy=is_lazy)
    return [results.get((fact.namespace, fact.text)) for fact in facts]


def find_compiled(  # noqa: C901 - with the look at one pack, which the rest uses twice
    units: Iterable[Fact],
    session: Session,
    store: Packs,
    *,
    compiled_for: CompiledFor = "user",
    lazy: bool = False,
) -> tuple[dict[tuple[str, str], Handle], dict[tuple[str, str], KnowledgePack]]:
    """The handles of the units whose packs need no compiling, and the stored packs of others, by namespace and text.

    Of very many packs, it looks up a sample. If the sample is right, the rest is assumed to be; a search looks them up.
    """
    handles = {(unit.namespace, unit.text): store.handle(unit.text, unit.namespace) for unit in units}
    if len(handles) > _LOOKED_AT:
        listed = set(store)
        handles = {unit: handle for unit, handle in handles.items() if handle in listed}
    if not handles:
        return {}, {}
    try:
        prefix = session.template.prefix(compiled_for)
    except ShortTextError:  # The template carries no packs.
        return {}, {}
    key = PackKey(session.fingerprint, prefix)

    def is_compiled(handle: Handle, pack: KnowledgePack | None) -> bool:
        """Whether a stored pack has this model and position, and its KV unless `lazy`."""
        if pack is None or pack.fingerprint != key.model:
            return False
        if pack.prefix != prefix:
            # The first characters of some texts share a token with the text before them: their prefix is another one.
            try:
                own_prefix, token_ids = session.template.tokenise_pack(pack.text, compiled_for)
            except ShortTextError:
                return False
            pack = store.peek(handle, PackKey(key.model, own_prefix))
            if pack is None or (pack.fingerprint, pack.prefix, pack.token_ids) != (key.model, own_prefix, token_ids):
                return False
        return lazy or pack.stored_bytes > 0 or not store.get(handle, pack.key).is_lazy

    if len(handles) > _LOOKED_AT:
        sample = list(handles.values())[:: len(handles) // _SAMPLE]
        if all(is_compiled(handle, store.peek(handle, key)) for handle in sample):
            return handles, {}
    stored = {unit: pack for unit, handle in handles.items() if (pack := store.peek(handle, key))}
    compiled = {unit: handles[unit] for unit, pack in stored.items() if is_compiled(handles[unit], pack)}
    return compiled, {unit: pack for unit, pack in stored.items() if unit not in compiled}


def compile_cost(
    texts: Sequence[str], session: Session, *, lazy: bool = False, compress: Compression = "none"
) -> tuple[int, int, float]:
    """Estimate what compiling `texts` gives and takes: tokens, bytes of the files, and seconds.

    It counts the tokens of up to 256 texts, and compiles 8 of these.
    """
    if not texts:
        return 0, 0, 0.0
    sample = texts[:: -(-len(texts) // _COUNTED)]
    scale = sum(map(len, texts)) / sum(map(len, sample))
    counted = list(session.build_packs(sample, lazy=True, progress=False, on_short=lambda *_: None))
    tokens = round(scale * sum(len(pack.token_ids) for pack in counted))
    nbytes = scale * sum(len(encode_text([pack])) for pack in counted)
    # The first pack of a process is slow: kernels load, and the common prefix is computed.
    timed = [pack.text for pack in counted[:: max(1, len(counted) // _TIMED)]]
    list(session.build_packs(timed[:1], lazy=lazy, progress=False))
    began = time.perf_counter()
    packs = list(session.build_packs(timed, lazy=lazy, compress=compress, progress=False))
    seconds = (time.perf_counter() - began) * sum(map(len, texts)) / max(1, sum(map(len, timed)))
    stored, any_handle = 0, Handle("default", "a" * 21)
    for pack in packs:
        entry = Entry.of_pack(any_handle, pack.fingerprint, pack.prefix, pack.token_ids)
        stored += 0 if pack.kv is None else encode_entry(entry, pack.kv, pack.compression).nbytes
    kv = stored / max(1, sum(len(pack.token_ids) for pack in packs))
    return tokens, round(nbytes + kv * tokens), seconds


def provenance_of(fact: Fact, unit: Unit) -> dict[str, str]:
    """Return the provenance of a unit's pack; `Delivery.gc` and `Delivery.sync` find packs by it.

    `id` is the id of the fact or document, if it was given one.
    """
    facts = json.dumps(fact.metadata["facts"]) if unit != "fact" and "facts" in fact.metadata else ""
    fact_id = fact.id if unit == "fact" and fact.is_named else ""
    fields = {"title": fact.title, "source": fact.source, "unit": unit, "facts": facts, "id": fact_id}
    return {name: value for name, value in fields.items() if value}


def open_facts(
    facts: FactStore | None = None,
    embedder: Embedder | Any | None = None,  # noqa: ANN401 - or another library's
    path: str | os.PathLike[str] | None = None,
) -> FactStore:
    """Return `facts`, or a new store with `embedder` (default: the bundled MiniLM), in Chroma at `path` or in memory.

    Raises `FactError` for an invalid fact store or embedder, and for a store given together with an embedder or a path.
    """
    if facts is None and path is not None:
        return ChromaFactStore(path, embedder)
    if facts is None:
        return MemoryFactStore(SentenceTransformerEmbedder() if embedder is None else embedder)
    if not isinstance(facts, FactStore):
        raise FactError(f"Got {type(facts)} as fact store; expected a FactStore, e.g. `ChromaFactStore(path)`.")
    if embedder is not None or path is not None:
        raise FactError("Got a fact store together with an embedder or a path; a store brings its own.")
    return facts
