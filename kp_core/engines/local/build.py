"""Computes the KV of many short texts, several in one forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.fill import Filler
from kp_core.kv import KVTensors
from kp_core.plan import Plan

__all__ = ["build"]

_WINDOW = 256
"""Plans examined together: enough to find several with the same prefix, few enough to hold in memory."""
_MOST_TEXTS, _MOST_TOKENS = 16, 512
"""Limits of one pass."""


def build(filler: Filler, plans: Iterable[Plan]) -> Iterator[KVTensors]:
    """The KV of `plan.wanted` for each plan, in order. Texts after the same prefix share passes."""
    source = iter(plans)
    while window := list(itertools.islice(source, _WINDOW)):
        # Batches run in the order of their first plans, so that the first results come soon.
        results: dict[int, KVTensors] = {}
        upcoming = 0
        for batch in sorted(_batches(filler, window), key=min):
            kvs = _together(filler, [window[index] for index in batch]) if len(batch) > 1 else []
            kvs = kvs or [_alone(filler, window[index]) for index in batch]
            results.update(zip(batch, kvs, strict=True))
            while upcoming in results:
                yield results.pop(upcoming)
                upcoming += 1


def _batches(filler: Filler, plans: list[Plan]) -> list[list[int]]:
    """The indices of the plans, grouped into passes. A pass has texts after the same prefix of plain tokens."""
    batches: list[list[int]] = []
    latest: dict[tuple[int, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        start, stop = plan.wanted
        is_plain = all(region.source == "computed" and region.stop <= start for region in plan.regions)
        batch = latest.get(plan.prompt.token_ids[:start], []) if is_plain and filler.model.batches else []
        tokens = sum(plans[member].wanted[1] - start for member in batch)
        if not batch or len(batch) == _MOST_TEXTS or tokens + stop - start > _MOST_TOKENS:
            batch = []
            batches.append(batch)
            if is_plain:
                latest[plan.prompt.token_ids[:start]] = batch
        batch.append(index)
    return batches


def _alone(filler: Filler, plan: Plan) -> KVTensors:
    start, stop = plan.wanted
    run = filler.start(plan, stop, logits=False)
    try:
        for at in range(run.buffer.length, stop, filler.pass_tokens):
            ids = plan.prompt.token_ids[at : min(stop, at + filler.pass_tokens)]
            filler.forward(ids, run.buffer, logits=False)
        return run.buffer.read(start, stop)
    finally:
        filler.finish(run)


def _together(filler: Filler, plans: list[Plan]) -> list[KVTensors]:
    """The KV of several plans, computed in one pass; empty when there is no room for that now."""
    start, shape, stops = plans[0].wanted[0], filler.model.shape, [plan.wanted[1] for plan in plans]
    run, reserved = filler.start(plans[0], start, logits=False), 0
    try:
        size = sum(KVBuffer.bytes_for(shape, stop) for stop in stops)
        if not filler.pool.reserve(size):
            return []
        reserved = size
        buffers = [KVBuffer(shape, stop) for stop in stops]
        prefix_tokens = min(run.buffer.length, start)
        for buffer in buffers:
            buffer.append(run.buffer.view_of(0, prefix_tokens))
        ids = [plan.prompt.token_ids[prefix_tokens:stop] for plan, stop in zip(plans, stops, strict=True)]
        filler.forward_several(buffers, ids)
        return [buffer.read(start, stop) for buffer, stop in zip(buffers, stops, strict=True)]
    finally:
        filler.pool.free(reserved)
        filler.finish(run)
