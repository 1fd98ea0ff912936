"""Keys and values of a run of tokens, as immutable data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kp_core.errors import KVShapeError

__all__ = ["KVTensors"]


@dataclass(frozen=True, eq=False)
class KVTensors:
    """KV cache of one run of tokens: per layer, keys and values of shape `(kv_heads, tokens, head_dim)`.

    Keys are stored as the model caches them, that is after RoPE, so they belong to the positions they were computed at.
    All layers share dtype, device and token count; kv_heads and head_dim may differ from layer to layer, and values may
    have another head_dim than keys. Tensors are shared, never copied, by `slice`; nothing here writes to them.

    Raises `KVShapeError` when the tensors do not form one cache.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(self.keys))
        object.__setattr__(self, "values", tuple(self.values))
        self._validate()

    def _validate(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise KVShapeError(
                f"Got {len(self.keys)} tensors of keys and {len(self.values)} of values; expected one of each a layer."
            )
        first = self.keys[0]
        if first.ndim != 3:
            raise KVShapeError(
                f"Keys of layer 0 have shape {tuple(first.shape)}; expected (kv_heads, tokens, head_dim)."
            )
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            for name, tensor in (("Keys", key), ("Values", value)):
                if tensor.ndim != 3 or tensor.shape[:2] != (key.shape[0], first.shape[1]):
                    raise KVShapeError(
                        f"{name} of layer {layer} have shape {tuple(tensor.shape)}; expected "
                        f"({key.shape[0]}, {first.shape[1]}, head_dim) as in the keys of this layer and of layer 0."
                    )
                if tensor.dtype != first.dtype or tensor.device != first.device:
                    raise KVShapeError(
                        f"{name} of layer {layer} are {tensor.dtype} on {tensor.device}; "
                        f"expected {first.dtype} on {first.device} as in layer 0."
                    )

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
        """Device of every tensor."""
        return self.keys[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, whatever storage they are views of."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def slice(self, start: int, stop: int) -> KVTensors:
        """The tokens `start:stop`, as views."""
        if not 0 <= start <= stop <= self.tokens:
            raise KVShapeError(f"Got the slice {start}:{stop} of {self.tokens} tokens; expected 0 <= start <= stop.")
        return KVTensors(
            tuple(key[:, start:stop] for key in self.keys), tuple(value[:, start:stop] for value in self.values)
        )

    @staticmethod
    def concat(parts: Iterable[KVTensors]) -> KVTensors:
        """The parts one after the other, as new tensors."""
        runs: Sequence[KVTensors] = tuple(parts)
        if not runs:
            raise KVShapeError("Got nothing to concatenate; expected at least one KVTensors.")
        if len({(run.layers, run.dtype, run.device) for run in runs}) > 1:
            raise KVShapeError("Got parts that differ in layers, dtype or device; expected parts of one model.")
        try:
            return KVTensors(
                tuple(torch.cat([run.keys[layer] for run in runs], dim=1) for layer in range(runs[0].layers)),
                tuple(torch.cat([run.values[layer] for run in runs], dim=1) for layer in range(runs[0].layers)),
            )
        except RuntimeError as error:
            raise KVShapeError(f"The parts do not fit together: {error}") from error

    def clone(self) -> KVTensors:
        """A compact copy that shares no storage with this one."""
        return KVTensors(
            tuple(key.clone(memory_format=torch.contiguous_format) for key in self.keys),
            tuple(value.clone(memory_format=torch.contiguous_format) for value in self.values),
        )

    def to(self, device: torch.device | str) -> KVTensors:
        """The same numbers on another device."""
        return KVTensors(tuple(key.to(device) for key in self.keys), tuple(value.to(device) for value in self.values))

    def equal(self, other: KVTensors) -> bool:
        """Whether both hold the same bits."""
        return (
            self.layers == other.layers
            and self.dtype == other.dtype
            and all(
                torch.equal(mine, theirs)
                for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True)
            )
        )
