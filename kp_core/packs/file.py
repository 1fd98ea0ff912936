"""One pack as one safetensors file: bytes to `KnowledgePack` and back. `docs/format.md` specifies the format."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate, chain, pairwise
from math import prod

import torch
from torch import Tensor

from kp_core.errors import KnowledgePackError, PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import Buffer
from kp_core.packs.codec import check_compression, decode, digest, encode, in_threads
from kp_core.packs.envelope import DTYPES, Envelope, header_entries, header_stop, raw, string, to_json
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack

__all__ = ["VERSION", "PackFile", "encode_pack", "has_mac", "open_pack", "read_header", "read_pack", "with_mac"]

VERSION = "5"
"""The format version that we write."""

_ENVELOPE = Envelope(
    "knowledge-pack",
    "pack",
    ("2", "3", "4", VERSION),
    advice="Upgrade the package, or remove the pack and store it anew from the text beside the file.",
)
_HEADERS = 64  # Cached headers, about 50 KB each.
_STATE = "states."
_ROUNDED = "int8"  # A compression of release 0.2, of which only text and tokens are read.
_MAC = "kp:mac"  # Key in the provenance of an entry.
_LARGEST_INT = 2**53 - 1  # The largest integer that every JSON reader keeps exact.


@dataclass(frozen=True, eq=False)
class PackFile:
    """A pack file: the pack without KV, what the header says of its tensors, and the tensors' bytes if they were read.

    Tensors are in file order: `layers.0.key`, `layers.0.value`, `layers.1.key`, …, and last the states of recurrent
    layers. A lazy pack has no tensors and no `dtype`.
    """

    pack: KnowledgePack
    dtype: str | None = None
    """The dtype of keys and values."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """`(kv_heads, tokens, head_dim)` for keys and values; states have any shape."""
    digests: tuple[str, ...] = ()
    stored: tuple[int, ...] = ()
    """If the pack is compressed: the bytes of each tensor in the file."""
    states: tuple[str, ...] = ()
    """The dtype of each state."""
    head: bytes = b""
    """The bytes before the tensors: length field, header with all of the above, padding. They identify the content."""
    tensors: tuple[Buffer, ...] = ()
    """The bytes of each tensor; empty if only the header was read."""
    damage: str | None = None
    """The damage that the header and the size of the file show, if any."""

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in file order."""
        return _names(len(self.shapes), len(self.states))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype name of each tensor."""
        return (str(self.dtype),) * (len(self.shapes) - len(self.states)) + self.states

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each tensor in the file."""
        if self.stored:
            return self.stored
        layouts = zip(self.shapes, self.dtypes, strict=True)
        return tuple(prod(shape) * _dtype(dtype).itemsize for shape, dtype in layouts)

    @property
    def nbytes(self) -> int:
        """The size in bytes that the file should have."""
        return len(self.head) + sum(self.sizes)

    def chunks(self) -> Iterator[Buffer]:
        """Yield the bytes of the file, in order, without copying tensors."""
        yield self.head
        yield from self.tensors

    def tensor(self, index: int) -> Tensor:
        """Return one tensor, on the CPU; without compression it shares the memory of its bytes.

        Raises `PackCorruptError` if the bytes do not match their digest.
        """
        name, shape, data = self.names[index], self.shapes[index], self.tensors[index]
        dtype = _dtype(self.dtypes[index])
        if self.stored:
            values = decode(data, dtype, shape, name)
        elif len(data):
            values = torch.frombuffer(data, dtype=dtype).view(shape)
        else:
            values = torch.empty(shape, dtype=dtype)
        if (actual := digest(values if self.stored else data)) != self.digests[index]:
            raise PackCorruptError(f"The bytes of {name} have the digest {actual}; expected {self.digests[index]}.")
        return values

    def read(self) -> KnowledgePack:
        """Return the pack with its KV, after checking every digest; raises `PackCorruptError` for damaged tensors.

        A pack of release 0.2 whose KV was rounded to eight bits comes without KV.
        """
        if self.dtype is None:
            return self.pack
        if self.pack.compression == _ROUNDED:
            return replace(self.pack, compression="none")
        tensors = in_threads(self.tensor, range(len(self.tensors)), self.nbytes)
        stop = len(tensors) - len(self.states)
        return replace(
            self.pack, kv=KVTensors(tuple(tensors[:stop:2]), tuple(tensors[1:stop:2]), tuple(tensors[stop:]))
        )

    def undamaged(self) -> PackFile:
        """Return the file; raises `PackCorruptError` if its header or its size show damage."""
        if self.damage is not None:
            raise PackCorruptError(self.damage)
        return self

    def entries(self) -> dict[str, object]:
        """Return the tensor entries of the safetensors header; a compressed tensor is listed as bytes."""
        sizes = self.sizes
        if self.stored:
            return header_entries((name, "U8", [size], size) for name, size in zip(self.names, sizes, strict=True))
        tensors = zip(self.names, self.dtypes, self.shapes, sizes, strict=True)
        return header_entries((name, DTYPES[dtype], shape, size) for name, dtype, shape, size in tensors)


