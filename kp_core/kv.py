"""Keys and values of consecutive tokens, as immutable data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kp_core.errors import PackError


@dataclass(frozen=True, eq=False)
class KVTensors:
    """KV cache of consecutive tokens: per layer, keys and values of shape `(kv_heads, tokens, head_dim)`.

    Keys are stored after RoPE, so they belong to the positions they were computed at. All layers have the same dtype
    and token count; kv_heads and head_dim may differ between layers, and between keys and values. `slice` shares
    tensors and never copies; nothing here writes to them.

    `states` are those of recurrent layers at the end of the tokens, in the model's order, of any shape and dtype; empty
    if there are none, or if they are unknown here. A model with only states has one layer without heads,
    `(0, tokens, 0)`. Raises `PackError` if the tensors do not form one cache.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        for name in ("keys", "values", "states"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.keys or len(self.keys) != len(self.values):
            raise PackError(
                f"Got {len(self.keys)} tensors of keys and {len(self.values)} of values; expected one of each a layer."
            )
        first = self.keys[0]
        if first.ndim != 3:
            raise PackError(f"Keys of layer 0 have shape {tuple(first.shape)}; expected (kv_heads, tokens, head_dim).")
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            for name, tensor in (("Keys", key), ("Values", value)):
                if tensor.ndim != 3 or tensor.shape[:2] != (key.shape[0], first.shape[1]):
                    raise PackError(
                        f"{name} of layer {layer} have shape {tuple(tensor.shape)}; expected "
                        f"({key.shape[0]}, {first.shape[1]}, head_dim) as in the keys of this layer and of layer 0."
                    )
                if tensor.dtype != first.dtype or tensor.device != key.device:
                    raise PackError(
                        f"{name} of layer {layer} are {tensor.dtype} on {tensor.device}; "
                        f"expected {first.dtype} as in layer 0, on {key.device} as its keys."
                    )

    def __repr__(self) -> str:
        return f"KVTensors({self.layers} layers, {self.tokens} tokens, {self.dtype})"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.keys[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of every tensor."""
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the first layer; the KV of a model on several devices lies with its layers."""
        return self.keys[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, even if they are views of larger storage."""
        return self.state_bytes + sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    @property
    def state_bytes(self) -> int:
        """Bytes of the states."""
        return sum(tensor.nbytes for tensor in self.states)

    def slice(self, start: int, stop: int) -> KVTensors:
        """Return the tokens `start:stop` as views, with the states if `stop` is the end."""
        if not 0 <= start <= stop <= self.tokens:
            raise PackError(f"Got the slice {start}:{stop} of {self.tokens} tokens; expected 0 <= start <= stop.")
        return KVTensors(
            tuple(key[:, start:stop] for key in self.keys),
            tuple(value[:, start:stop] for value in self.values),
            self.states if stop == self.tokens else (),
        )

    @staticmethod
    def concat(parts: Iterable[KVTensors]) -> KVTensors:
        """Join the parts in order, as new tensors."""
        runs: Sequence[KVTensors] = tuple(parts)
        if not runs:
            raise PackError("Got nothing to concatenate; expected at least one KVTensors.")
        if len({(run.layers, run.dtype, run.device) for run in runs}) > 1:
            raise PackError("Got parts that differ in layers, dtype or device; expected parts of one model.")
        keys, values = (
            tuple(torch.cat(layer, dim=1) for layer in zip(*sides, strict=True))
            for sides in ([run.keys for run in runs], [run.values for run in runs])
        )
        return KVTensors(keys, values, runs[-1].states)

    def clone(self) -> KVTensors:
        """Return a compact copy that shares no storage."""
        return self._each(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def to(self, device: torch.device | str) -> KVTensors:
        """Return the same numbers on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def equal(self, other: KVTensors) -> bool:
        """Whether both have the same bits."""
        return (
            self.layers == other.layers
            and self.dtype == other.dtype
            and len(self.states) == len(other.states)
            and all(
                left.dtype == right.dtype and torch.equal(left, right)
                for mine, theirs in ((self.keys, other.keys), (self.values, other.values), (self.states, other.states))
                for left, right in zip(mine, theirs, strict=True)
            )
        )

    def _each(self, act: Callable[[Tensor], Tensor]) -> KVTensors:
        return KVTensors(*(tuple(map(act, tensors)) for tensors in (self.keys, self.values, self.states)))
