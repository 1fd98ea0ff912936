"""The order of packs that may stand in any: known sequences go on, and a pack compiled for the place goes first.

Exact for the order chosen: the answer is that of the text in that order. Prompts that begin alike are what ContextPilot
(MLSys 2026) gains by.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kp_core.packs.view import PackRef, Segment
from kp_core.prompt.conversation import Turn

__all__ = ["Arrangement", "Group", "Handles", "Order", "OrderMemory"]

Order: TypeAlias = Literal["given", "free"]
Handles: TypeAlias = tuple[str, ...]

_PLACES = 256
_LOOKED_AT = 4  # Each costs a rendering.
_SEQUENCES = 256  # At one place, a few hundred bytes each.


@dataclass(frozen=True)
class Group:
    """Packs that stand side by side in one message, parted by the same text; `place` names what stands before them."""

    place: Hashable
    packs: tuple[PackRef, ...]

    @property
    def handles(self) -> Handles:
        """Their handles, each once, in the order given."""
        return tuple(dict.fromkeys(pack.handle for pack in self.packs))


@dataclass
class Arrangement:
    """Puts the groups of a conversation in `orders`, by their number; the others stay as they are.

    `turns` are what it was called with last, as they came, and `groups` those in them.
    """

    orders: Mapping[int, Handles] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    turns: tuple[Turn, ...] = ()

    def __call__(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """`turns` in these orders; handles that an order leaves out are sent no more."""
        self.groups, self.turns = [], tuple(turns)
        made: list[Turn] = []
        before = 0
        for turn in turns:
            segments: list[Segment] = []
            at = 0
            for start, stop in _runs(turn.segments):
                segments += turn.segments[at:start]
                part = turn.segments[start:stop]
                packs = tuple(each for each in part if isinstance(each, PackRef))
                place = hash((before, turn.role, *map(_name, segments)))
                self.groups.append(Group(place, packs))
                order = self.orders.get(len(self.groups) - 1)
                segments += part if order is None else _ordered(packs, part[1], order)
                at = stop
            made.append(turn.with_segments((*segments, *turn.segments[at:])))
            before = hash((before, turn.role, *map(_name, made[-1].segments)))
        return tuple(made)


class OrderMemory:
    """The sequences of packs that were sent, by their place; what was sent last is found first."""

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, OrderedDict[Handles, None]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, sent: Iterable[tuple[Hashable, Handles]]) -> None:
        """Remember what was sent at which place."""
        with self._lock:
            for place, handles in sent:
                known = self._places.setdefault(place, OrderedDict())
                self._places.move_to_end(place)
                known[handles] = None
                known.move_to_end(handles)
                if len(known) > _SEQUENCES:
                    known.popitem(last=False)
            while len(self._places) > _PLACES:
                self._places.popitem(last=False)

    def exact(self, group: Group) -> Handles | None:
        """The order in which these very packs were sent at this place."""
        wanted = set(group.handles)
        return next((known for known in self._known(group) if wanted == set(known)), None)

    def candidates(self, group: Group, is_home: Callable[[PackRef], bool]) -> list[Handles]:
        """Orders worth looking at: the longest known beginnings, and the largest pack at home, each continued."""
        sizes = {pack.handle: len(pack.pack.token_ids) for pack in group.packs}
        # The longest may be gone from memory, so a few are looked at.
        shared = dict.fromkeys(_common(known, sizes) for known in self._known(group))
        begins = sorted(filter(None, shared), key=lambda begin: -sum(sizes[handle] for handle in begin))[:_LOOKED_AT]
        home = [pack.handle for pack in group.packs if is_home(pack)]
        if home:
            begins.append((max(home, key=sizes.__getitem__),))
        return list(dict.fromkeys(tuple(dict.fromkeys((*begin, *group.handles))) for begin in (*begins, ())))

    def _known(self, group: Group) -> list[Handles]:
        with self._lock:
            return list(reversed(self._places.get(group.place, ())))


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
