"""Chooses the order of packs where it is free: a known sequence first, or a pack that was compiled for the position."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from kp_core.packs.view import PackRef, Segment
from kp_core.prompt.conversation import Turn
from kp_core.prompt.prompt import Prompt

__all__ = ["Group", "Handles", "Ordering", "arranged"]

_PLACES = 256  # Places of packs side by side that are remembered.
_SEQUENCES = 256  # Sequences of packs remembered at one place, a few hundred bytes each.
_LOOKED_AT = 4  # Known beginnings to try; each costs a rendering.

Handles: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Packs side by side in turn `turn`, separated by the same text; `place` identifies everything before them."""

    turn: int
    place: Hashable
    packs: tuple[PackRef, ...]

    @property
    def handles(self) -> Handles:
        """Their handles in the given order, each once."""
        return tuple(dict.fromkeys(pack.handle for pack in self.packs))


class Ordering:
    """Renders prompts with their packs in the given order or, where it is free, in the one with the least to compute.

    It remembers which sequences of packs were sent at each place, and tries the most recent ones first, then a pack
    that was compiled for the position. The answer is exact for the chosen order: it is the answer to the text in this
    order. ContextPilot (MLSys 2026) gains speed from common prefixes in the same way.
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
    ) -> Prompt:
        """The prompt. It never costs more to compute than the prompt in the given order.

        A set of packs that was sent before at the same place keeps its order, so a conversation keeps its orders.
        """
        prompt, orders, groups = render(turns), dict[int, Handles](), arranged(turns, {})[1]
        if is_free and groups:
            prompt, orders = self._best(turns, render, cost, prompt, groups)
        if learn and groups:
            self._keep(arranged(turns, orders)[1], orders)
        moved = [
            handle != original
            for at, order in orders.items()
            for handle, original in zip(order, groups[at].handles, strict=True)
        ]
        return replace(prompt, reordered=sum(moved))

    def _best(
        self,
        turns: Sequence[Turn],
        render: Callable[[Sequence[Turn]], Prompt],
        cost: Callable[[Prompt], int],
        prompt: Prompt,
        given: Sequence[Group],
    ) -> tuple[Prompt, dict[int, Handles]]:
        orders: dict[int, Handles] = {}
        best_cost, settled = cost(prompt), set()
        for at in range(len(given)):
            # The place of a group depends on the orders of the groups before it.
            group = arranged(turns, orders)[1][at]
            remembered = next((handles for handles in self._sent(group) if set(handles) == set(group.handles)), None)
            settled |= {at} if remembered else set()
            orders[at] = remembered or given[at].handles
        if any(orders[at] != tuple(pack.handle for pack in group.packs) for at, group in enumerate(given)):
            trial = render(arranged(turns, orders)[0])
            if (trial_cost := cost(trial)) <= best_cost:
                prompt, best_cost = trial, trial_cost
            else:
                orders, settled = {}, set()
        for at in range(len(given)):
            group = arranged(turns, orders)[1][at]
            # KV of this order may be gone from memory while KV of another order is there.
            if at in settled and best_cost < min(len(pack.pack.token_ids) for pack in group.packs):
                continue
            for order in self._candidates(group, partial(_stands, prompt)):
                if order != orders.get(at, group.handles):
                    trial = render(arranged(turns, {**orders, at: order})[0])
                    if (trial_cost := cost(trial)) < best_cost:
                        prompt, best_cost, orders = trial, trial_cost, {**orders, at: order}
        return prompt, orders

    def _candidates(self, group: Group, is_home: Callable[[PackRef], bool]) -> list[Handles]:
        """The orders to try: some begin with a known sequence, one with the largest pack compiled for this place.

        Each continues in the given order, and the given order itself is the last one.
        """
        sizes = {pack.handle: len(pack.pack.token_ids) for pack in group.packs}
        # The KV of the longest may be gone from memory, so several are tried.
        common = dict.fromkeys(_common(sequence, sizes) for sequence in self._sent(group))
        beginnings = sorted(filter(None, common), key=lambda handles: -sum(sizes[handle] for handle in handles))[
            :_LOOKED_AT
        ]
        home_handles = [pack.handle for pack in group.packs if is_home(pack)]
        if home_handles:
            beginnings.append((max(home_handles, key=sizes.__getitem__),))
        return list(
            dict.fromkeys(tuple(dict.fromkeys((*beginning, *group.handles))) for beginning in (*beginnings, ()))
        )

    def _keep(self, groups: Sequence[Group], orders: Mapping[int, Handles]) -> None:
        """Remember which sequence was sent at which place."""
        with self._lock:
            for at, group in enumerate(groups):
                handles, sequences = orders.get(at, group.handles), self._places.setdefault(group.place, OrderedDict())
                self._places.move_to_end(group.place)
                sequences[handles] = None
                sequences.move_to_end(handles)
                if len(sequences) > _SEQUENCES:
                    sequences.popitem(last=False)
            while len(self._places) > _PLACES:
                self._places.popitem(last=False)

    def _sent(self, group: Group) -> list[Handles]:
        """The sequences that were sent at the place of a group, most recent first."""
        with self._lock:
            return list(reversed(self._places.get(group.place, ())))


def arranged(turns: Sequence[Turn], orders: Mapping[int, Handles]) -> tuple[tuple[Turn, ...], list[Group]]:
    """`turns` with some groups reordered, and all groups of the result.

    `orders` maps the number of a group to its handles in their new order; handles that it leaves out are not sent.
    """
    groups: list[Group] = []
    arranged: list[Turn] = []
    place = 0
    for number, turn in enumerate(turns):
        segments: list[Segment] = []
        at = 0
        for start, stop in _runs(turn.segments):
            segments += turn.segments[at:start]
            run = turn.segments[start:stop]
            packs = tuple(segment for segment in run if isinstance(segment, PackRef))
            groups.append(Group(number, hash((place, turn.role, *map(_name, segments))), packs))
            order = orders.get(len(groups) - 1)
            segments += run if order is None else _ordered(packs, "" if isinstance(run[1], PackRef) else run[1], order)
            at = stop
        arranged.append(turn.with_segments((*segments, *turn.segments[at:])))
        place = hash((place, turn.role, *map(_name, arranged[-1].segments)))
    return tuple(arranged), groups


def _stands(prompt: Prompt, reference: PackRef) -> bool:
    """Whether the pack was compiled for a position in `prompt` where some pack begins."""
    prefix = reference.pack.prefix
    starts = {span.start for span in prompt.spans}
    return len(prefix) in starts and prompt.token_ids[: len(prefix)] == prefix


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """The ranges `start:stop` of segments in which packs alternate with the same text, or with none.

    Two packs count only if the text between them has no letters or digits, because any sentence may separate two packs
    that are no list.
    """
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(segments):
        stop = at + 1
        while _is_free(segments[at]) and stop < len(segments) and _is_free(segments[stop]):
            stop += 1
        if stop > at + 1:
            ranges.append((at, stop))
        elif _is_free(segments[at]):
            separator = segments[at + 1] if at + 2 < len(segments) else None
            while stop + 1 < len(segments) and segments[stop] == separator and _is_free(segments[stop + 1]):
                stop += 2
            count = (stop - at + 1) // 2
            if count > 2 or (count > 1 and not any(char.isalnum() for char in str(separator))):
                ranges.append((at, stop))
            else:
                stop = at + 1
        at = stop
    return ranges


def _is_free(segment: Segment) -> bool:
    return isinstance(segment, PackRef) and not segment.recognised


def _ordered(packs: Sequence[PackRef], between: Segment, order: Handles) -> list[Segment]:
    by_handle = {pack.handle: pack for pack in reversed(packs)}
    segments: list[Segment] = []
    for handle in order:
        segments += [between, by_handle[handle]]
    return segments[1:]


def _common(known: Handles, wanted: Mapping[str, int]) -> Handles:
    """The longest beginning of a known sequence that has only wanted packs."""
    stop = next((at for at, handle in enumerate(known) if handle not in wanted), len(known))
    return known[:stop]


def _name(segment: Segment) -> str:
    return segment.handle if isinstance(segment, PackRef) else segment
