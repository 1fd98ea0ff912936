"""Moves cached keys from one position to another by rotating them (RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kp_core.errors import PackError
from kp_core.kv import KVTensors


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding with frequencies that do not change with the length (RoFormer, arXiv 2104.09864, section 3.2).

    `frequencies` are the angles per position, in radians, `(rotary_dim / 2,)`. Dimensions of a head beyond `rotary_dim`
    are not rotated. `layers` says for each layer whether its keys are rotated at all. If `interleaved`, neighbouring
    dimensions form a pair; otherwise the two halves of the rotary dimensions do.
    """

    frequencies: Tensor
    layers: tuple[bool, ...]
    interleaved: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the value as JSON."""
        return {"frequencies": self.frequencies.tolist(), "layers": self.layers, "interleaved": self.interleaved}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rope:
        """The inverse of `to_dict`."""
        return cls(torch.tensor(data["frequencies"]), tuple(map(bool, data["layers"])), bool(data["interleaved"]))

    def move(self, kv: KVTensors, by: int, out: KVTensors | None = None) -> KVTensors:
        """Move `kv` by `by` positions: rotates keys in float32 and rounds once; values stay the same.

        With `out`, of the same shapes, writes the result there, in its dtype and on its device. Move only what the
        model computed, never moved KV, or rounding errors add up. Raises `PackError` for another number of layers,
        and for heads smaller than the rotary dimensions.
        """
        if kv.layers != len(self.layers):
            raise PackError(f"Got KV of {kv.layers} layers; expected the {len(self.layers)} of this model.")
        if by == 0 and out is None:
            return kv
        device = kv.device if out is None else out.device
        turn = self._turn(by, device)
        rooms: dict[torch.Size, Tensor] = {}
        # One at a time: rotated keys are still in the processor's cache when they are written.
        keys = (
            self._turned(key.to(device), turn, {} if out is None else rooms) if by and turns else key
            for key, turns in zip(kv.keys, self.layers, strict=True)
        )
        if out is None:
            return KVTensors(tuple(key.to(kv.dtype) for key in keys), kv.values)
        for tensor, place in zip(chain(keys, kv.values), (*out.keys, *out.values), strict=True):
            place.copy_(tensor)
        return out

    def turned(self, keys: Tensor, by: int) -> Tensor:
        """Move keys of shape `(kv_heads, tokens, head_dim)` by `by` positions."""
        return self._turned(keys, self._turn(by, keys.device), {}).to(keys.dtype)

    def _turn(self, by: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the factors of each rotary dimension and of its partner: `(rotary_dim,)` each."""
        angles = by * self.frequencies.to("cpu", torch.float64)  # MPS has no float64.
        cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
        if self.interleaved:
            return cos.repeat_interleave(2), torch.stack((-sin, sin), dim=-1).flatten()
        return cos.repeat(2), torch.cat((-sin, sin))

    def _turned(self, keys: Tensor, turn: tuple[Tensor, Tensor], rooms: dict[torch.Size, Tensor]) -> Tensor:
        """Rotate keys by the factors of `_turn`, in float32; `rooms` provides reusable memory by shape."""
        width = 2 * len(self.frequencies)
        if keys.shape[-1] < width:
            raise PackError(f"Got keys of {keys.shape[-1]} dimensions; expected at least the {width} rotary ones.")
        first_half, second_half = slice(0, width // 2), slice(width // 2, width)
        if self.interleaved:
            first_half, second_half = slice(0, width, 2), slice(1, width, 2)
        if keys.requires_grad:
            # Gradients need their own memory.
            plain, turned = keys.float(), keys.float().clone()
            turned[..., :width] = plain[..., :width] * turn[0]
        else:
            if keys.shape not in rooms:
                rooms[keys.shape] = torch.empty(2, *keys.shape, dtype=torch.float32, device=keys.device)
            plain, turned = rooms[keys.shape]
            plain.copy_(keys)
            turned[..., width:] = plain[..., width:]
            torch.mul(plain[..., :width], turn[0], out=turned[..., :width])
        for half, partner in ((first_half, second_half), (second_half, first_half)):
            turned[..., half].addcmul_(plain[..., partner], turn[1][half])
        return turned
