"""Copies of KV between the host and a CUDA device, on a stream of their own: the device computes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from kp_core.kv import KVTensors

__all__ = ["start_copies", "to_host"]


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

    if stream is not None:  # Some of it may still be computed.
        stream.wait_stream(torch.cuda.current_stream(kv.device))
    with torch.cuda.stream(stream):  # Of no effect without one.
        copy = KVTensors(*(tuple(map(copied, side)) for side in (kv.keys, kv.values, kv.states)))
    if stream is not None:
        stream.synchronize()
    return copy


def start_copies(device: torch.device, layers: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[Callable[[], None]]:
    """Begin to copy, for each layer, sources from the host into targets on a CUDA device, as `(target, source)`.

    Returns for each layer a function that lets what the calling thread computes from then on wait for the copy.
    """
    stream, arrivals = _stream_of(device), list[Callable[[], None]]()
    stream.wait_stream(torch.cuda.current_stream(device))  # The targets may be in use until then.
    with torch.cuda.stream(stream):
        for pairs in layers:
            for target, source in pairs:
                # Torch copies between memories through some that is not pinned, unless both sides are contiguous. So
                # the heads are put in their places on the device. A part of some KV goes there head by head.
                if source.is_contiguous():
                    target.copy_(source.to(device, non_blocking=True))
                else:
                    for head, source_head in zip(target, source, strict=True):
                        head.copy_(source_head, non_blocking=True)
                target.record_stream(stream)
            wait = partial(lambda event: torch.cuda.current_stream(device).wait_event(event), stream.record_event())
            arrivals.append(wait)
    return arrivals
