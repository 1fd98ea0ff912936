"""The order of packs that may stand in any: known sequences go on, and a pack compiled for the place goes first.

Exact for the order chosen: the answer is that of the text in that order. Prompts that begin alike are what ContextPilot
(MLSys 2026) gains by.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kp_core.packs.view import PackRef, Segment
from kp_core.plan import Plan
from kp_core.prompt.conversation import Turn
from kp_core.prompt.prompt import Prompt

__all__ = ["Ordering", "missing_tokens"]

Handles: TypeAlias = tuple[str, ...]

_PLACES = 256
_LOOKED_AT = 4  # Each costs a rendering.
_SEQUENCES = 256  # At one place, a few hundred bytes each.


def missing_tokens(plan: Plan, found: int) -> int:
    """How many tokens of `plan` are to be computed, when `found` of them, from the first on, are in memory."""
    tokens = 0
    for region in plan.regions:
        pack = region.span.pack if region.span and region.source in ("pack", "composed") else None
        if pack is None or (pack.kv is None and not pack.stored_bytes):
            tokens += max(0, region.stop - max(region.start, found))
    return tokens


@dataclass(frozen=True)
class Group:
    """Packs that stand side by side in one message, parted by the same text; `place` names what stands before them."""

    place: Hashable
    packs: tuple[PackRef, ...]

    @property
    def handles(self) -> Handles:
        """Their handles, each once, in the order given."""
        return tuple(dict.fromkeys(pack.handle for pack in self.packs))


class Ordering:
    """Renders prompts with their packs in the order given, or where it is free in the one with least to compute.

    It remembers the sequences of packs that were sent, by their place; what was sent last is found first.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, OrderedDict[Handles, None]] = OrderedDict()
        self._lock = threading.Lock()

    def prompt(
        self,
        turns: Sequence[Turn],
        render: Callable[[Sequence[Turn]], Prompt],
        cost: Callable[[Prompt], int],
        *,
        is_free: bool,
        learn: bool,
    ) -> tuple[Prompt, int]:
        """The prompt, and how many packs are not where they were named; never dearer than in the order given.

        Packs that were sent before, at the same place and together, keep their order; so a conversation does.
        """
        prompt, orders, given = render(turns), dict[int, Handles](), _arranged(turns, {})[1]
        if is_free and given:
            prompt, orders = self._best(turns, render, cost, prompt, given)
        if learn and given:
            self._keep(_arranged(turns, orders)[1], orders)
        moved = [
            mine != theirs
            for at, order in orders.items()
            for mine, theirs in zip(order, given[at].handles, strict=True)
        ]
        return prompt, sum(moved)

    def _best(
        self,
        turns: Sequence[Turn],
        render: Callable[[Sequence[Turn]], Prompt],
        cost: Callable[[Prompt], int],
        prompt: Prompt,
        given: Sequence[Group],
    ) -> tuple[Prompt, dict[int, Handles]]:
        orders: dict[int, Handles] = {}
        best, known = cost(prompt), set()
        for at in range(len(given)):
            # Each group is at its place where those before it have their orders.
            group = _arranged(turns, orders)[1][at]
            sent = next((each for each in self._sent(group) if set(each) == set(group.handles)), None)
            known |= {at} if sent else set()
            orders[at] = sent or given[at].handles
        if any(orders[at] != tuple(pack.handle for pack in group.packs) for at, group in enumerate(given)):
            trial = render(_arranged(turns, orders)[0])
            if (found := cost(trial)) <= best:
                prompt, best = trial, found
            else:
                orders, known = {}, set()
        for at in range(len(given)):
            group = _arranged(turns, orders)[1][at]
            # What was sent in this order may be gone from memory, and something else be there.
            if at in known and best < min(len(pack.pack.token_ids) for pack in group.packs):
                continue
            for order in self._candidates(group, partial(_stands, prompt)):
                if order != orders.get(at, group.handles):
                    trial = render(_arranged(turns, {**orders, at: order})[0])
                    if (found := cost(trial)) < best:
                        prompt, best, orders = trial, found, {**orders, at: order}
        return prompt, orders

    def _candidates(self, group: Group, is_home: Callable[[PackRef], bool]) -> list[Handles]:
        """Orders worth looking at: the longest known beginnings, and the largest pack at home, each continued."""
        sizes = {pack.handle: len(pack.pack.token_ids) for pack in group.packs}
        # The longest may be gone from memory, so a few are looked at.
        shared = dict.fromkeys(_common(known, sizes) for known in self._sent(group))
        begins = sorted(filter(None, shared), key=lambda begin: -sum(sizes[handle] for handle in begin))[:_LOOKED_AT]
        home = [pack.handle for pack in group.packs if is_home(pack)]
        if home:
            begins.append((max(home, key=sizes.__getitem__),))
        return list(dict.fromkeys(tuple(dict.fromkeys((*begin, *group.handles))) for begin in (*begins, ())))

    def _keep(self, groups: Sequence[Group], orders: Mapping[int, Handles]) -> None:
        """Remember what was sent at which place."""
        with self._lock:
            for at, group in enumerate(groups):
                handles, known = orders.get(at, group.handles), self._places.setdefault(group.place, OrderedDict())
                self._places.move_to_end(group.place)
                known[handles] = None
                known.move_to_end(handles)
                if len(known) > _SEQUENCES:
                    known.popitem(last=False)
            while len(self._places) > _PLACES:
                self._places.popitem(last=False)

    def _sent(self, group: Group) -> list[Handles]:
        """The sequences that were sent at the place of a group."""
        with self._lock:
            return list(reversed(self._places.get(group.place, ())))


