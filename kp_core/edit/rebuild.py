"""A pack computed anew for another text, as far as it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from kp_core.edit.statement import difference
from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import PackError, UnsupportedRequestError
from kp_core.kv import KVTensors
from kp_core.packs.edits import Edit, Edits
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import PackRef
from kp_core.plan import Plan, plan_regions
from kp_core.prompt.cuts import cut, prefix_of
from kp_core.prompt.prompt import Prompt, Span, common_length

__all__ = ["Text", "all_edges", "compiled", "computed", "plain_edges", "rebuild", "tokenised"]


@dataclass(frozen=True)
class Text:
    """A text for the place of a pack: its tokens there, and how many of them, from the first on, the pack has."""

    text: str
    token_ids: tuple[int, ...]
    reused: int


def rebuild(
    pack: KnowledgePack, text: str, engine: Session, *, compiled_for: CompiledFor | None = None
) -> KnowledgePack:
    """`text` in place of what `pack` says: bit for bit what `engine.build_pack(text)` gives for the same place.

    What stands before the change is not computed again, up to the last place where its prefill was cut anyway (every
    `chunk_tokens`). `compiled_for` is needed where the pack was compiled for messages of your own. Raises `PackError`
    for a pack that cannot be edited: lazy, steered, of a place that is not known; `FingerprintMismatchError` for one of
    another model.
    """
    made = tokenised(pack, text, engine, compiled_for, plain_edges(pack, engine))
    history = (*pack.history, Edit("rebuild", *difference(pack.text, text)))
    return compiled(pack, made, engine, Edits(history=history))


def all_edges(pack: KnowledgePack, engine: Session) -> list[int]:
    """The tokens of a pack at which its prefill was cut, its end included."""
    edges = (0, *pack.cuts, len(pack.token_ids))
    chunks = (range(start, stop, int(engine.fingerprint.chunk_tokens)) for start, stop in pairwise(edges))
    return [*chain.from_iterable(chunks), len(pack.token_ids)]


def plain_edges(pack: KnowledgePack, engine: Session) -> range:
    """Those of them at which any text of this place is cut."""
    until = pack.cuts[0] if pack.cuts else len(pack.token_ids)
    return range(0, until + 1, int(engine.fingerprint.chunk_tokens))


def tokenised(
    pack: KnowledgePack, text: str, engine: Session, compiled_for: CompiledFor | None, edges: Sequence[int]
) -> Text:
    """`text` as it stands where `pack` was compiled for, sharing tokens with it up to one of `edges`.

    Raises as `rebuild`.
    """
    if pack.steering is not None:
        raise PackError(f"The pack {pack.text[:40]!r} is steered. Edit the pack it was made from, then steer it again.")
    if pack.is_lazy:
        raise PackError(
            f"The pack {pack.text[:40]!r} is lazy: it has no KV to edit. Load it with its KV (`store.get`), compile it "
            "with `engine.build_pack(pack.text)`, or build one of the new text."
        )
    pack.check(engine.fingerprint)
    chunk_tokens = int(engine.fingerprint.chunk_tokens)
    places: tuple[CompiledFor, ...] = ("user", "system") if compiled_for is None else (compiled_for,)
    for place in places:
        job = engine.template.tokenise_pack(text, place)
        if prefix_of(job.prompt, job.prompt.spans[0], chunk_tokens) == pack.prefix:
            same = common_length(pack.token_ids, job.token_ids)
            return Text(text, job.token_ids, max((at for at in edges if at <= same), default=0))
    raise PackError(
        f"The pack {pack.text[:40]!r} was compiled for another place than {' or '.join(map(repr, places))}. "
        "Give the `compiled_for` that it was built with."
    )


def compiled(pack: KnowledgePack, made: Text, engine: Session, edits: Edits) -> KnowledgePack:
    """The pack of a text at the place of `pack`, whose KV serves as far as they share it."""
    before = Prompt(pack.prefix.token_ids, breaks=pack.prefix.cuts)
    if made.reused and pack.kv is not None:
        start, stop = len(before), len(before) + made.reused
        shared = replace(pack, token_ids=made.token_ids[: made.reused], kv=pack.kv.slice(0, made.reused))
        ids = before.token_ids + shared.token_ids
        before = replace(before, token_ids=ids, spans=(Span(start, stop, PackRef("", shared)),))
    cuts = cut(before, int(engine.fingerprint.chunk_tokens))
    ids = pack.prefix.token_ids + made.token_ids
    kv = computed(
        engine,
        Plan(
            replace(before, token_ids=ids),
            plan_regions(cuts, cuts.own),
            wanted=(len(pack.prefix), len(ids)),
            deterministic=True,
        ),
    )
    about = edits.written(pack.provenance)
    return replace(pack, text=made.text, token_ids=made.token_ids, kv=kv, provenance=about, stored_bytes=0)


def computed(engine: Session, plan: Plan, needed: str = "kv") -> KVTensors:
    """The KV that `plan` wants; raises `UnsupportedRequestError` for an engine that lacks what it takes."""
    if not {"kv", needed} <= engine.engine.supports:
        raise UnsupportedRequestError(f"{engine.name} cannot edit packs. `kp_core.load_engine(model)` can.")
    [kv] = engine.engine.kv([plan])
    return kv
