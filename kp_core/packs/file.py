"""One pack as one safetensors file: bytes to `KnowledgePack` and back. The format is specified in `docs/format.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from kp_core.errors import PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import Buffer
from kp_core.packs.codec import decode, digest, encode, in_threads
from kp_core.packs.content import VERSION, PackContent, tensor_names
from kp_core.packs.envelope import DTYPES, Envelope, header_entries, header_stop, raw
from kp_core.packs.pack import KnowledgePack

__all__ = [
    "Buffer",
    "EncodedPack",
    "OpenPack",
    "PackHeader",
    "encode_pack",
    "open_pack",
    "read_header",
    "read_pack",
]

_ENVELOPE = Envelope(
    "knowledge-pack",
    "pack",
    ("2", "3", "4", VERSION),
    advice="Upgrade the package, or remove the pack and store it anew from the text beside the file.",
)
_HEADERS = 64  # Kept in memory, some 50 KB each.


@dataclass(frozen=True, eq=False)
class EncodedPack:
    """The bytes of a pack file: `head` (length field, JSON, padding), then the bytes of each tensor, nothing between.

    `metadata` is the JSON that identifies the content.
    """

    head: bytes
    tensors: tuple[Buffer, ...]
    metadata: str

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(map(len, self.tensors))

    def chunks(self) -> Iterator[Buffer]:
        """The bytes of the file, in order, without copying tensors."""
        yield self.head
        yield from self.tensors


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


@dataclass(frozen=True, eq=False)
class OpenPack:
    """A pack file in memory, `data`, whose head was checked; its tensors are decoded and checked one by one.

    Tensors are numbered as in the file: keys and values of the first layer, of the second, and so on, then states.
    """

    header: PackHeader
    data: memoryview

    def __len__(self) -> int:
        return len(self.header.content.digests)

    @cached_property
    def _edges(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(_sizes(self.header.content), initial=self.header.start)))

    def tensor(self, index: int) -> Tensor:
        """One tensor, on the CPU, in the memory of `data` where nothing is unpacked.

        Raises `PackCorruptError` when its bytes are not those that the head tells.
        """
        content = self.header.content
        name, shape, dtype = content.names[index], content.shapes[index], _dtype(content.dtypes[index])
        part = self.data[slice(*self._edges[index])]
        if content.stored:
            found = decode(part, content.pack.compression, dtype, shape, name)
        elif len(part):
            found = torch.frombuffer(part, dtype=dtype).view(shape)
        else:
            found = torch.empty(shape, dtype=dtype)
        if (seen := digest(found if content.stored else part)) != content.digests[index]:
            raise PackCorruptError(f"The bytes of {name} have the digest {seen}; expected {content.digests[index]}.")
        return found


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
    kv = () if pack.kv is None else (half for pair in zip(pack.kv.keys, pack.kv.values, strict=True) for half in pair)
    states = () if pack.kv is None else pack.kv.states
    tensors = [tensor.detach().cpu().contiguous() for tensor in (*kv, *states)]
    names, nbytes = tensor_names(len(tensors), len(states)), pack.nbytes
    parts = list(map(raw, tensors))
    stored: tuple[int, ...] = ()
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    # What has another dtype is refused below.
    if pack.compression != "none" and tensors and set(dtypes) <= set(DTYPES):
        pairs = list(zip(tensors, names, strict=True))
        parts = in_threads(lambda each: encode(each[0], pack.compression, each[1]), pairs, nbytes)
        stored = tuple(map(len, parts))
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    digests = tuple(in_threads(digest, tensors, nbytes))
    dtype, of_states = next(iter(dtypes), None), tuple(dtypes[len(dtypes) - len(states) :])
    content = PackContent(replace(pack, kv=None), dtype, shapes, digests, stored, of_states)
    try:
        metadata = content.to_json()
    except (TypeError, ValueError, PackCorruptError) as error:
        raise PackError(
            f"The pack {pack.text[:40]!r} cannot be stored: {error} Expected Unicode text, integer token ids, "
            f"provenance of strings, and KV of one of {[*DTYPES]}."
        ) from error
    return EncodedPack(_ENVELOPE.write_head(metadata, _header_entries(content)), tuple(parts), metadata)


def read_header(data: Buffer, size: int | None = None) -> PackHeader:
    """Read and check the head of a pack file of `size` bytes from its first ones; `data` is all of it without `size`.

    Raises `PackCorruptError` when the metadata cannot be trusted, `PackVersionError` when they are intact but of a
    version that this release does not know.
    """
    size = len(data) if size is None else size
    return _read_header(bytes(data[: header_stop(data, size)]), size)


@lru_cache(_HEADERS)
def _read_header(data: bytes, size: int) -> PackHeader:
    """The head of a file is read when a pack is looked up, and again with its tensors: so it is parsed once."""
    version, text, entries = _ENVELOPE.read_head(data)
    content = PackContent.from_json(text, version)
    start = len(data)
    nbytes = start + sum(_sizes(content))
    damage = None
    if entries != _header_entries(content):
        damage = "The tensors of the header are not those of the metadata."
    elif size != nbytes:
        damage = f"The file has {size} bytes; expected {nbytes}."
    return PackHeader(content, text, start, nbytes, damage)


def read_pack(data: Buffer) -> KnowledgePack:
    """Read a whole pack file, checking the digest of every tensor; the KV is on the CPU, in the memory of `data`.

    A buffer that is read-only is copied. Raises as `open_pack`, and `PackCorruptError` when the tensors are damaged.
    """
    opened = open_pack(data)
    content = opened.header.content
    if content.dtype is None:
        return content.pack
    tensors = in_threads(opened.tensor, range(len(opened)), opened.header.nbytes)
    stop = len(tensors) - len(content.states)
    kv = KVTensors(tuple(tensors[:stop:2]), tuple(tensors[1:stop:2]), tuple(tensors[stop:]))
    return replace(content.pack, kv=kv)


def open_pack(data: Buffer) -> OpenPack:
    """The file of which `data` is all; what is read-only is copied.

    Raises as `read_header`, and `PackCorruptError` when the head does not fit what comes behind it.
    """
    header = read_header(data)
    if header.damage is not None:
        raise PackCorruptError(header.damage)
    own = bytearray(data) if memoryview(data).readonly and not header.content.stored else data
    return OpenPack(header, memoryview(own))


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _sizes(content: PackContent) -> list[int]:
    """Bytes of each tensor in the file."""
    if content.stored:
        return list(content.stored)
    pairs = zip(content.shapes, content.dtypes, strict=True)
    return [prod(shape) * _dtype(dtype).itemsize for shape, dtype in pairs]


def _header_entries(content: PackContent) -> dict[str, object]:
    """The safetensors header of its tensors; what is compressed is bytes there."""
    sizes = _sizes(content)
    if content.stored:
        return header_entries((name, "U8", [size], size) for name, size in zip(content.names, sizes, strict=True))
    tensors = zip(content.names, content.dtypes, content.shapes, sizes, strict=True)
    return header_entries((name, DTYPES[dtype], shape, size) for name, dtype, shape, size in tensors)