def _arranged(turns: Sequence[Turn], orders: Mapping[int, Handles]) -> tuple[tuple[Turn, ...], list[Group]]:
    """`turns` with their groups in `orders`, by number, the others as they are; and the groups in them.

    Handles that an order leaves out are sent no more.
    """
    groups: list[Group] = []
    made: list[Turn] = []
    before = 0
    for turn in turns:
        segments: list[Segment] = []
        at = 0
        for start, stop in _runs(turn.segments):
            segments += turn.segments[at:start]
            part = turn.segments[start:stop]
            packs = tuple(each for each in part if isinstance(each, PackRef))
            groups.append(Group(hash((before, turn.role, *map(_name, segments))), packs))
            order = orders.get(len(groups) - 1)
            segments += part if order is None else _ordered(packs, part[1], order)
            at = stop
        made.append(turn.with_segments((*segments, *turn.segments[at:])))
        before = hash((before, turn.role, *map(_name, made[-1].segments)))
    return tuple(made), groups


def _stands(prompt: Prompt, reference: PackRef) -> bool:
    """Whether the pack was compiled for a place in `prompt` where some pack begins."""
    prefix = reference.pack.prefix.token_ids
    starts = {span.start for span in prompt.spans}
    return len(prefix) in starts and prompt.token_ids[: len(prefix)] == prefix


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Where packs stand side by side: `start:stop` of segments, packs and the text between them in turn.

    Two packs alone may be parted by anything, which says nothing about a list; so their text has no letters in it.
    """
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(segments):
        stop = at + 1
        if _is_free(segments[at]):
            between = segments[at + 1] if at + 2 < len(segments) else None
            while stop + 1 < len(segments) and segments[stop] == between and _is_free(segments[stop + 1]):
                stop += 2
            count = (stop - at + 1) // 2
            if count > 2 or (count > 1 and not any(char.isalnum() for char in str(between))):
                found.append((at, stop))
            else:
                stop = at + 1
        at = stop
    return found


def _is_free(segment: Segment) -> bool:
    return isinstance(segment, PackRef) and not segment.recognised


def _ordered(packs: Sequence[PackRef], between: Segment, order: Handles) -> list[Segment]:
    by_handle = {pack.handle: pack for pack in reversed(packs)}
    parts: list[Segment] = []
    for handle in order:
        parts += [between, by_handle[handle]]
    return parts[1:]


def _common(known: Handles, wanted: Mapping[str, int]) -> Handles:
    """The beginning of a known sequence that holds nothing but wanted packs."""
    stop = next((at for at, handle in enumerate(known) if handle not in wanted), len(known))
    return known[:stop]


def _name(segment: Segment) -> str:
    return segment.handle if isinstance(segment, PackRef) else segment
