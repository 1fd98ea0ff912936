"""Exact KV of a combination that was answered approximately, computed when nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kp_core.engines.base import Engine
from kp_core.plan import Limit, Plan

__all__ = ["exact_steps"]


def exact_steps(engine: Engine, plan: Plan) -> Callable[[], Iterator[None]]:
    """Prefill an exact plan, one chunk at each step, so that a request that comes meanwhile waits for one at most."""

    def work() -> Iterator[None]:
        for _, stop in [chunk for region in plan.regions for chunk in region.chunks]:
            chunks = [tuple(c for c in region.chunks if c[1] <= stop) for region in plan.regions]
            regions = [
                replace(region, stop=kept[-1][1], chunks=kept)
                for region, kept in zip(plan.regions, chunks, strict=True)
                if kept
            ]
            part = replace(
                plan,
                prompt=plan.prompt.until(stop),
                regions=tuple(regions),
                token_budget=0,
                grammar=None,
                limit=Limit(),
            )
            for _token in engine.run(part):
                pass
            yield

    return work
