"""Encoding of the tensors of an entry: raw, or compressed losslessly."""

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
import xxhash
from torch import Tensor

from kp_core.errors import PackCorruptError, PackError, gone
from kp_core.packs.blobs import Buffer

__all__ = ["Compression", "check_compression", "decode", "digest", "encode", "in_threads"]

Compression: TypeAlias = Literal["none", "lossless"]
"""How the KV of a pack is stored. `lossless`: zstd compresses the most significant byte of each number, which holds
sign and exponent and repeats; the other bytes do not shrink and stay raw."""

_own = threading.local()
_POOL_FROM = 1_000_000  # Below this number of bytes, starting threads costs more than it saves.

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def check_compression(name: object) -> None:
    """Raise `PackError` if `name` is not a compression."""
    if name not in get_args(Compression):
        names = ", ".join(get_args(Compression))
        raise PackError(f"Got compress={name!r}; expected one of {names}.{gone('compress', name)}")


def encode(tensor: Tensor) -> bytes:
    """Compress `tensor` losslessly."""
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())
    return flat[:, :-1].T.tobytes() + _compressed(np.ascontiguousarray(flat[:, -1]))


def decode(data: Buffer, dtype: torch.dtype, shape: Sequence[int], name: str) -> Tensor:
    """Return the tensor `name` that `encode` encoded; raises `PackCorruptError` for invalid bytes."""
    count, width = prod(shape), dtype.itemsize
    cut = count * (width - 1)
    if len(data) < cut:
        raise PackCorruptError(f"There are {len(data)} bytes of {name}; expected more than {cut}.")
    planes = np.frombuffer(data[:cut], np.uint8).reshape(width - 1, count)
    words = np.frombuffer(_decompressed(data[cut:], count, name), np.uint8).astype(f"<u{width}")
    # Shifting is twice as fast as writing every other byte.
    for plane in planes[::-1]:
        words <<= 8
        words |= plane
    return torch.from_numpy(words.view(np.uint8)).view(dtype).view(tuple(shape))


def digest(found: Tensor | Buffer, *, is_forgeable: bool) -> str:
    """Return a digest (16 bytes, as hexadecimal digits) of bytes or of a tensor's bytes.

    XXH3 is ten times as fast as BLAKE2b; it finds damage, but whoever writes the bytes can forge it.
    """
    data = found.contiguous().view(-1).view(torch.uint8).numpy().data if isinstance(found, Tensor) else found
    return xxhash.xxh3_128_hexdigest(data) if is_forgeable else blake2b(data, digest_size=16).hexdigest()


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
