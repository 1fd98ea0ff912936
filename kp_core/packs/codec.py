"""Encoding of tensors in a pack file: raw, compressed losslessly, or rounded to eight bits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from math import prod
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from kp_core.errors import PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import Buffer

__all__ = ["Compression", "check_compression", "decode", "digest", "encode", "in_threads", "rounded"]

Compression: TypeAlias = Literal["none", "lossless", "int8"]
"""How the KV of a pack is stored. `lossless`: zstd compresses the most significant byte of each number, which holds
sign and exponent and repeats; the other bytes do not shrink and stay raw. `int8`: eight bits per number, with one scale
per channel for keys and one per token for values (KIVI, arXiv 2402.02750, section 3)."""

_own = threading.local()
_POOL_FROM = 1_000_000  # Below this number of bytes, starting threads costs more than it saves.
_LEAST_EXPONENT = {torch.float16: -24}  # Exponent of the smallest scale in float16; -126 for the rest.

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def check_compression(name: object) -> None:
    """Raise `PackError` if `name` is not a compression."""
    if name not in get_args(Compression):
        raise PackError(f"Got compress={name!r}; expected one of {', '.join(get_args(Compression))}.")


def encode(tensor: Tensor, compression: Compression, name: str) -> bytes:
    """Encode `tensor`, `(kv_heads, tokens, head_dim)`; its `name` says whether it holds keys or values.

    Raises `PackError` if int8 would change the tensor: for int8, pass the output of `rounded`.
    """
    if compression == "int8":
        scales, numbers = _quantised(tensor, name)
        if digest(_dequantised(scales, numbers, tensor.dtype)) != digest(tensor):
            raise PackError(f"{name} is not of eight bits yet; store `pack.compressed('int8')`, which says so.")
        return scales.numpy().tobytes() + _compressed(numbers.numpy())
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())
    return flat[:, :-1].T.tobytes() + _compressed(np.ascontiguousarray(flat[:, -1]))


def decode(data: Buffer, compression: Compression, dtype: torch.dtype, shape: Sequence[int], name: str) -> Tensor:
    """Return the tensor that `encode` encoded; raises `PackCorruptError` for invalid bytes."""
    count = prod(shape)
    if compression == "int8":
        places = (shape[0], 1, shape[2]) if name.endswith("key") else (shape[0], shape[1], 1)
        cut = prod(places)
        _need(data, cut, name)
        scales = torch.from_numpy(np.frombuffer(data[:cut], np.int8).reshape(places).copy())
        numbers = np.frombuffer(_decompressed(data[cut:], count, name), np.int8).reshape(shape)
        return _dequantised(scales, torch.from_numpy(numbers.copy()), dtype)
    width = dtype.itemsize
    cut = count * (width - 1)
    _need(data, cut, name)
    planes = np.frombuffer(data[:cut], np.uint8).reshape(width - 1, count)
    words = np.frombuffer(_decompressed(data[cut:], count, name), np.uint8).astype(f"<u{width}")
    # Shifting is twice as fast as writing every other byte.
    for plane in planes[::-1]:
        words <<= 8
        words |= plane
    return torch.from_numpy(words.view(np.uint8)).view(dtype).view(tuple(shape))


def rounded(kv: KVTensors) -> KVTensors:
    """Round KV to eight bits per number, in the same dtype: the KV that a reader of int8 gets back.

    Scales are powers of two, so the dtype represents every result exactly, and rounding twice changes nothing. Raises
    `PackError` if the KV has NaN or infinite numbers.
    """

    def side(tensors: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
        return tuple(_dequantised(*_quantised(tensor, name), tensor.dtype) for tensor in tensors)

    return KVTensors(side(kv.keys, "key"), side(kv.values, "value"))


def digest(found: Tensor | Buffer) -> str:
    """Return the BLAKE2b digest (16 bytes, as hexadecimal digits) of bytes or of a tensor's bytes."""
    data = found.contiguous().view(-1).view(torch.uint8).numpy().data if isinstance(found, Tensor) else found
    return blake2b(data, digest_size=16).hexdigest()


def in_threads(act: Callable[[_In], _Out], items: Sequence[_In], nbytes: int) -> list[_Out]:
    """Apply `act` to each item, in threads if `nbytes` is large: hashing and zstd release the GIL."""
    # The cores that this process may use, if the system reports them.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(8, cores, len(items))
    # A thread of the pool starts no more threads.
    if nbytes < _POOL_FROM or count < 2 or getattr(_own, "is_of_pool", False):
        return list(map(act, items))
    results: list[_Out] = list(items)  # type: ignore[arg-type]  # Each is replaced below.
    with ThreadPoolExecutor(count, initializer=setattr, initargs=(_own, "is_of_pool", True)) as pool:
        # One task per thread: a task per item would cost as much as hashing the item.
        for at, share in enumerate(pool.map(lambda at: list(map(act, items[at::count])), range(count))):
            results[at::count] = share
    return results


def _quantised(tensor: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the exponents of the scales, and the numbers from -127 to 127, both int8."""
    plain = tensor.detach().cpu().to(torch.float32)
    if not bool(torch.isfinite(plain).all()):
        raise PackError(f"{name} holds numbers that are not finite; they cannot be stored as int8.")
    axis = 1 if name.endswith("key") else 2
    # `amax` of zero tokens fails; `sum` gives zeros.
    largest = plain.abs().amax(dim=axis, keepdim=True) if plain.shape[axis] else plain.sum(dim=axis, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    # The smallest power of two that scales the largest number to at most 127.
    scales = torch.where(mantissa <= 127 / 128, exponent - 7, exponent - 6)
    scales = scales.clamp(_LEAST_EXPONENT.get(tensor.dtype, -126), 127).to(torch.int8)
    return scales, torch.ldexp(plain, -scales.to(torch.int32)).round().to(torch.int8)


def _dequantised(scales: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(numbers.to(torch.float32), scales.to(torch.int32)).to(dtype)


def _compressed(plane: np.ndarray) -> bytes:
    import zstandard

    # Three or four equal bytes occur by chance; matching them costs space and time.
    parameters = zstandard.ZstdCompressionParameters.from_level(3, min_match=7)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(plane.tobytes())


def _decompressed(data: Buffer, size: int, name: str) -> bytes:
    import zstandard

    try:
        if zstandard.frame_content_size(data) == size:
            # One per thread: it may not be shared, and takes longer to make than to use.
            decompressor = _own.__dict__.setdefault("decompressor", None) or zstandard.ZstdDecompressor()
            _own.decompressor = decompressor
            return decompressor.decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError, OverflowError) as error:
        raise PackCorruptError(f"The bytes of {name} cannot be decompressed: {error}.") from error
    raise PackCorruptError(f"The bytes of {name} do not hold {size} numbers.")


def _need(data: Buffer, size: int, name: str) -> None:
    if len(data) < size:
        raise PackCorruptError(f"There are {len(data)} bytes of {name}; expected more than {size}.")
