"""Exact KV of a combination that was answered approximately, computed when nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kp_core.engines.base import Engine
from kp_core.plan import Limit, Plan

__all__ = ["exact_steps", "until"]


def exact_steps(engine: Engine, plan: Plan) -> Callable[[], Iterator[None]]:
    """Prefill an exact plan, one chunk at each step, so that a request that comes meanwhile waits for one at most."""

    def work() -> Iterator[None]:
        for _, stop in [chunk for region in plan.regions for chunk in region.chunks]:
            for _token in engine.run(until(plan, stop)):
                pass
            yield

    return work


def until(plan: Plan, stop: int) -> Plan:
    """The chunks of `plan` up to `stop`, to be prefilled and not answered."""
    chunks = [tuple(chunk for chunk in region.chunks if chunk[1] <= stop) for region in plan.regions]
    regions = tuple(
        replace(region, stop=kept[-1][1], chunks=kept)
        for region, kept in zip(plan.regions, chunks, strict=True)
        if kept
    )
    prompt = plan.prompt.until(regions[-1].stop if regions else 0)
    return replace(plan, prompt=prompt, regions=regions, token_budget=0, grammar=None, limit=Limit())