def encode_pack(pack: KnowledgePack) -> PackFile:
    """Encode `pack` as a file; equal packs give equal bytes.

    Raises `PackError` for what the format cannot hold, e.g. text that is not Unicode, or a steered pack.
    """
    if pack.steering is not None:
        raise PackError(
            f"The pack {pack.text[:40]!r} is steered, and a pack file holds plain packs only. Store the pack it was "
            "made from, keep the steering with `save_steering`, and steer again after loading."
        )
    kv = () if pack.kv is None else (half for pair in zip(pack.kv.keys, pack.kv.values, strict=True) for half in pair)
    states = () if pack.kv is None else pack.kv.states
    tensors = [tensor.detach().cpu().contiguous() for tensor in (*kv, *states)]
    nbytes = pack.nbytes
    buffers = list(map(raw, tensors))
    stored: tuple[int, ...] = ()
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    # `_check` refuses other dtypes below.
    if pack.compression != "none" and tensors and set(dtypes) <= set(DTYPES):
        check_compression(pack.compression)
        buffers = in_threads(encode, tensors, nbytes)
        stored = tuple(map(len, buffers))
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    digests = tuple(in_threads(digest, tensors, nbytes))
    dtype, of_states = next(iter(dtypes), None), tuple(dtypes[len(dtypes) - len(states) :])
    file = PackFile(replace(pack, kv=None), dtype, shapes, digests, stored, of_states, tensors=tuple(buffers))
    try:
        metadata = _to_json(file)
    except (TypeError, ValueError, PackCorruptError) as error:
        raise PackError(
            f"The pack {pack.text[:40]!r} cannot be stored: {error} Expected Unicode text, integer token ids, "
            f"provenance of strings, and KV of one of {[*DTYPES]}."
        ) from error
    return replace(file, head=_ENVELOPE.write_head(metadata, file.entries()))


def read_header(data: Buffer, size: int | None = None) -> PackFile:
    """Read and check the header of a pack file of `size` bytes; `data` is its beginning, or all of it without `size`.

    Raises `PackCorruptError` for damaged metadata, `PackError` for intact ones of an unknown version.
    """
    size = len(data) if size is None else size
    return _read_header(bytes(data[: header_stop(data, size)]), size)


@lru_cache(_HEADERS)
def _read_header(head: bytes, size: int) -> PackFile:
    """Parse a header; cached, because a lookup reads it and reading the tensors reads it again."""
    version, metadata, entries = _ENVELOPE.read_head(head)
    file = replace(_from_json(metadata, version), head=head)
    damage = None
    if entries != file.entries():
        damage = "The tensors of the header are not those of the metadata."
    elif size != file.nbytes:
        damage = f"The file has {size} bytes; expected {file.nbytes}."
    return replace(file, damage=damage)


