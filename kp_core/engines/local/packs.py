"""Gives regions of a plan the KV of their packs, and runs composers for packs at other positions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kp_core.compose import PacketComposer
from kp_core.engines.local.computing import Computing
from kp_core.engines.local.scheduler import Scheduler
from kp_core.errors import KVShapeError, PackNotFoundError
from kp_core.kv import KVTensors
from kp_core.packs.codec import in_threads
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack
from kp_core.plan import Plan, Region
from kp_core.prompt.prompt import Span

if TYPE_CHECKING:
    from kp_core.engines.hf.model import CausalModel
    from kp_core.engines.local.fill import Run

__all__ = ["PackKV"]

logger = logging.getLogger(__name__)

_TOGETHER_TOKENS = 256
"""Longer text gets a pass of its own, which is faster: a pass shared with a composed region needs an attention mask."""


class PackKV:
    """Loads the KV of packs for a model's cache. The forward passes of composers take their turns in `scheduler`."""

    def __init__(self, model: CausalModel, scheduler: Scheduler) -> None:
        self._model, self._scheduler = model, scheduler

    def load(self, region: Region, run: Run) -> KVTensors | None:
        """The KV of a region from its pack or its composer, on the devices of the cache.

        `None` if the region must be computed from its text. Raises `KVShapeError` when the KV has another number of
        tokens than the region.
        """
        if region.source not in ("pack", "composed") or region.span is None or not run.plan.reuse:
            return None
        spans, composer, packs = region.spans, region.composer, []
        if isinstance(composer, PacketComposer):
            loaded: Sequence[KnowledgePack | None] = [self._wrapped(span, composer, run) for span in spans]
        else:
            loaded = in_threads(
                lambda span: self._read(span, run.plan), spans, sum(span.pack.stored_bytes for span in spans)
            )
        for span, pack in zip(spans, loaded, strict=True):
            if pack is None or pack.kv is None:
                logger.info("Pack %s has no KV for this position; it is computed from its text.", span.handle)
                return None
            if not self._model.shape.fits(pack.kv):
                logger.warning(
                    "Pack %s has KV of other layers or states than the model; it is computed from its text.",
                    span.handle,
                )
                return None
            packs.append(pack)
        kv = packs[0].kv if region.composer is None else self._compose(region, packs, run)
        if kv is None or kv.tokens != len(region):
            raise KVShapeError(
                f"The composer {region.composer and region.composer.key!r} made KV of {kv and kv.tokens} tokens; "
                f"expected {len(region)}, as the pack {region.span.handle} has at its position."
            )
        return self.placed(kv)

    def placed(self, kv: KVTensors) -> KVTensors:
        """`kv` on the devices and in the dtype of the cache."""
        return self._model.shape.placed(kv)

    def _read(self, span: Span, plan: Plan) -> KnowledgePack | None:
        """The pack of a span with its KV; `None` if it is gone or is no longer the pack in the plan."""
        planned = pack = span.pack
        if pack.kv is None and plan.packs is not None and find_handles(span.handle):
            try:
                pack = plan.packs.get(Handle.parse(span.handle), planned.key)
            except PackNotFoundError:
                return None
        fields = ("token_ids", "prefix", "fingerprint")
        if any(getattr(pack, name) != getattr(planned, name) for name in fields):
            return None
        return pack if pack.token_ids == plan.prompt.token_ids[span.start : span.stop] else replace(pack, kv=None)

    def _wrapped(self, span: Span, composer: PacketComposer, run: Run) -> KnowledgePack:
        """A wrapped pack with its KV: read from the store, or compiled now and kept there."""
        kv = run.plan.kept.read(span.start, span.stop) if run.plan.kept else None
        if kv is None:
            kv = composer.compile(span.pack, Computing(self._model, self._scheduler, run.buffer, run.plan.prompt))
            run.computed += len(span)
            if run.plan.kept and find_handles(span.handle):
                run.plan.kept.take(span.start, span.stop, kv.to("cpu"))
        return replace(span.pack, kv=self.placed(kv))

    def _compose(self, region: Region, packs: Sequence[KnowledgePack], run: Run) -> KVTensors | None:
        """The KV that the composer of a region makes. Raises `KVShapeError` if it changed what `Forward.anew` gave."""
        if region.composer is None:
            return None
        forward = Computing(self._model, self._scheduler, run.buffer, run.plan.prompt, may_wait=_may_wait(region, run))
        kv = region.composer.fill(region, packs, forward)
        if forward.looked_behind:
            run.path.is_open = False  # This KV depends on the end of this prompt, so no other prompt may reuse it.
        if forward.late:
            if not run.buffer.holds(kv):
                raise KVShapeError(
                    f"The composer {region.composer.key!r} changed what `Forward.anew` gave; expected it as it is."
                )
            run.late = region, forward.late
        run.computed += min(forward.tokens, len(region))
        return kv


def _may_wait(region: Region, run: Run) -> bool:
    """Whether the pass over the text after `region` also computes its tokens: if this text is short, without packs."""
    next_region = next((candidate for candidate in run.plan.regions if candidate.start == region.stop), None)
    if next_region is None or next_region.source != "computed" or len(next_region) > _TOGETHER_TOKENS:
        return False
    return not any(span.start < next_region.stop and next_region.start < span.stop for span in run.plan.prompt.spans)
