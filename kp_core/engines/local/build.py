"""KV of many short texts, several at once where that changes no bit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.fill import Filler
from kp_core.kv import KVTensors
from kp_core.plan import Plan

__all__ = ["Builder"]

_BATCH = 8
_WINDOW = 256
"""Plans looked at together: enough to find batches of one length, few enough to hold in memory."""


class Builder:
    """Computes the KV that plans want, behind the prefixes they share.

    Batches hold texts of one length behind one prefix. How a sum is rounded depends on the shapes of the matrices and
    not on their content, so each shape of batch is first computed both ways and compared bit for bit; only shapes that
    passed are batched from then on.
    """

    def __init__(self, filler: Filler) -> None:
        self._filler = filler
        self._exact_shapes: dict[tuple[int, int], bool] = {}

    def build(self, plans: Iterable[Plan]) -> Iterator[KVTensors]:
        """The KV of `plan.wanted` for each plan, in order."""
        source = iter(plans)
        while window := list(itertools.islice(source, _WINDOW)):
            groups: defaultdict[tuple[tuple[int, ...], object, int], list[int]] = defaultdict(list)
            for index, plan in enumerate(window):
                start, stop = plan.wanted
                groups[plan.prompt.token_ids[:start], plan.edges, stop - start].append(index)
            batches = [
                indices[at : at + _BATCH] for indices in groups.values() for at in range(0, len(indices), _BATCH)
            ]
            # In order of their first plan, so that the first results come soon.
            done: dict[int, KVTensors] = {}
            upcoming = 0
            for batch in sorted(batches, key=min):
                done.update(zip(batch, self._compute([window[index] for index in batch]), strict=True))
                while upcoming in done:
                    yield done.pop(upcoming)
                    upcoming += 1

    def _compute(self, plans: list[Plan]) -> list[KVTensors]:
        shape = plans[0].wanted
        ends = plans[0].edges[-1][1] if plans[0].edges else 0
        alike = len(plans) == _BATCH and ends <= shape[0] and self._exact_shapes.get(shape) is not False
        if not alike or not (together := self._together(plans)):
            return self._alone(plans)
        if shape not in self._exact_shapes:
            alone = self._alone(plans)
            self._exact_shapes[shape] = all(one.equal(other) for one, other in zip(together, alone, strict=True))
            return alone
        return together

    def _alone(self, plans: list[Plan]) -> list[KVTensors]:
        return [kv for plan in plans for kv in self._together([plan])]

    def _together(self, plans: list[Plan]) -> list[KVTensors]:
        """The KV of several plans in one go, or nothing where there is no room for that now."""
        filler, (start, stop) = self._filler, plans[0].wanted
        run, reserved = filler.start(plans[0], stop, logits=False), 0
        try:
            buffer, done = run.buffer, run.buffer.length
            if len(plans) > 1:
                shape = filler.model.shape
                size = (shape.bytes_per_token * stop + shape.state_bytes) * len(plans)
                if not filler.pool.reserve(size):
                    return []
                reserved = size
                buffer = KVBuffer(filler.model.shape, stop, len(plans))
                if start:
                    buffer.append(run.buffer.read(0, start))
            ids = torch.tensor([plan.prompt.token_ids[done:stop] for plan in plans], device=filler.model.device)
            for at in range(0, stop - done, filler.chunk_tokens):
                filler.forward_batch(ids[:, at : at + filler.chunk_tokens], buffer)
            return [buffer.read(start, stop, row) for row in range(len(plans))]
        finally:
            filler.pool.free(reserved)
            filler.finish(run)