def open_pack(data: Buffer) -> PackFile:
    """Open the whole file in `data` and check its header; a read-only buffer is copied.

    Raises as `read_header`, and `PackCorruptError` if the header does not fit the rest of the file.
    """
    file = read_header(data).undamaged()
    buffer = memoryview(bytearray(data) if memoryview(data).readonly and not file.stored else data)
    edges = pairwise(accumulate(file.sizes, initial=len(file.head)))
    return replace(file, tensors=tuple(buffer[start:stop] for start, stop in edges))


def read_pack(data: Buffer) -> KnowledgePack:
    """Read a whole pack file and check the digest of every tensor; the KV is on the CPU, in the memory of `data`.

    Raises as `open_pack`, and `PackCorruptError` if tensors are damaged.
    """
    return open_pack(data).read()


def _to_json(file: PackFile, version: str = VERSION, cuts: Sequence[int] = ()) -> str:
    """Return the canonical JSON; equal contents give equal strings. Raises `PackCorruptError` for what it cannot hold.

    `cuts` is a field of files of versions 2 to 4 without a meaning today.
    """
    _check(file, cuts)
    pack, prefix, names = file.pack, file.pack.prefix, file.names
    tensors: dict[str, dict[str, object]] = {
        name: {"digest": digest, "shape": shape}
        for name, digest, shape in zip(names, file.digests, file.shapes, strict=True)
    }
    content: dict[str, object] = {
        "dtype": file.dtype,
        "fingerprint": pack.fingerprint.to_dict(version),
        "prefix": {"token_ids": prefix},
        "layers": (len(file.shapes) - len(file.states)) // 2,
        "namespace": pack.namespace,
        "provenance": dict(pack.provenance),
        "tensors": tensors,
        "text": pack.text,
        "token_ids": pack.token_ids,
        "tokens": len(pack.token_ids),
    }
    if version != VERSION:
        content["prefix"] = {"cuts": cuts, "token_ids": prefix}
    if version in ("4", VERSION):
        content["states"] = len(file.states)
    if file.states:
        for name, dtype in zip(names[-len(file.states) :], file.states, strict=True):
            tensors[name]["dtype"] = dtype
    if file.stored:
        content["compression"] = pack.compression
        for name, stored in zip(names, file.stored, strict=True):
            tensors[name]["stored"] = stored
    return to_json(content, sort_keys=True)


