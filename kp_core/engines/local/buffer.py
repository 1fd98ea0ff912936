"""One contiguous KV buffer per request, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kp_core.engines.local.tree import Run
from kp_core.kv import KVTensors

__all__ = ["BufferLayer", "CacheShape", "KVBuffer", "StateShape"]


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
    """One layer: `(batch, kv_heads, capacity, head_dim)`, of which the first `length` tokens are filled."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the filled ones; gives views of all filled tokens."""
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def put(self, keys: Tensor, values: Tensor, places: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Write tokens at `places`, whatever is filled; gives views of the first `stop` tokens."""
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KVBuffer:
    """The cache of one forward pass: room for `capacity` tokens of `batch` sequences of one length.

    `runs` names the runs of KV that the buffer holds from position 0 on, so that a later request which begins alike
    finds them in place. `states` are those of recurrent layers, `(batch, ...)` each, which a forward pass writes in
    place; they belong to the end of the tokens or, as `has_states` then tells, to nothing.
    """

    def __init__(self, shape: CacheShape, capacity: int, batch: int = 1) -> None:
        def empty(heads: int, dim: int, device: torch.device) -> Tensor:
            return torch.empty(batch, heads, capacity, dim, dtype=shape.dtype, device=device)

        self.capacity = capacity
        places = zip(shape.layers, shape.devices or [shape.device] * len(shape.layers), strict=True)
        self.layers = [
            BufferLayer(empty(heads, key, device), empty(heads, value, device))
            for (heads, key, value), device in places
        ]
        self.view: object = None
        """The buffer as the library that runs the model wants it; made by that library's side, once."""
        self.nbytes = (shape.bytes_per_token * capacity + shape.state_bytes) * batch
        self.runs: list[tuple[int, int]] = []
        self.shape = shape
        self.states = tuple(
            torch.empty(batch, *state.shape, dtype=state.dtype, device=shape.device) for state in shape.states
        )
        self._states_at = 0

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
        """Write `kv` behind the filled tokens, in every sequence of the batch."""
        if self.holds(kv):
            self.passed(self.length + kv.tokens)
        else:
            for layer, key, value in zip(self.layers, kv.keys, kv.values, strict=True):
                layer.update(key.expand(len(layer.keys), -1, -1, -1), value.expand(len(layer.values), -1, -1, -1))
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
    def read(self, start: int, stop: int, row: int = 0) -> KVTensors:
        """The tokens `start:stop` of one sequence, as a compact copy; torch refuses to write to its tensors.

        With the states if `stop` is the end.
        """
        return KVTensors(
            tuple(layer.keys[row, :, start:stop] for layer in self.layers),
            tuple(layer.values[row, :, start:stop] for layer in self.layers),
            tuple(state[row] for state in self.states) if stop == self.length and self.has_states else (),
        ).clone()

    def view_of(self, start: int, stop: int) -> KVTensors:
        """The tokens `start:stop` of the first sequence, as views that are right until the buffer is written there."""
        return KVTensors(
            tuple(layer.keys[0, :, start:stop] for layer in self.layers),
            tuple(layer.values[0, :, start:stop] for layer in self.layers),
        )

    def shared(self, runs: Sequence[Run]) -> int:
        """How many of `runs` this buffer holds already, from the first on."""
        count = 0
        for held, wanted in zip(self.runs, runs, strict=False):
            if held[0] != wanted.serial:
                break
            count += 1
        return count

    def load(self, runs: Sequence[Run]) -> None:
        """Make the buffer hold `runs` and nothing else, copying only what it does not hold yet."""
        count = self.shared(runs)
        self.runs = self.runs[:count]
        self.truncate(sum(tokens for _, tokens in self.runs))
        for run in runs[count:]:
            self.append(run.kv)
        if self.states and runs:  # Those that were here belong to what was behind these runs.
            self._restore(runs[-1].kv.states)
        self.note(runs)

    def note(self, runs: Sequence[Run]) -> None:
        """Record that the buffer holds `runs` from position 0 on."""
        self.runs = [(run.serial, run.kv.tokens) for run in runs]
