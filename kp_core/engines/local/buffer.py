"""One contiguous KV buffer per request, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kp_core.engines.local.tree import Name, common_tokens
from kp_core.kv import KVTensors

__all__ = ["TILE", "BufferLayer", "CacheShape", "KVBuffer", "StateShape"]

TILE = 256
"""Positions that attention reads at once, with or without all their tokens (`hf.attention`)."""


@dataclass(frozen=True)
class StateShape:
    """One state of a recurrent layer: the `index`th of its `kind` (`conv`, `recurrent`) in the `layer` of a model."""

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CacheShape:
    """Per layer `(kv_heads, key_dim, value_dim)`, with the dtype and device of the cache; and the states beside it.

    `devices` are those of the layers, where they are not all on one.
    """

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device
    states: tuple[StateShape, ...] = ()
    devices: tuple[torch.device, ...] = ()

    def placed(self, kv: KVTensors) -> KVTensors:
        """`kv` in this dtype, where the layers are."""
        places = self.devices or [self.device] * kv.layers
        keys, values = (
            tuple(tensor.to(place, self.dtype) for tensor, place in zip(side, places, strict=True))
            for side in (kv.keys, kv.values)
        )
        return KVTensors(keys, values, tuple(state.to(self.device) for state in kv.states))

    @property
    def state_bytes(self) -> int:
        """Bytes of all states behind one token."""
        return sum(prod(state.shape) * state.dtype.itemsize for state in self.states)

    def fits(self, kv: KVTensors) -> bool:
        """Whether `kv` has these layers, and the states that the model needs to go on behind it."""
        sides = zip(kv.keys, kv.values, strict=True)
        states = [(tuple(state.shape), state.dtype) for state in kv.states]
        return self.layers == tuple((len(key), key.shape[2], value.shape[2]) for key, value in sides) and states == [
            (state.shape, state.dtype) for state in self.states
        ]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token over all layers."""
        return sum(heads * (key + value) for heads, key, value in self.layers) * self.dtype.itemsize


