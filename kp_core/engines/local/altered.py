"""Adds steering deltas to the KV of a steered region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kp_core.errors import SteeringError
from kp_core.kv import KVTensors
from kp_core.plan import Region

__all__ = ["altered"]


@torch.inference_mode()
def altered(kv: KVTensors, region: Region) -> KVTensors:
    """A copy of the plain KV of a steered `region`, with its deltas added.

    Sums are computed in float32 or wider and rounded once to the dtype of the cache. Raises `SteeringError` when a
    delta does not fit the cache.
    """
    found = kv.clone()
    for part in region.parts:
        span = slice(part.start - region.start, part.stop - region.start)
        if part.steering is not None:
            _add("value", found.values, part.steering.values, span)
            _add("key", found.keys, part.steering.keys, span)
    return found


def _add(name: str, tensors: Sequence[Tensor], deltas: Mapping[int, Tensor], span: slice) -> None:
    for layer, delta in deltas.items():
        if layer >= len(tensors) or delta.shape != tensors[layer][:, 0].shape:
            shape = tuple(tensors[layer][:, 0].shape) if layer < len(tensors) else None
            raise SteeringError(
                f"The {name} delta of layer {layer} has shape {tuple(delta.shape)}; this model's cache takes {shape} "
                f"there and has {len(tensors)} layers. Make the steering with `engine.make_steering(pairs)`."
            )
        plain = tensors[layer][:, span]
        precise = torch.promote_types(plain.dtype, torch.float32)
        shifted = plain.to(precise) + delta.to(plain.device, precise)[:, None]
        tensors[layer][:, span] = shifted.to(plain.dtype)
