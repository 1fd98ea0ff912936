"""Choosing the order of packs whose order is free, by what is in memory and in the store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from kp_core.compose.order import Arrangement, Group, Handles, OrderMemory
from kp_core.packs.view import PackRef
from kp_core.plan import Plan
from kp_core.prompt.prompt import Prompt

__all__ = ["Ordering", "missing_tokens"]


class _Render(Protocol):
    def __call__(self, *, arrange: Arrangement) -> Prompt: ...


def missing_tokens(plan: Plan, found: int) -> int:
    """How many tokens of `plan` are to be computed, when `found` of them, from the first on, are in memory."""
    tokens = 0
    for region in plan.regions:
        pack = region.span.pack if region.span and region.source in ("pack", "composed") else None
        if pack is None or (pack.kv is None and not pack.stored_bytes):
            tokens += max(0, region.stop - max(region.start, found))
    return tokens


class Ordering:
    """Renders prompts with their packs in the order given, or where it is free in the one with least to compute."""

    def __init__(self) -> None:
        self._memory = OrderMemory()

    def prompt(
        self, render: _Render, cost: Callable[[Prompt], int], *, is_free: bool, learn: bool
    ) -> tuple[Prompt, int]:
        """The prompt, and how many packs are not where they were named; never dearer than in the order given.

        Packs that were sent before, at the same place and together, keep their order; so a conversation does.
        """
        given = Arrangement()
        prompt, orders = render(arrange=given), dict[int, Handles]()
        if is_free and given.groups:
            prompt, orders = self._best(render, cost, prompt, given)
        if learn and given.groups:
            sent = Arrangement(orders)
            sent(given.turns)
            self._memory.keep((group.place, orders.get(at, group.handles)) for at, group in enumerate(sent.groups))
        moved = [
            mine != theirs
            for at, order in orders.items()
            for mine, theirs in zip(order, given.groups[at].handles, strict=True)
        ]
        return prompt, sum(moved)

    def _best(
        self, render: _Render, cost: Callable[[Prompt], int], prompt: Prompt, given: Arrangement
    ) -> tuple[Prompt, dict[int, Handles]]:
        orders: dict[int, Handles] = {}
        best, known = cost(prompt), set()
        for at in range(len(given.groups)):
            exact = self._memory.exact(self._group(at, orders, given))
            known |= {at} if exact else set()
            orders[at] = exact or given.groups[at].handles
        if any(orders[at] != tuple(pack.handle for pack in group.packs) for at, group in enumerate(given.groups)):
            trial = render(arrange=Arrangement(orders))
            if (found := cost(trial)) <= best:
                prompt, best = trial, found
            else:
                orders, known = {}, set()
        for at in range(len(given.groups)):
            group = self._group(at, orders, given)
            # What was sent in this order may be gone from memory, and something else be there.
            if at in known and best < min(len(pack.pack.token_ids) for pack in group.packs):
                continue
            for order in self._memory.candidates(group, partial(_stands, prompt)):
                if order != orders.get(at, group.handles):
                    trial = render(arrange=Arrangement({**orders, at: order}))
                    if (found := cost(trial)) < best:
                        prompt, best, orders = trial, found, {**orders, at: order}
        return prompt, orders

    @staticmethod
    def _group(at: int, orders: dict[int, Handles], given: Arrangement) -> Group:
        """One group as it is where those before it have their orders."""
        arrangement = Arrangement(orders)
        arrangement(given.turns)
        return arrangement.groups[at]


def _stands(prompt: Prompt, reference: PackRef) -> bool:
    """Whether the pack was compiled for a place in `prompt` where some pack begins."""
    prefix = reference.pack.prefix.token_ids
    starts = {span.start for span in prompt.spans}
    return len(prefix) in starts and prompt.token_ids[: len(prefix)] == prefix