class BufferLayer:
    """One layer: `(1, kv_heads, capacity, head_dim)`, of which the first `length` tokens are filled."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the filled ones; gives views of all filled tokens."""
        self.write(keys, values)
        return self.until(self.length)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the new tokens behind the filled ones."""
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values

    def put(self, keys: Tensor, values: Tensor, places: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Write tokens at `places`, whatever is filled; gives views of the first `stop` tokens."""
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        return self.until(stop)

    def until(self, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the first `stop` tokens."""
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KVBuffer:
    """The cache of one sequence: room for at least `capacity` tokens, in whole tiles.

    `runs` names the KV that the buffer holds from position 0 on, so that a later request which begins alike finds it in
    place. `states` are those of recurrent layers, `(1, ...)` each, which a forward pass writes in place; they belong to
    the end of the tokens or, as `has_states` then tells, to nothing.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.capacity = capacity = -(-capacity // TILE) * TILE
        places = zip(shape.layers, shape.devices or [shape.device] * len(shape.layers), strict=True)

        def empty(heads: int, dim: int, device: torch.device) -> Tensor:
            return torch.empty(1, heads, capacity, dim, dtype=shape.dtype, device=device)

        self.layers = [
            BufferLayer(empty(heads, key, device), empty(heads, value, device))
            for (heads, key, value), device in places
        ]
        self.view: object = None
        """The buffer as the library that runs the model wants it; made by that library's side, once."""
        self.nbytes = self.bytes_for(shape, capacity)
        self.runs: list[Name] = []
        self.shape = shape
        self.states = tuple(
            torch.empty(1, *state.shape, dtype=state.dtype, device=shape.device) for state in shape.states
        )
        self._states_at = 0
        self._blank = range(0)

    @staticmethod
    def bytes_for(shape: CacheShape, capacity: int) -> int:
        """Bytes of a buffer for so many tokens."""
        return shape.bytes_per_token * -(-capacity // TILE) * TILE + shape.state_bytes

    @property
    def length(self) -> int:
        """Tokens filled."""
        return self.layers[0].length

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        for layer in self.layers:
            layer.length = length
        if length != self._states_at:
            self._states_at = 0 if length == 0 else -1
        if length < self._blank.start:
            self._blank = range(0)

    def blank(self, stop: int) -> None:
        """Before tokens up to `stop` are written: let the rest of their last tile be zeros.

        Attention reads whole tiles, and a weight of nothing times what was left there could be no number.
        """
        end = -(-stop // TILE) * TILE
        if not (self._blank.start <= stop and end == self._blank.stop):
            for layer in self.layers:
                layer.keys[:, :, stop:end] = 0
                layer.values[:, :, stop:end] = 0
        self._blank = range(stop, end)

    @property
    def has_states(self) -> bool:
        """Whether the states, if there are any, are those behind the last token; before the first, nothing is right."""
        return not self.states or self._states_at == self.length

    def passed(self, length: int) -> None:
        """Take note that a forward pass brought tokens and states to `length`; a model may write no keys itself."""
        for layer in self.layers:
            layer.length = length
        self._states_at = length

    def append(self, kv: KVTensors) -> None:
        """Write `kv` behind the filled tokens."""
        if self.holds(kv):
            self.passed(self.length + kv.tokens)
        else:
            for layer, key, value in zip(self.layers, kv.keys, kv.values, strict=True):
                layer.write(key[None], value[None])
        self._blank = range(self.length, max(self.length, self._blank.stop))
        self._restore(kv.states)

    def holds(self, kv: KVTensors) -> bool:
        """Whether `kv` is itself a view of the memory behind the filled tokens, where it was written in place."""
        behind = self.layers[0].keys[0, :, self.length :]
        return bool(kv.keys[0].numel()) and kv.keys[0].data_ptr() == behind.data_ptr()

    def _restore(self, states: Sequence[Tensor]) -> None:
        """Write the states behind the last token; without them, they are not known there."""
        for mine, given in zip(self.states, states, strict=bool(states)):
            mine.copy_(given)
        self._states_at = self.length if states else -1

    @torch.inference_mode()
    def read(self, start: int, stop: int) -> KVTensors:
        """The tokens `start:stop`, as a compact copy; torch refuses to write to its tensors.

        With the states if `stop` is the end.
        """
        states = tuple(state[0] for state in self.states) if stop == self.length and self.has_states else ()
        kv = self.view_of(start, stop)
        return KVTensors(kv.keys, kv.values, states).clone()

    def view_of(self, start: int, stop: int) -> KVTensors:
        """The tokens `start:stop`, as views that are right until the buffer is written there."""
        if stop > self.length:  # What is not filled yet may be written through them.
            self._blank = range(0)
        return KVTensors(
            tuple(layer.keys[0, :, start:stop] for layer in self.layers),
            tuple(layer.values[0, :, start:stop] for layer in self.layers),
        )

    def shared(self, held: Sequence[tuple[Name, KVTensors]]) -> int:
        """How many tokens of `held` this buffer holds already, from the first on."""
        return common_tokens(self.runs, [name for name, _ in held])

    def load(self, held: Sequence[tuple[Name, KVTensors]]) -> None:
        """Make the buffer hold what a path `held` and nothing else, copying only what it does not hold yet."""
        done = self.shared(held)
        self.truncate(done)
        for _, kv in held:
            if done < kv.tokens:
                self.append(kv.slice(done, kv.tokens))
            done = max(0, done - kv.tokens)
        if self.states and held:  # Those that were here belong to what was behind this.
            self._restore(held[-1][1].states)
        self.note(held)

    def note(self, held: Sequence[tuple[Name, KVTensors]]) -> None:
        """Record that the buffer holds what a path `held` from position 0 on."""
        self.runs = [name for name, _ in held]
