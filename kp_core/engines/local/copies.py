"""Copies of KV between the host and a CUDA device, on a stream of their own: the device computes meanwhile.

In host memory, keys and values of a layer lie together, token by token, so that any consecutive tokens are one range of
memory, which the device copies without the host. The device puts them head by head, as attention reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from kp_core.kv import KVTensors


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@torch.inference_mode()
def to_host(kv: KVTensors) -> KVTensors:
    """A compact copy in host memory, pinned if `kv` is on a CUDA device or pinned. Returns when it is complete."""
    stream = _stream_of(kv.device) if kv.device.type == "cuda" else None

    def copied(tensor: Tensor) -> Tensor:
        is_pinned = stream is not None or tensor.is_pinned()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        return host.copy_(tensor, non_blocking=stream is not None)

    def layer(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not keys.numel():
            return copied(keys), copied(values)
        try:
            rows = torch.cat([side.transpose(0, 1).flatten(1) for side in (keys, values)], dim=1)
        except torch.OutOfMemoryError:  # KV leaves a full device; without rows it only comes back more slowly.
            return copied(keys), copied(values)
        return _sides(copied(rows), keys.shape[0], keys.shape[2])

    if stream is not None:  # Some of it may still be computed.
        stream.wait_stream(torch.cuda.current_stream(kv.device))
    with torch.cuda.stream(stream):  # Of no effect without one.
        keys, values = zip(*map(layer, kv.keys, kv.values), strict=True)
        copy = KVTensors(keys, values, tuple(map(copied, kv.states)))
    if stream is not None:
        stream.synchronize()
    return copy


def start_copies(
    device: torch.device, parts: Sequence[KVTensors], places: Sequence[tuple[Tensor, Tensor]]
) -> list[Callable[[], None]]:
    """Begin to copy `parts`, which follow each other, from the host to a CUDA device.

    `places` are for keys and values of each layer, `(kv_heads, tokens, head_dim)` each. Returns for each layer a
    function that lets what the calling thread computes from then on wait for the copy.
    """
    stream, arrivals = _stream_of(device), list[Callable[[], None]]()
    stream.wait_stream(torch.cuda.current_stream(device))  # The places may be in use until then.
    with torch.cuda.stream(stream):
        for layer, (keys, values) in enumerate(places):
            copy_layer([(part.keys[layer], part.values[layer]) for part in parts], keys, values)
            for place in (keys, values):
                place.record_stream(stream)
            wait = partial(lambda event: torch.cuda.current_stream(device).wait_event(event), stream.record_event())
            arrivals.append(wait)
    return arrivals


def copy_layer(parts: Sequence[tuple[Tensor, Tensor]], keys: Tensor, values: Tensor) -> None:
    """Copy keys and values of a layer, in `parts` that follow each other, to where all of them belong."""
    rows = [row for part in parts if (row := rows_of(*part)) is not None]
    if len(rows) == len(parts):
        there = torch.empty(keys.shape[1], rows[0].shape[1], dtype=keys.dtype, device=keys.device)
        for row, target in zip(rows, torch.split(there, list(map(len, rows))), strict=True):
            target.copy_(row, non_blocking=True)
        parts = [_sides(there, keys.shape[0], keys.shape[2])]
    elif len(parts) > 1:
        stop = 0
        for part in parts:
            start, stop = stop, stop + part[0].shape[1]
            copy_layer([part], keys[:, start:stop], values[:, start:stop])
        return
    for target, side in zip((keys, values), parts[0], strict=True):
        # Torch copies between memories through some that is not pinned, unless both are contiguous.
        target.copy_(side.to(target.device, non_blocking=True))


def _sides(rows: Tensor, heads: int, key_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer as views of `rows`, `(tokens, heads * (key_dim + value_dim))`."""
    value_dim = rows.shape[1] // heads - key_dim
    keys, values = torch.split(rows, [heads * key_dim, heads * value_dim], dim=1)
    keys, values = keys.view(len(rows), heads, key_dim), values.view(len(rows), heads, value_dim)
    return keys.transpose(0, 1), values.transpose(0, 1)


def rows_of(keys: Tensor, values: Tensor) -> Tensor | None:
    """The rows of which `to_host` made keys and values of consecutive tokens, `(tokens, ...)`; else `None`."""
    (heads, tokens, key_dim), value_dim = keys.shape, values.shape[2]
    width = heads * (key_dim + value_dim)

    def lies_so(side: Tensor) -> bool:
        by_head, by_token, _ = side.stride()
        return not side.numel() or ((heads == 1 or by_head == side.shape[2]) and (tokens == 1 or by_token == width))

    is_together = not values.numel() or values.data_ptr() == keys.data_ptr() + heads * key_dim * keys.itemsize
    if not (keys.numel() and is_together and lies_so(keys) and lies_so(values)):
        return None
    return keys.as_strided((tokens, width), (width, 1))
