"""One contiguous KV buffer per request, written in place, from a pool with one budget."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from kp_core.engines.local.copies import start_copies
from kp_core.engines.local.tree import Name, PrefixTree, common_tokens
from kp_core.errors import ModelError
from kp_core.kv import KVTensors
from kp_core.memory import new_memory
from kp_core.plan.plan import Limit
from kp_core.threads import in_threads

logger = logging.getLogger(__name__)


TILE = 256
"""Positions in one tile of attention (`hf.attention`). Attention reads whole tiles, also where one is partly filled."""
_IDLE = 2  # Idle buffers that are kept, whatever their size.
_LOOK_S = 0.05  # How often a waiting request checks its limit, in seconds. Reaching the limit sends no signal.
Copy: TypeAlias = Callable[[Sequence[KVTensors], Sequence[tuple[Tensor, Tensor]]], list[Callable[[], None]]]
_LONG_S = 10.0  # Seconds after which a request that waits for memory is logged.


@dataclass(frozen=True)
class StateShape:
    """One state of a recurrent layer: number `index` of its `kind` (`conv`, `recurrent`) in layer `layer`."""

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CacheShape:
    """The shape of a model's cache: `(kv_heads, key_dim, value_dim)` per layer, its dtype and device, and its states.

    `devices` has one device per layer, or none when all are on `device`.
    """

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device
    states: tuple[StateShape, ...] = ()
    devices: tuple[torch.device, ...] = ()

    def on_device(self, kv: KVTensors) -> KVTensors:
        """`kv` in this dtype, on the devices of the layers."""
        devices = self.devices or [self.device] * kv.layers
        keys, values = (
            # From pinned memory a GPU copies while the host goes on; what computes next waits on the device itself.
            tuple(
                tensor.to(device, self.dtype, non_blocking=device.type == "cuda")
                for tensor, device in zip(tensors, devices, strict=True)
            )
            for tensors in (kv.keys, kv.values)
        )
        return KVTensors(keys, values, tuple(state.to(self.device) for state in kv.states))

    @property
    def state_bytes(self) -> int:
        """Bytes of all states after one token."""
        return sum(prod(state.shape) * state.dtype.itemsize for state in self.states)

    def fits(self, kv: KVTensors) -> bool:
        """Whether `kv` has these layers, and the states that the model needs to continue after it."""
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
    """Keys and values of one layer, `(1, kv_heads, capacity, head_dim)` each. The first `length` tokens are filled.

    Some of them may be on their way from the host: `arrivals` let what is computed next wait for them. Whoever reads
    `keys` or `values` waits; `memory` does not.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.memory, self.length = (keys, values), 0
        self.arrivals: list[Callable[[], None]] = []

    @property
    def keys(self) -> Tensor:
        """Keys, when all have arrived."""
        self.arrive()
        return self.memory[0]

    @property
    def values(self) -> Tensor:
        """Values, when all have arrived."""
        self.arrive()
        return self.memory[1]

    def arrive(self) -> None:
        """Let what is computed next wait for KV that is on its way."""
        while self.arrivals:
            self.arrivals.pop(0)()

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Append the new tokens."""
        start, count = self.length, keys.shape[2]
        self.length = start + count
        self.keys.narrow(2, start, count).copy_(keys)
        self.values.narrow(2, start, count).copy_(values)

    def touch(self) -> None:
        """Write to each head: the system clears a large page at its first use, which takes longer than reading."""
        for side in self.memory:
            side[:, :, :1] = 0

    def put(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Write tokens to `places`; `length` stays."""
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)


