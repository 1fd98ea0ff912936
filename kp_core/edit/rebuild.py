"""Rebuilds a pack for another text, and computes only the tokens from the first change on."""

from __future__ import annotations

from dataclasses import replace

from kp_core.edit.statement import difference
from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import PackError, UnsupportedRequestError
from kp_core.kv import KVTensors
from kp_core.packs.edits import Edit, Edits
from kp_core.packs.pack import KnowledgePack, common_length
from kp_core.packs.view import PackRef
from kp_core.plan import Plan, plan_regions
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.template import TokenisedPack

__all__ = ["compiled", "computed", "rebuild", "tokenised"]


def rebuild(
    pack: KnowledgePack, text: str, engine: Session, *, compiled_for: CompiledFor | None = None
) -> KnowledgePack:
    """A pack of `text` in place of `pack`: bit for bit that of `engine.build_pack(text)` for the same place.

    The tokens before the change are not computed again. `compiled_for` is needed if the pack was compiled for messages
    of your own. Raises `PackError` for a pack that is lazy, steered or compiled for an unknown place;
    `FingerprintMismatchError` for a pack of another model.
    """
    encoded = tokenised(pack, text, engine, compiled_for)
    history = (*pack.history, Edit("rebuild", *difference(pack.text, text)))
    return compiled(pack, encoded, engine, Edits(history=history))


def tokenised(pack: KnowledgePack, text: str, engine: Session, compiled_for: CompiledFor | None) -> TokenisedPack:
    """`text`, tokenised at the place that `pack` was compiled for; raises as `rebuild`."""
    if pack.steering is not None:
        raise PackError(f"The pack {pack.text[:40]!r} is steered. Edit the pack it was made from, then steer it again.")
    if pack.is_lazy:
        raise PackError(
            f"The pack {pack.text[:40]!r} is lazy: it has no KV to edit. Load it with its KV (`store.get`), compile it "
            "with `engine.build_pack(pack.text)`, or build one of the new text."
        )
    pack.check(engine.fingerprint)
    places: tuple[CompiledFor, ...] = ("user", "system") if compiled_for is None else (compiled_for,)
    for place in places:
        job = engine.template.tokenise_pack(text, place)
        if job.prompt.prefix_of(job.prompt.spans[0]) == pack.prefix:
            return job
    raise PackError(
        f"The pack {pack.text[:40]!r} was compiled for another place than {' or '.join(map(repr, places))}. "
        "Give the `compiled_for` that it was built with."
    )


def compiled(pack: KnowledgePack, made: TokenisedPack, engine: Session, edits: Edits) -> KnowledgePack:
    """The pack of the tokenised text `made` at the place of `pack`; the KV of their common first tokens is reused."""
    before, packs = Prompt(pack.prefix.token_ids, owner=pack.namespace), set[Span]()
    reused = common_length(pack.token_ids, made.token_ids)
    # The states of recurrent layers are known only at the end of a pack.
    if reused and pack.kv is not None and (not pack.kv.states or reused == len(pack.token_ids)):
        start, stop = len(before), len(before) + reused
        shared = replace(pack, token_ids=made.token_ids[:reused], kv=pack.kv.slice(0, reused))
        span = Span(start, stop, PackRef("", shared))
        before, packs = replace(before, token_ids=before.token_ids + shared.token_ids, spans=(span,)), {span}
    ids = pack.prefix.token_ids + made.token_ids
    plan = Plan(replace(before, token_ids=ids), plan_regions(before, packs), wanted=(len(pack.prefix), len(ids)))
    kv = computed(engine, plan)
    provenance = edits.written(pack.provenance)
    return replace(pack, text=made.text, token_ids=made.token_ids, kv=kv, provenance=provenance, stored_bytes=0)


def computed(engine: Session, plan: Plan, needed: str = "kv") -> KVTensors:
    """The wanted KV of `plan`; raises `UnsupportedRequestError` for an engine without the capabilities."""
    if not {"kv", needed} <= engine.engine.supports:
        raise UnsupportedRequestError(f"{engine.name} cannot edit packs. `kp_core.load_engine(model)` can.")
    [kv] = engine.engine.kv([plan])
    return kv