def _from_json(text: str, version: str) -> PackFile:
    """Parse the output of `_to_json`; raises `PackCorruptError` for anything else."""
    try:
        data = json.loads(text)
        prefix = data["prefix"]
        is_packed = version == "3" or (version in ("4", VERSION) and "compression" in data)
        names = _names(len(data["tensors"]), data["states"] if version in ("4", VERSION) else 0)
        pack = KnowledgePack(
            data["text"],
            data["namespace"],
            tuple(data["token_ids"]),
            tuple(prefix["token_ids"]),
            ModelFingerprint.from_dict(data["fingerprint"]),
            provenance=data["provenance"],
            compression=data["compression"] if is_packed else "none",
        )
        tensors = [data["tensors"][name] for name in names]
        shapes = tuple(tuple(tensor["shape"]) for tensor in tensors)
        stored = tuple(tensor["stored"] for tensor in tensors) if is_packed else ()
        states = tuple(data["tensors"][name]["dtype"] for name in names if name.startswith(_STATE))
        digests = tuple(tensor["digest"] for tensor in tensors)
        file = PackFile(pack, data["dtype"], shapes, digests, stored, states)
        if version != VERSION and bool(states) != (version == "4"):
            raise PackCorruptError(f"A file of version {version} has {len(states)} states.")
        # This also finds missing, repeated or reordered names and counts that disagree.
        if _to_json(file, version, () if version == VERSION else tuple(prefix["cuts"])) != text:
            raise PackCorruptError("It is not in canonical form.")
    except (KnowledgePackError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise PackCorruptError(f"The metadata describe no pack: {error}") from error
    return file


def _check(file: PackFile, cuts: Sequence[int]) -> None:
    pack, tokens = file.pack, len(file.pack.token_ids)
    shapes = file.shapes[: len(file.shapes) - len(file.states)]
    texts = chain(pack.fingerprint.to_dict().values(), *pack.provenance.items())
    for text in (pack.text, *texts, *file.digests):
        string(text, "pack")
    # `type(...) is int`, because `isinstance` accepts JSON's true as an integer.
    for number in chain(pack.token_ids, pack.prefix, cuts, *file.shapes, file.stored):
        if type(number) is not int or not 0 <= number <= _LARGEST_INT:
            raise PackCorruptError(f"Got {number!r}; expected an integer from 0 to 2**53 - 1.")
    if pack.compression not in ("none", "lossless", _ROUNDED) or (bool(file.stored) and pack.compression == "none"):
        raise PackCorruptError(f"Got the compression {pack.compression!r}; expected lossless or int8.")
    if (file.dtype not in DTYPES) if shapes else (file.dtype is not None):
        raise PackCorruptError(f"Got {len(shapes)} tensors of dtype {file.dtype!r}; expected one of {set(DTYPES)}.")
    if file.states and (not shapes or not set(file.states) <= set(DTYPES) or pack.compression == _ROUNDED):
        raise PackCorruptError(
            f"Got {len(file.states)} states of {sorted(set(file.states))} beside {len(shapes)} keys and values, "
            f"compressed {pack.compression!r}; expected some beside keys and values, of {set(DTYPES)}, not int8."
        )
    if any(len(shape) != 3 or shape[1] != tokens for shape in shapes):
        raise PackCorruptError(f"Got the shapes {shapes}; expected (kv_heads, {tokens}, head_dim).")
    if [shape[0] for shape in shapes[::2]] != [shape[0] for shape in shapes[1::2]]:
        raise PackCorruptError("Keys and values of a layer differ in kv_heads, or one of them is missing.")


def _names(count: int, states: int = 0) -> list[str]:
    """Return the names of `count` tensors in file order, the last `states` of them states; raises `ValueError`."""
    if type(states) is not int or not 0 <= states <= count:
        raise ValueError(f"Got {states!r} states among {count} tensors.")
    kv = [f"layers.{index // 2}.{'value' if index % 2 else 'key'}" for index in range(count - states)]
    return kv + [f"{_STATE}{index}" for index in range(states)]


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def with_mac(pack: KnowledgePack, key: bytes) -> KnowledgePack:
    """Return `pack` with a MAC in its provenance: HMAC-SHA-256 over everything in the entry.

    The digests in a file reveal damage, but anyone who can write to the store can compute them; the MAC needs the key.
    """
    digests = encode_pack(replace(pack, compression="none")).digests
    return replace(pack, provenance={**pack.provenance, _MAC: _mac(pack, digests, key)})


def has_mac(file: PackFile, key: bytes) -> bool:
    """Whether the file has a valid MAC over the digests in its header; reading checks tensors against digests."""
    mac = _mac(file.pack, file.digests, key)
    return hmac.compare_digest(mac.encode(), file.pack.provenance.get(_MAC, "").encode())


def _mac(pack: KnowledgePack, digests: Sequence[str], key: bytes) -> str:
    content = {
        "digests": list(digests),
        "fingerprint": pack.fingerprint.to_dict(),
        "namespace": pack.namespace,
        "prefix": pack.prefix,
        "provenance": {name: value for name, value in pack.provenance.items() if name != _MAC},
        "text": pack.text,
        "token_ids": pack.token_ids,
    }
    return hmac.new(key, b"kp-entry-v1\0" + to_json(content, sort_keys=True).encode(), sha256).hexdigest()
