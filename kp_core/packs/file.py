"""One pack as one safetensors file: bytes to `KnowledgePack` and back. The format is specified in `docs/format.md`.

The header is written here, as the safetensors library orders metadata at random, needs all tensors once more in memory
for writing, and reads no header without a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from kp_core.errors import PackCorruptError, PackError, PackVersionError
from kp_core.kv import KVTensors
from kp_core.packs.content import DTYPES, PackContent, from_json, mapping, string, tensor_names, to_json
from kp_core.packs.pack import KnowledgePack

__all__ = [
    "FORMAT",
    "VERSION",
    "Buffer",
    "EncodedPack",
    "PackHeader",
    "encode_pack",
    "header_stop",
    "read_header",
    "read_pack",
]

FORMAT, VERSION = "knowledge-pack", "2"
_READABLE = ("1", "2")
_LARGEST_HEADER = 100_000_000  # The limit of safetensors itself.
_ALIGNMENT = 64  # Tensor data begins on a cache line, for readers that map the file.
_POOL_FROM = 4_000_000  # Bytes from which hashing in threads pays for starting them.

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, eq=False)
class EncodedPack:
    """The bytes of a pack file: `head` (length field, JSON, padding), then each of `tensors`, nothing between.

    `tensors` are flat, contiguous `uint8` tensors on the CPU. `metadata` is the JSON that identifies the content.
    """

    head: bytes
    tensors: tuple[Tensor, ...]
    metadata: str

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(tensor.numel() for tensor in self.tensors)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file, in order, without copying tensors."""
        yield self.head
        yield from (_bytes_of(tensor) for tensor in self.tensors)


@dataclass(frozen=True)
class PackHeader:
    """The head of a pack file, its digest checked.

    `metadata` is the JSON that `content` was read from, `start` the offset of the first tensor, `nbytes` the size the
    file should have. `damage` says what is wrong with the rest of the file, as far as the head and the size show it.
    """

    content: PackContent
    metadata: str
    start: int
    nbytes: int
    damage: str | None = None

    @property
    def pack(self) -> KnowledgePack:
        """The pack without its KV."""
        return self.content.pack


def encode_pack(pack: KnowledgePack) -> EncodedPack:
    """The file that holds `pack`; equal packs give equal bytes.

    Raises `PackError` when the pack holds something the format cannot: a dtype, an id that is no integer, text that is
    not Unicode; and when it is steered, as the format holds what a model computed and nothing else.
    """
    if pack.steering is not None:
        raise PackError(
            f"The pack {pack.text[:40]!r} is steered, and a pack file holds plain packs only. Store the pack it was "
            "made from, keep the steering with `save_steering`, and steer again after loading."
        )
    # What an earlier release computed stays a file that this release can read.
    version = "1" if pack.fingerprint.is_legacy else VERSION
    kv = (
        ()
        if pack.kv is None
        else tuple(half for pair in zip(pack.kv.keys, pack.kv.values, strict=True) for half in pair)
    )
    flat = tuple(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in kv)
    dtype = None if pack.kv is None else str(pack.kv.dtype).removeprefix("torch.")
    content = PackContent(pack.without_kv(), dtype, tuple(tuple(tensor.shape) for tensor in kv), _digests(flat))
    try:
        metadata = content.to_json(version)
    except (TypeError, ValueError, PackCorruptError) as error:
        raise PackError(
            f"The pack {pack.text[:40]!r} cannot be stored: {error} Expected Unicode text, integer token ids, "
            f"provenance of strings, and KV of one of {[*DTYPES]}."
        ) from error
    described = {"format": FORMAT, "version": version, "digest": _digest_metadata(version, metadata), "pack": metadata}
    header = to_json({"__metadata__": described, **_header_entries(content)}).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return EncodedPack(len(header).to_bytes(8, "little") + header, flat, metadata)


def header_stop(data: Buffer, size: int) -> int:
    """Where the header of a pack file of `size` bytes ends, by its first 8 bytes; raises `PackCorruptError`."""
    length = int.from_bytes(data[:8], "little")
    if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
        raise PackCorruptError(f"The file of {size} bytes claims a header of {length}.")
    return 8 + length


