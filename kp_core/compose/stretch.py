"""What most composers are made of: packs laid into a stretch, and some of its tokens computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kp_core.compose.base import Forward, Stretch
from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors

__all__ = ["join", "recompute", "take"]


def join(region: Stretch, parts: Sequence[KVTensors], forward: Forward) -> KVTensors:
    """The KV of `region`: `parts` for its packs, as they are; what stands between packs is computed in one pass."""
    if sum(part.tokens for part in parts) != sum(map(len, region.spans)) or len(parts) != len(region.spans):
        raise KVShapeError(
            f"Got KV of {[part.tokens for part in parts]} tokens for packs of {list(map(len, region.spans))}."
        )
    between = region.between
    whole = KVTensors.concat(parts) if len(parts) > 1 else parts[0]
    if not between:
        return whole
    inside = [at for at in range(len(region)) if at not in set(between)]
    return _with(region, whole, inside, between, forward)


def recompute(region: Stretch, kv: KVTensors, chosen: Sequence[int], forward: Forward) -> KVTensors:
    """`kv` of `region` with the tokens `chosen`, counted from its start, computed anew over all others, in one pass."""
    if not chosen:
        return kv
    kept = sorted(set(range(len(region))) - set(chosen))
    return _with(region, take(kv, kept), kept, sorted(chosen), forward)


def take(kv: KVTensors, tokens: Sequence[int]) -> KVTensors:
    """Some tokens of `kv`, in this order, as a copy."""
    index = torch.tensor(tokens, dtype=torch.long, device=kv.device)
    return KVTensors(
        tuple(key.index_select(1, index) for key in kv.keys), tuple(value.index_select(1, index) for value in kv.values)
    )


def _with(region: Stretch, kv: KVTensors, places: Sequence[int], missing: Sequence[int], forward: Forward) -> KVTensors:
    """`kv`, which stands at `places` of the region, and the `missing` ones computed behind all before and beside it."""
    before = forward.before
    past = kv if before is None else KVTensors.concat((before, kv))
    past_positions = [*range(region.start), *(region.start + at for at in places)]
    ids, positions = [region.token_ids[at] for at in missing], [region.start + at for at in missing]
    new = forward(ids, positions, past, past_positions)
    order = torch.tensor([*places, *missing]).argsort().tolist()
    return take(KVTensors.concat((kv, new)), order)
