"""Packs that are often found together, compiled behind one another into the store when nobody waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from kp_core.engines.base import CachingEngine
from kp_core.engines.keeping import Keeper
from kp_core.engines.request import Request
from kp_core.engines.upgrading import exact_steps, until
from kp_core.plan import Plan
from kp_core.prompt.prompt import Often

__all__ = ["Together"]

logger = logging.getLogger(__name__)


class Together:
    """Keeps the KV of packs in the order that a free one would put them in, as `keep="always"` would.

    What one session spends is bounded by the `co_compile` of each request, in bytes of KV before compression; the
    store's own bound (`PackStore(keep_bytes=...)`) holds besides, and drops what is least used.
    """

    def __init__(self, engine: CachingEngine, exact: Callable[[Plan], Plan], keeper: Keeper) -> None:
        self._engine, self._exact, self._keeper = engine, exact, keeper
        self._spent = 0

    def work(self, often: Often, plan: Plan, request: Request) -> Callable[[], Iterator[None]]:
        """Compile one such set, a chunk at each step; `plan` is that of the request which had it once more."""

        def steps() -> Iterator[None]:
            prompt, stop = often()
            whole = self._exact(replace(plan, prompt=prompt, kept=None))
            kept = self._keeper.of(whole, replace(request, keep="always"), learn=True)
            if kept is None:
                return
            kept.wanted = frozenset(edge for edge in kept.wanted if edge[1] <= stop)
            size = sum(end - start for start, end in kept.wanted) * self._engine.bytes_per_token
            size += len(kept.wanted) * self._engine.state_bytes
            if not size or self._spent + size > request.co_compile:
                logger.info("Not compiled together: %d bytes, %d of %d spent.", size, self._spent, request.co_compile)
                return
            self._spent += size
            part = until(whole, stop)
            yield from exact_steps(self._engine, part)()
            for _token in self._engine.run(replace(part, kept=kept)):
                pass
            yield from kept.write()

        return steps
