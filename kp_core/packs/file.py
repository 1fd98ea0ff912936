"""One pack as one safetensors file: bytes to `KnowledgePack` and back. The format is specified in `docs/format.md`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import TypeAlias, TypeVar

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

FORMAT, VERSION = "knowledge-pack", "1"
_METADATA = {"format", "version", "digest", "pack"}
_SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_LARGEST_HEADER = 100_000_000  # The limit of safetensors itself.
_ALIGNMENT = 64  # Tensor data begins on a cache line, for readers that map the file.
_POOL_FROM = 4_000_000  # Bytes from which hashing in threads pays for starting them.

_R = TypeVar("_R")
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
    try:
        flat, content = _describe(pack)
        metadata = content.to_json()
        digest = _digest_metadata(VERSION, metadata)
        described = {"format": FORMAT, "version": VERSION, "digest": digest, "pack": metadata}
        header = to_json({"__metadata__": described, **_header_entries(content)}).encode()
        header += b" " * (-(8 + len(header)) % _ALIGNMENT)
        # The reader's checks are the writer's checks: what is written can be read.
        _parse_header(header, 0)
    except (TypeError, ValueError, PackCorruptError) as error:
        raise PackError(
            f"The pack {pack.text[:40]!r} cannot be stored: {error} Expected Unicode text, integer token ids, "
            f"provenance of strings, and KV of one of {DTYPES}."
        ) from error
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
    return _parse_header(bytes(data[8 : header_stop(data, size)]), size)


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
    dtype: torch.dtype = getattr(torch, content.dtype)
    sizes = [header.start, *(prod(shape) * dtype.itemsize for shape in content.shapes)]
    flat = torch.split(torch.frombuffer(own, dtype=torch.uint8), sizes)[1:]
    names = tensor_names(len(flat))
    for name, found, expected in zip(names, _map(_digest_tensor, flat), content.digests, strict=True):
        if found != expected:
            raise PackCorruptError(f"The bytes of {name} have the digest {found}; expected {expected}.")
    tensors = [part.view(dtype).view(shape) for part, shape in zip(flat, content.shapes, strict=True)]
    return replace(content.pack, kv=KVTensors(tuple(tensors[::2]), tuple(tensors[1::2])))


def _describe(pack: KnowledgePack) -> tuple[tuple[Tensor, ...], PackContent]:
    """The tensors of a pack as flat bytes, and its content."""
    lazy = pack.without_kv()
    if pack.kv is None:
        return (), PackContent(lazy)
    tensors = [tensor for pair in zip(pack.kv.keys, pack.kv.values, strict=True) for tensor in pair]
    flat = tuple(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    shapes = tuple((tensor.shape[0], tensor.shape[1], tensor.shape[2]) for tensor in tensors)
    dtype = str(pack.kv.dtype).removeprefix("torch.")
    return flat, PackContent(lazy, dtype, shapes, tuple(_map(_digest_tensor, flat)))


def _header_entries(content: PackContent) -> dict[str, object]:
    """The safetensors header of tensors that lie one after the other."""
    entries: dict[str, object] = {}
    stop = 0
    for name, shape in zip(tensor_names(len(content.shapes)), content.shapes, strict=True):
        dtype = str(content.dtype)
        start, stop = stop, stop + _nbytes(content, shape)
        entries[name] = {"dtype": _SAFETENSORS_DTYPES.get(dtype), "shape": list(shape), "data_offsets": [start, stop]}
    return entries


def _nbytes(content: PackContent, shape: tuple[int, int, int]) -> int:
    dtype: torch.dtype = getattr(torch, str(content.dtype))
    return prod(shape) * dtype.itemsize


def _parse_header(header: bytes, size: int) -> PackHeader:
    entries = mapping(from_json(header), "header")
    metadata = mapping(entries.pop("__metadata__", None), "__metadata__")
    if set(metadata) != _METADATA or metadata["format"] != FORMAT:
        raise PackCorruptError(f"Got the metadata {sorted(metadata)}; expected {sorted(_METADATA)} of a {FORMAT!r}.")
    version, text = string(metadata["version"], "version"), string(metadata["pack"], "pack")
    if metadata["digest"] != _digest_metadata(version, text):
        raise PackCorruptError("The metadata do not match their digest.")
    if version != VERSION:
        raise PackVersionError(
            f"Got a file of version {version!r} of the pack format; this release reads version {VERSION!r}. "
            "Upgrade the package, or remove the pack and store it anew from the text beside the file."
        )
    content = PackContent.from_json(text)
    start = 8 + len(header)
    nbytes = start + sum(_nbytes(content, shape) for shape in content.shapes)
    damage = None
    if entries != _header_entries(content):
        damage = "The tensors of the header are not those of the metadata."
    elif size != nbytes:
        damage = f"The file has {size} bytes; expected {nbytes}."
    return PackHeader(content, text, start, nbytes, damage)


def _digest_metadata(version: str, text: str) -> str:
    return blake2b(f"{version}\n{text}".encode(), digest_size=16).hexdigest()


def _digest_tensor(flat: Tensor) -> str:
    return blake2b(_bytes_of(flat), digest_size=16).hexdigest()


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.numpy().data


def _map(function: Callable[[Tensor], _R], items: Sequence[Tensor]) -> list[_R]:
    """`function` of each item, in threads when that pays: hashing releases the interpreter's lock."""
    if sum(item.numel() for item in items) < _POOL_FROM:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))
