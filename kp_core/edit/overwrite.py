"""Overwriting: replaces the KV of a field in place, and keeps the KV of all other tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import blake2b

from kp_core.compose import SpliceComposer
from kp_core.edit.rebuild import computed, tokenised
from kp_core.edit.statement import replaced
from kp_core.engines.request import CompiledFor
from kp_core.engines.session import Session
from kp_core.errors import PackError
from kp_core.packs.edits import Edit, Edits
from kp_core.packs.pack import KnowledgePack, Prefix, common_length
from kp_core.packs.view import PackRef
from kp_core.plan import Plan, Region, plan_regions
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["overwrite"]

logger = logging.getLogger(__name__)


def overwrite(
    pack: KnowledgePack, old: str, new: str, engine: Session, *, compiled_for: CompiledFor | None = None
) -> KnowledgePack:
    """`pack` with the KV of the tokens of `old` replaced by that of `new`. The KV behind it is moved and kept.

    An approximation, for experiments and for reasoning models (Models Take Notes at Prefill, arXiv 2606.17107): the KV
    behind the field still encodes the old value, which usually wins without a chain of thought. The dtype in the pack's
    fingerprint marks this: the pack is used only with `mismatch="accept"`, and counts as approximate. Raises as
    `amend`, `PackError` for a pack with errata, `UnsupportedRequestError` if the model's keys cannot be moved.
    """
    if pack.edits.corrections:
        raise PackError(f"The pack {pack.text[:40]!r} has errata, and no field of its own is valid. `squash` it first.")
    text = replaced(pack.text, old, new)
    encoded = tokenised(pack, text, engine, compiled_for)
    logger.warning(
        "The pack %r is overwritten in its KV alone: without a chain of thought the old value usually wins. "
        "`amend` puts an erratum behind it, `rebuild` computes it anew.",
        text[:40],
    )
    start, ids = len(pack.prefix), encoded.token_ids
    head = common_length(pack.token_ids, ids)
    tail = common_length(pack.token_ids[head:][::-1], ids[head:][::-1])
    if not head and not tail:
        raise PackError(f"Nothing of {pack.text[:40]!r} would stay; `rebuild` it.")
    spans = []
    for at, since, count in ((0, 0, head), (len(ids) - tail, len(pack.token_ids) - tail, tail)):
        if count and pack.kv is not None:
            part = replace(
                pack,
                token_ids=pack.token_ids[since : since + count],
                prefix=Prefix(pack.prefix.token_ids + pack.token_ids[:since]),
                kv=pack.kv.slice(since, since + count),
            )
            spans.append(Span(start + at, start + at + count, PackRef("", part)))
    # The KV before and behind the field is moved; the field itself is computed between them.
    before, stop = Prompt(pack.prefix.token_ids, owner=pack.namespace), start + len(ids)
    region = Region(start, stop, "composed", tuple(spans), SpliceComposer(), ids)
    prompt = replace(before, token_ids=(*before.token_ids, *ids), spans=tuple(spans))
    plan = Plan(prompt, (*plan_regions(before), region), wanted=(start, stop))
    kv = pack.kv if ids == pack.token_ids else computed(engine, plan, "compose")
    history = (*pack.history, Edit("overwrite", old, new))
    # Packs with equal text that were made from different packs have different KV, so their fingerprints must differ.
    made_of = blake2b(f"{pack.fingerprint.dtype}\0{pack.text}\0{old}".encode(), digest_size=4).hexdigest()
    return replace(
        pack,
        text=text,
        token_ids=ids,
        kv=kv,
        fingerprint=replace(pack.fingerprint, dtype=f"{pack.fingerprint.dtype}/overwrite:{made_of}"),
        provenance=Edits(history=history).written(pack.provenance),
        stored_bytes=0,
    )
