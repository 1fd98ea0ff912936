"""What most composers are made of: packs laid into a stretch, and some of its tokens computed again."""

from __future__ import annotations

from collections.abc import Sequence

from kp_core.compose.base import Forward, Stretch
from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors

__all__ = ["join", "recompute"]


def join(region: Stretch, parts: Sequence[KVTensors], forward: Forward) -> KVTensors:
    """The KV of `region`: `parts` for its packs, as they are; what stands between packs is computed in one pass."""
    if [part.tokens for part in parts] != list(map(len, region.spans)):
        raise KVShapeError(
            f"Got KV of {[part.tokens for part in parts]} tokens for packs of {list(map(len, region.spans))}."
        )
    if len(parts) == 1 and len(region) == parts[0].tokens:
        return parts[0]
    room = forward.room(len(region))
    for span, part in zip(region.spans, parts, strict=True):
        place = room.slice(span.start - region.start, span.stop - region.start)
        for tensor, target in zip((*part.keys, *part.values), (*place.keys, *place.values), strict=True):
            target.copy_(tensor)
    return recompute(region, room, region.between, forward)


def recompute(region: Stretch, kv: KVTensors, chosen: Sequence[int], forward: Forward) -> KVTensors:
    """`kv` of `region` with the tokens `chosen`, counted from its start, computed anew over all others, in one pass.

    `kv` is written to where it is the room of the stretch. To be given back as it is: see `Forward.anew`.
    """
    return forward.anew(kv, chosen, [region.token_ids[at] for at in chosen]) if chosen else kv