def read_header(data: Buffer, size: int | None = None) -> PackHeader:
    """Read and check the head of a pack file of `size` bytes from its first ones; `data` is all of it without `size`.

    Raises `PackCorruptError` when the metadata cannot be trusted, `PackVersionError` when they are intact but of a
    version that this release does not know.
    """
    size = len(data) if size is None else size
    start = header_stop(data, size)
    entries = mapping(from_json(bytes(data[8:start])), "header")
    metadata = mapping(entries.pop("__metadata__", None), "__metadata__")
    if set(metadata) != {"format", "version", "digest", "pack"} or metadata["format"] != FORMAT:
        raise PackCorruptError(f"Got the metadata {sorted(metadata)}; expected those of a {FORMAT!r}.")
    version, text = string(metadata["version"], "version"), string(metadata["pack"], "pack")
    if metadata["digest"] != _digest_metadata(version, text):
        raise PackCorruptError("The metadata do not match their digest.")
    if version not in _READABLE:
        raise PackVersionError(
            f"Got a file of version {version!r} of the pack format; this release reads the versions {_READABLE}. "
            "Upgrade the package, or remove the pack and store it anew from the text beside the file."
        )
    content = PackContent.from_json(text, version)
    nbytes = start + sum(_sizes(content))
    damage = None
    if entries != _header_entries(content):
        damage = "The tensors of the header are not those of the metadata."
    elif size != nbytes:
        damage = f"The file has {size} bytes; expected {nbytes}."
    return PackHeader(content, text, start, nbytes, damage)


def read_pack(data: Buffer) -> KnowledgePack:
    """Read a whole pack file, checking the digest of every tensor; the KV is on the CPU, in the memory of `data`.

    A buffer that is read-only is copied. Raises as `read_header`, and `PackCorruptError` when the tensors are damaged.
    """
    header = read_header(data)
    content = header.content
    if header.damage is not None:
        raise PackCorruptError(header.damage)
    if content.dtype is None:
        return content.pack
    own = bytearray(data) if memoryview(data).readonly else data
    flat = torch.split(torch.frombuffer(own, dtype=torch.uint8), [header.start, *_sizes(content)])[1:]
    for name, found, expected in zip(tensor_names(len(flat)), _digests(flat), content.digests, strict=True):
        if found != expected:
            raise PackCorruptError(f"The bytes of {name} have the digest {found}; expected {expected}.")
    dtype: torch.dtype = getattr(torch, content.dtype)
    tensors = [part.view(dtype).view(shape) for part, shape in zip(flat, content.shapes, strict=True)]
    return replace(content.pack, kv=KVTensors(tuple(tensors[::2]), tuple(tensors[1::2])))


def _sizes(content: PackContent) -> list[int]:
    """Bytes of each tensor."""
    return [prod(shape) * getattr(torch, str(content.dtype)).itemsize for shape in content.shapes]


def _header_entries(content: PackContent) -> dict[str, object]:
    """The safetensors header of tensors that lie one after the other."""
    entries: dict[str, object] = {}
    stop = 0
    for name, shape, size in zip(tensor_names(len(content.shapes)), content.shapes, _sizes(content), strict=True):
        start, stop = stop, stop + size
        entries[name] = {"dtype": DTYPES[str(content.dtype)], "shape": [*shape], "data_offsets": [start, stop]}
    return entries


def _digest_metadata(version: str, text: str) -> str:
    return blake2b(f"{version}\n{text}".encode(), digest_size=16).hexdigest()


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.numpy().data


def _digests(flat: Sequence[Tensor]) -> tuple[str, ...]:
    """The digest of each tensor, in threads when that pays: hashing releases the interpreter's lock."""

    def digest(tensor: Tensor) -> str:
        return blake2b(_bytes_of(tensor), digest_size=16).hexdigest()

    if sum(tensor.numel() for tensor in flat) < _POOL_FROM:
        return tuple(map(digest, flat))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(digest, flat))
