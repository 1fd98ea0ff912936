"""Facts to packs in a store, for the retrievers of all adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tqdm.auto import tqdm

from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.facts.base import Fact
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.store import PackStore

__all__ = ["compile_facts", "stored_handle"]


def compile_facts(  # noqa: PLR0913 - one keyword per part it is made of
    facts: Sequence[Fact],
    engine: Session,
    store: PackStore,
    *,
    namespace: str = "default",
    compiled_for: CompiledFor = "user",
    lazy: bool = False,
    progress: bool = True,
) -> None:
    """Compile the packs of `facts` into `store`, for the place that `compiled_for` says.

    Each is stored as soon as it is made, and what is stored already for this model and place is not made again: an
    interrupted run goes on where it stopped. `lazy` packs are computed on first use instead.
    """
    known: dict[str, Fact] = {}
    for fact in facts:
        known.setdefault(fact.text, fact)
    texts = list(known)
    plans = engine.build_packs(texts, namespace=namespace, compiled_for=compiled_for, lazy=True, progress=False)
    bar = tqdm(plans, "Looking for packs", len(texts), unit="pack", delay=1, disable=not progress)
    missing: list[str] = []
    for text, plan in zip(texts, bar, strict=True):
        if _is_stored(plan, store, lazy=lazy):
            continue
        if lazy:
            store.put(replace(plan, provenance={**plan.provenance, **_provenance(known[text])}))
        else:
            missing.append(text)
    provenance = [_provenance(known[text]) for text in missing]
    for pack in engine.build_packs(
        missing, namespace=namespace, compiled_for=compiled_for, provenance=provenance, progress=progress
    ):
        store.put(pack)


def stored_handle(store: PackStore, text: str, namespace: str, compiled_for: CompiledFor = "user") -> Handle | None:
    """The handle `text` is stored under: as it is, or as memory of the system message, which ends its line."""
    forms = (text, text.strip() + "\n")
    for form in reversed(forms) if compiled_for == "system" else forms:
        handle = store.handle(form, namespace)
        if handle in store:
            return handle
    return None


def _is_stored(plan: KnowledgePack, store: PackStore, *, lazy: bool) -> bool:
    """Whether the store holds what `plan` would become."""
    handle = store.handle(plan.text, plan.namespace)
    stored = store.peek(handle)
    if stored is None or stored.token_ids != plan.token_ids or stored.prefix != plan.prefix:
        return False
    return stored.fingerprint == plan.fingerprint and (lazy or not store.get(handle).is_lazy)


def _provenance(fact: Fact) -> dict[str, str]:
    return {name: value for name, value in (("title", fact.title), ("source", fact.source)) if value}
