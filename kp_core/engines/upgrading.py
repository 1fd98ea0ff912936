"""Exact KV of a combination that was answered approximately, computed when nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kp_core.engines.base import Engine
from kp_core.plan import Limit, Plan

__all__ = ["exact_steps"]


_STEP_TOKENS = 512


def exact_steps(engine: Engine, plan: Plan) -> Callable[[], Iterator[None]]:
    """Prefill an exact plan in short steps, so that a request that comes meanwhile waits for one at most."""

    def work() -> Iterator[None]:
        for start in range(0, len(plan.prompt), _STEP_TOKENS):
            for _token in engine.run(_until(plan, min(start + _STEP_TOKENS, len(plan.prompt)))):
                pass
            yield

    return work


def _until(plan: Plan, stop: int) -> Plan:
    """The first `stop` tokens of `plan`, to be prefilled and not answered."""
    regions = tuple(replace(each, stop=min(each.stop, stop)) for each in plan.regions if each.start < stop)
    return replace(plan, prompt=plan.prompt.until(stop), regions=regions, token_budget=0, grammar=None, limit=Limit())
