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
    steered_kv = kv.clone()
    for part in region.parts:
        span = slice(part.start - region.start, part.stop - region.start)
        if part.steering is not None:
            _add("value", steered_kv.values, part.steering.values, span)
            _add("key", steered_kv.keys, part.steering.keys, span)
    return steered_kv


def _add(name: str, tensors: Sequence[Tensor], deltas: Mapping[int, Tensor], span: slice) -> None:
    for layer, delta in deltas.items():
        if layer >= len(tensors) or delta.shape != tensors[layer][:, 0].shape:
            shape = tuple(tensors[layer][:, 0].shape) if layer < len(tensors) else None
            raise SteeringError(
                f"The {name} delta of layer {layer} has shape {tuple(delta.shape)}; this model's cache takes {shape} "
                f"there and has {len(tensors)} layers. Make the steering with `engine.make_steering(pairs)`."
            )
        plain_values = tensors[layer][:, span]
        wide_dtype = torch.promote_types(plain_values.dtype, torch.float32)
        shifted = plain_values.to(wide_dtype) + delta.to(plain_values.device, wide_dtype)[:, None]
        tensors[layer][:, span] = shifted.to(plain_values.dtype)