def new_tensor(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised numbers, on the CPU in `new_memory`."""
    if device.type == "cpu":
        return torch.from_numpy(new_memory(prod(size) * dtype.itemsize)).view(dtype).view(size)
    return torch.empty(size, dtype=dtype, device=device)


class KVBuffer:
    """The cache of one sequence. It has room for at least `capacity` tokens, rounded up to whole tiles.

    `runs` names the KV that the buffer holds from position 0 on, so that a later request with the same beginning need
    not copy it. `states` are the states of recurrent layers, `(1, ...)` each; a forward pass writes them in place.
    They belong to the last filled token if `has_states`; otherwise they are invalid. With `copy` (`start_copies` for a
    device), KV from the host arrives layer by layer, while the first layers compute.
    """

    def __init__(self, shape: CacheShape, capacity: int, copy: Copy | None = None) -> None:
        self._copy = copy
        self.capacity = capacity = -(-capacity // TILE) * TILE

        def empty(layers: int, heads: int, dim: int, device: torch.device) -> Tensor:
            return new_tensor((layers, heads, capacity, dim), shape.dtype, device)

        self.stacked: tuple[Tensor, Tensor] | None = None
        """Keys and values of all layers, `(layers, kv_heads, capacity, head_dim)`, if the layers are alike."""
        if len(set(shape.layers)) == 1 and not shape.devices:
            count, (heads, key, value) = len(shape.layers), shape.layers[0]
            keys, values = empty(count, heads, key, shape.device), empty(count, heads, value, shape.device)
            self.stacked = keys, values
            self.layers = [BufferLayer(keys[at : at + 1], values[at : at + 1]) for at in range(count)]
        else:
            devices = shape.devices or [shape.device] * len(shape.layers)
            self.layers = [
                BufferLayer(empty(1, heads, key, device), empty(1, heads, value, device))
                for (heads, key, value), device in zip(shape.layers, devices, strict=True)
            ]
        self.recorded: dict[int, object] = {}
        """Passes over this buffer that the code for the model's library recorded, by their number of tokens."""
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
        """Bytes of a buffer for `capacity` tokens."""
        return shape.bytes_per_token * -(-capacity // TILE) * TILE + shape.state_bytes

    @property
    def length(self) -> int:
        """Number of filled tokens."""
        return self.layers[0].length

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on."""
        for layer in self.layers:
            layer.length = length
        if length != self._states_at:
            self._states_at = 0 if length == 0 else -1
        if length < self._blank.start:
            self._blank = range(0)

    def blank(self, stop: int, end: int | None = None) -> None:
        """Set the positions from `stop` to `end` to zero, before tokens up to `stop` are written.

        By default, `end` is the end of the tile. On a CPU, attention reads whole tiles, recorded passes read all there
        is room for, and a weight of zero times leftover memory could be NaN. Other passes read no more than is filled.
        """
        if end is None:
            if self.shape.device.type != "cpu":
                return
            end = -(-stop // TILE) * TILE
        if self._blank.start <= stop and end <= self._blank.stop:
            end = self._blank.stop
        else:
            sides = self.stacked or [side for layer in self.layers for side in layer.memory]
            for side in sides:
                side[:, :, stop:end] = 0
        self._blank = range(stop, end)

    @property
    def has_states(self) -> bool:
        """Whether the states, if there are any, belong to the last filled token. An empty buffer needs none."""
        return not self.states or self._states_at == self.length

    def passed(self, length: int) -> None:
        """Record that a forward pass brought tokens and states to `length`; some models write no keys."""
        for layer in self.layers:
            layer.length = length
        self._states_at = length

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward pass that writes here. If it fails, its tokens are dropped, and states it wrote to are lost."""
        length = self.length
        try:
            yield
        except BaseException:
            self.truncate(length)
            if self.states:
                self._states_at = -1 if length else 0
            raise

    def append_token(self, keys: Tensor, values: Tensor) -> None:
        """Append one token to a `stacked` buffer: keys and values of all layers, `(layers, kv_heads, head_dim)`."""
        for side, token in zip(self.stacked or (), (keys, values), strict=True):
            side[:, :, self.length] = token
        self.passed(self.length + 1)

    def append(self, *parts: KVTensors) -> None:
        """Append `parts`, one behind the other, to the filled tokens."""
        for is_on_host, alike in groupby(parts, self.takes):
            if is_on_host and self._copy is not None:
                self._receive([*alike], self._copy)
                continue
            for kv in alike:
                if self.holds(kv):
                    self.passed(self.length + kv.tokens)
                    continue
                for layer, key, value in zip(self.layers, kv.keys, kv.values, strict=True):
                    layer.write(key[None], value[None])
        if parts:
            self._blank = range(self.length, max(self.length, self._blank.stop))
            self._restore(parts[-1].states)

    def _receive(self, parts: Sequence[KVTensors], copy: Copy) -> None:
        """Append `parts`, which `copy` brings from the host while the first layers compute."""
        start, tokens = self.length, sum(kv.tokens for kv in parts)
        places = [
            (keys[0].narrow(1, start, tokens), values[0].narrow(1, start, tokens))
            for keys, values in (layer.memory for layer in self.layers)
        ]
        for layer, arrival in zip(self.layers, copy(parts, places), strict=True):
            layer.arrivals.append(arrival)
            layer.length = start + tokens

    def takes(self, kv: KVTensors) -> bool:
        """Whether `kv` is copied from the host as it is, beside what is computed."""
        is_like_this = kv.dtype == self.shape.dtype and kv.device.type == "cpu"
        return self._copy is not None and is_like_this and not self.holds(kv)

    def holds(self, kv: KVTensors) -> bool:
        """Whether `kv` is a view of the memory right after the filled tokens, so that it is already in place."""
        for layer, keys in zip(self.layers, kv.keys, strict=True):
            if keys.numel():
                return keys.data_ptr() == layer.memory[0][0, :, self.length :].data_ptr()
        return False

    def _restore(self, states: Sequence[Tensor]) -> None:
        """Set the states after the last token. Without `states`, they are unknown there."""
        for target, state in zip(self.states, states, strict=bool(states)):
            target.copy_(state)
        self._states_at = self.length if states else -1

    @torch.inference_mode()
    def read(self, start: int, stop: int) -> KVTensors:
        """A compact copy of the tokens `start:stop`, with the states if `stop` is the end."""
        states = tuple(state[0].clone() for state in self.states) if stop == self.length and self.has_states else ()
        kv = self.view_of(start, stop)
        if self.stacked is None:
            return replace(kv.clone(), states=states)
        sides = (side[:, :, start:stop] for side in self.stacked)
        keys, values = (tuple(new_tensor(side.shape, side.dtype, side.device).copy_(side)) for side in sides)
        return KVTensors(keys, values, states)

    def view_of(self, start: int, stop: int) -> KVTensors:
        """The tokens `start:stop`, as views that are valid until the buffer is written there."""
        if stop > self.length:  # The caller may write to positions that are not filled yet.
            self._blank = range(0)
        return KVTensors(
            tuple(layer.keys[0, :, start:stop] for layer in self.layers),
            tuple(layer.values[0, :, start:stop] for layer in self.layers),
        )

    def shared(self, held: Sequence[tuple[Name, KVTensors]]) -> int:
        """How many tokens of `held`, from the first on, this buffer already holds."""
        return common_tokens(self.runs, [name for name, _ in held])

    def load(self, held: Sequence[tuple[Name, KVTensors]]) -> None:
        """Make the buffer hold exactly the KV that a path `held`. Copies only the tokens that it does not hold yet."""
        skipped = self.shared(held)
        self.truncate(skipped)
        rest = list[KVTensors]()
        for _, kv in held:
            if skipped < kv.tokens:
                rest.append(kv.slice(skipped, kv.tokens))
            skipped = max(0, skipped - kv.tokens)
        self.append(*rest)
        if self.states and held:  # The old states may belong to tokens that were dropped.
            self._restore(held[-1][1].states)
        self.note(held)

    def note(self, held: Sequence[tuple[Name, KVTensors]]) -> None:
        """Record that the buffer holds the KV that a path `held`, from position 0 on."""
        self.runs = [name for name, _ in held]


class BufferPool:
    """Gives buffers to requests, from one byte budget that it shares with the prefix tree.

    `budget_bytes` covers buffers in use, idle buffers, and the tree. The pool keeps two idle buffers, or as many as
    take a quarter of the budget, because new memory costs several times as much as filling it. To make room, it frees
    idle buffers, then the least recently used KV of the tree. A request that does not fit waits.
    """

    def __init__(self, shape: CacheShape, tree: PrefixTree, budget_bytes: int) -> None:
        self._shape, self._tree = shape, tree
        self.budget_bytes = budget_bytes
        self.used = 0
        """Bytes of the buffers in use."""
        is_on_gpu = shape.device.type == "cuda" and not shape.devices
        self.copy: Copy | None = partial(start_copies, shape.device) if is_on_gpu else None
        """Copies KV from the host into the buffers."""
        self._waiting: list[KVBuffer] = []
        self._queue: deque[object] = deque()
        # Its lock is reentrant: garbage collection may close an abandoned stream at any line, which returns its buffer.
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of the idle buffers."""
        return sum(buffer.nbytes for buffer in self._waiting)

    @contextmanager
    def turn(self, limit: Limit) -> Iterator[None]:
        """One request at a time, first come, first served. Raises `CancelledError` at `limit`, also while it waits."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
        try:
            with self._changed:
                while self._queue[0] is not ticket and not limit.is_set():
                    self._changed.wait(_LOOK_S if limit.may_end else None)
            if limit.is_set():
                raise CancelledError
            yield
        finally:
            with self._changed:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def check(self, capacity: int) -> None:
        """Raise `ModelError` if a buffer for `capacity` tokens does not fit into the budget."""
        size = KVBuffer.bytes_for(self._shape, capacity)
        if size > self.budget_bytes:
            raise ModelError(
                f"The prompt and its answer may take {capacity:,} tokens, whose KV is {size:,} bytes; expected at most "
                f"the budget of {self.budget_bytes:,} bytes. Shorten the prompt, lower max_tokens, or load the engine "
                "with a larger cache_bytes."
            )

    def take(self, capacity: int, held: Sequence[tuple[Name, KVTensors]]) -> KVBuffer | None:
        """A buffer for at least `capacity` tokens, filled with the KV that a path `held`; `None` without room now.

        It is an idle buffer that holds most of that KV, or a new one.
        """
        with self._changed:
            fitting = [buffer for buffer in self._waiting if buffer.capacity >= capacity]
            buffer = max(fitting, key=lambda candidate: (candidate.shared(held), -candidate.capacity), default=None)
            size = KVBuffer.bytes_for(self._shape, capacity) if buffer is None else buffer.nbytes
            if buffer is not None:
                self._waiting.remove(buffer)
            elif not self._has_room(size):
                return None
            self.used += size
        try:
            if buffer is None:
                buffer = KVBuffer(self._shape, capacity, self.copy)
                if held and self._shape.device.type == "cpu":
                    in_threads(BufferLayer.touch, buffer.layers, buffer.nbytes)
            buffer.load(held)
        except BaseException:
            self.free(size)
            raise
        return buffer

    def wait(self, capacity: int, limit: Limit) -> None:
        """Wait until there is room for a buffer. Release the tree path before waiting.

        Raises `ModelError` if there can be no room, and `CancelledError` at `limit`.
        """
        self.check(capacity)
        size, start_time, has_warned = KVBuffer.bytes_for(self._shape, capacity), time.monotonic(), False
        with self._changed:
            while not self._has_room(size):
                if limit.is_set():
                    raise CancelledError
                if not has_warned and time.monotonic() > start_time + _LONG_S:
                    has_warned = True
                    logger.warning(
                        "A request waits for %s bytes of KV memory; %s of %s are held by answers under way. Streams "
                        "that are open and not read hold theirs: close them, or raise cache_bytes.",
                        *(f"{nbytes:,}" for nbytes in (size, self.used, self.budget_bytes)),
                    )
                self._changed.wait(_LOOK_S)

    def reserve(self, nbytes: int) -> bool:
        """Reserve bytes for buffers outside the pool, until `free`. Returns whether there was room."""
        with self._changed:
            has_room = self._has_room(nbytes)
            self.used += nbytes if has_room else 0
            return has_room

    def free(self, nbytes: int) -> None:
        """Return the bytes of buffers that no longer exist."""
        with self._changed:
            self.used -= nbytes
            self._share()

    def give(self, buffer: KVBuffer) -> None:
        """Return a buffer to the pool, and free the oldest idle buffers if there are too many."""
        with self._changed:
            self.used -= buffer.nbytes
            self._waiting.append(buffer)
            while len(self._waiting) > _IDLE and self.nbytes > self.budget_bytes // 4:
                del self._waiting[0]
            self._share()

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._changed:
            self._waiting.clear()
            self._share()

    def _has_room(self, size: int) -> bool:
        """Make room for `size` bytes: free idle buffers, then evict. Returns whether there is room."""
        room = self.budget_bytes - self.used - size
        if room < self.nbytes + self._tree.nbytes and room < self._tree.held_bytes():
            return False  # Freeing would not be enough, so nothing is freed.
        while self._waiting and self._left() - size < self._tree.nbytes:
            del self._waiting[0]
        return self._tree.shrink(self._left() - size)

    def _left(self) -> int:
        """Bytes that neither buffers in use nor idle buffers take."""
        return self.budget_bytes - self.used - self.nbytes

    def _share(self) -> None:
        """Give the bytes that became free to the tree, and wake waiting requests."""
        self._tree.shrink(self._left())
        self._changed.notify_all()


def memory_bytes(device: torch.device) -> int:
    """Total memory for tensors of `device`, in bytes: that of the GPU, else that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_cache_bytes(device: torch.device) -> int:
    """Default budget of all KV in bytes: three quarters of what is free on a GPU, else a quarter of the memory."""
    return torch.cuda.mem_get_info(device)[0] * 3 // 4 if device.type == "cuda" else memory_bytes(device) // 4
