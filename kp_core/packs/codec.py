"""Encoding of the tensors of an entry: raw, or compressed losslessly."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
import xxhash
from torch import Tensor

from kp_core.errors import PackCorruptError, PackError, gone
from kp_core.packs.blobs import Buffer

Compression: TypeAlias = Literal["none", "lossless"]
"""How the KV of a pack is stored. `lossless`: zstd compresses the most significant byte of each number, which holds
sign and exponent and repeats; the other bytes do not shrink and stay raw."""

_own = threading.local()


def check_compression(name: object) -> None:
    """Raise `PackError` if `name` is not a compression."""
    if name not in get_args(Compression):
        names = ", ".join(get_args(Compression))
        raise PackError(f"Got compress={name!r}; expected one of {names}.{gone('compress', name)}")


def encode(tensor: Tensor) -> bytes:
    """Compress `tensor` losslessly."""
    import zstandard

    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())
    # Three or four equal bytes occur by chance; matching them costs space and time.
    parameters = zstandard.ZstdCompressionParameters.from_level(3, min_match=7)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return flat[:, :-1].T.tobytes() + compressor.compress(flat[:, -1].tobytes())


def decode(data: Buffer, name: str, into: Tensor) -> None:
    """Write the tensor `name` that `encode` encoded `into` memory, where heads may stand apart.

    Raises `PackCorruptError` for invalid bytes.
    """
    count, width = into.numel(), into.itemsize
    cut, start = count * (width - 1), 0
    planes = np.frombuffer(data[:cut], np.uint8).reshape(width - 1, count)
    top = np.frombuffer(_decompressed(data[cut:], count, name), np.uint8)
    for part in [into] if into.is_contiguous() else into:
        words, stop = part.view(-1).view(torch.uint8).numpy().view(f"<u{width}"), start + part.numel()
        words[:] = top[start:stop]
        # Shifting is twice as fast as writing every other byte.
        for plane in planes[::-1]:
            words <<= 8
            words |= plane[start:stop]
        start = stop


def digest(found: Tensor | Buffer, *, is_forgeable: bool) -> str:
    """Return a digest (16 bytes, as hexadecimal digits) of bytes or of a tensor's bytes.

    XXH3 is ten times as fast as BLAKE2b; it finds damage, but whoever writes the bytes can forge it.
    """
    state = xxhash.xxh3_128() if is_forgeable else blake2b(digest_size=16)
    # Heads in the buffer of a request stand apart; each alone needs no copy.
    parts: Iterable[Tensor | Buffer] = found if isinstance(found, Tensor) and not found.is_contiguous() else [found]
    for part in parts:
        state.update(part.contiguous().view(-1).view(torch.uint8).numpy().data if isinstance(part, Tensor) else part)
    return state.hexdigest()


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
