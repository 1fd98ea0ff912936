"""Moving cached keys: what RoPE made of a token's key at one position, turned to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors

__all__ = ["Rope"]


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding with frequencies that do not change with the length (RoFormer, arXiv 2104.09864, section 3.2).

    `frequencies` are the angles per position, in radians, `(rotary_dim / 2,)`; where a head has more than `rotary_dim`
    dimensions, the rest is not turned. `layers` says for each layer whether its keys are turned at all. `interleaved`
    tells whether neighbouring dimensions make a pair, or the two halves of the rotary ones.
    """

    frequencies: Tensor
    layers: tuple[bool, ...]
    interleaved: bool = False

    def move(self, kv: KVTensors, by: int) -> KVTensors:
        """`kv` as it would be `by` positions later: keys turned in float32 and rounded once, values as they are.

        Move what the model computed and never what was moved, or rounding adds up. Raises `KVShapeError` for KV with
        another number of layers, or heads smaller than the rotary dimensions.
        """
        if kv.layers != len(self.layers):
            raise KVShapeError(f"Got KV of {kv.layers} layers; expected the {len(self.layers)} of this model.")
        if by == 0:
            return kv
        keys = tuple(self.turned(key, by) if turns else key for key, turns in zip(kv.keys, self.layers, strict=True))
        return KVTensors(keys, kv.values)

    def turned(self, keys: Tensor, by: int) -> Tensor:
        """Keys of shape `(kv_heads, tokens, head_dim)`, `by` positions later."""
        width = 2 * len(self.frequencies)
        if keys.shape[-1] < width:
            raise KVShapeError(f"Got keys of {keys.shape[-1]} dimensions; expected at least the {width} rotary ones.")
        angles = by * self.frequencies.to(keys.device, torch.float64)
        cos, sin = angles.cos().float(), angles.sin().float()
        plain = keys[..., :width].float()
        if self.interleaved:
            first, second = plain[..., 0::2], plain[..., 1::2]
        else:
            first, second = plain[..., : width // 2], plain[..., width // 2 :]
        parts: Sequence[Tensor] = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(tuple(parts), dim=-1).flatten(-2) if self.interleaved else torch.cat(tuple(parts), dim=-1)
        return torch.cat([turned.to(keys.dtype), keys[..., width:]], dim=-1)
