"""KV at rest: `Entry`, and its file. `docs/format.md` specifies the file."""

from __future__ import annotations

import hmac
import json
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b, sha256
from io import FileIO
from itertools import accumulate, chain, pairwise
from math import prod

import torch
from torch import Tensor

from kp_core.errors import KnowledgePackError, PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.memory import new_memory
from kp_core.packs.blobs import Buffer, fill
from kp_core.packs.codec import Compression, check_compression, decode, digest, encode
from kp_core.packs.envelope import DTYPES, Envelope, header_entries, header_stop, raw, string, to_json
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace
from kp_core.packs.pack import check_integers
from kp_core.threads import in_threads

VERSION = "6"
"""The format version that we write and read."""

_ENVELOPE = Envelope("knowledge-pack-entry", "entry", VERSION, advice="Upgrade the package, or delete the file.")
_STATE = "states."


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Return tokens as they are digested: 8 bytes each, the least significant first."""
    return struct.pack(f"<{len(token_ids)}Q", *token_ids)


def digest_of(token_ids: Sequence[int]) -> str:
    """Return the digest of tokens that precede an entry of which nothing is altered; see `Entry.before`."""
    return blake2b(packed_ids(token_ids), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Entry:
    """The key of stored KV of `token_ids` at the position `at`, computed behind what the digest `before` covers.

    That is all earlier tokens, and the label of each region that was steered or composed. `label` says what was done to
    this KV itself. `owners` are the handles of all packs in the entry and before it, and the namespaces whose words
    stand there. Only a reader who may read all of them may read the entry, and it is deleted with any of them.
    """

    model: ModelFingerprint
    at: int
    before: str
    token_ids: tuple[int, ...]
    owners: frozenset[str]
    label: str = ""
    begins: int | None = None
    """How many first tokens its name covers; a prompt that continues differently reads the common part. `None`: all."""
    planned: float = field(default_factory=time.time, compare=False)
    """When a request planned to read or write it, in seconds since 1970."""

    @classmethod
    def of_pack(
        cls,
        handle: Handle | str,
        model: ModelFingerprint,
        prefix: Sequence[int],
        token_ids: tuple[int, ...] = (),
        label: str = "",
    ) -> Entry:
        """The entry of a pack behind `prefix`; a lookup needs no `token_ids`, as the text determines them.

        `label` is the id of the soft tokens around it, if any.
        """
        return cls(model, len(prefix), digest_of(prefix), token_ids, frozenset({str(handle)}), label, 0)

    @cached_property
    def handles(self) -> tuple[Handle, ...]:
        """The handles among the owners, in order."""
        return tuple(Handle.parse(owner) for owner in sorted(self.owners) if ":" in owner)

    @cached_property
    def namespaces(self) -> frozenset[str]:
        """All namespaces that a view must be allowed to read."""
        words = (check_namespace(owner) for owner in self.owners if ":" not in owner)
        return frozenset((*words, *(handle.namespace for handle in self.handles)))

    @cached_property
    def key(self) -> str:
        """The key of its blob: beside the text of the only pack that owns it, or among all others."""
        fields = {"at": self.at, "before": self.before, "begins": self.begins, "label": self.label}
        fields |= {"model": self.model.id, "owners": sorted(self.owners), "token_ids": self.token_ids[: self.begins]}
        name = blake2b(to_json(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
        if len(self.owners) == 1 and self.handles:
            [handle] = self.handles
            return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.{name}.safetensors"
        return f"behind/{name[:2]}/{name}.safetensors"


@dataclass(frozen=True, eq=False)
class EntryFile:
    """The file of an entry: what its header says, and the bytes of the tensors if they were read.

    Tensors are in file order: `layers.0.key`, `layers.0.value`, `layers.1.key`, …, and last the states of recurrent
    layers.
    """

    entry: Entry
    dtypes: tuple[str, ...]
    """The dtype of each tensor; keys and values share one."""
    shapes: tuple[tuple[int, ...], ...]
    """`(kv_heads, tokens, head_dim)` for keys and values; states have any shape."""
    digests: tuple[str, ...]
    """XXH3 finds damage; of a file with a MAC they are BLAKE2b, which nobody can forge."""
    states: int = 0
    """How many of the tensors are states."""
    stored: tuple[int, ...] = ()
    """If the file is compressed: the bytes of each tensor in it."""
    mac: str = ""
    """HMAC-SHA-256 with the key of the server that wrote it, over everything in the header."""
    head: bytes = b""
    """The bytes before the tensors: length field, header with all of the above, padding. They identify the content."""
    tensors: tuple[Buffer, ...] = ()
    """The bytes of each tensor; empty if only the header was read."""

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in file order."""
        return _names(len(self.shapes), self.states)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return (len(self.shapes) - self.states) // 2

    @property
    def compression(self) -> Compression:
        """How the tensors are stored."""
        return "lossless" if self.stored else "none"

    @property
    def decoded(self) -> tuple[int, ...]:
        """The bytes of each tensor without compression."""
        layouts = zip(self.shapes, self.dtypes, strict=True)
        return tuple(prod(shape) * _dtype(dtype).itemsize for shape, dtype in layouts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each tensor in the file."""
        return self.stored or self.decoded

    @property
    def nbytes(self) -> int:
        """The size in bytes that the file should have."""
        return len(self.head) + sum(self.sizes)

    def chunks(self) -> Iterator[Buffer]:
        """Yield the bytes of the file, in order, without copying tensors."""
        yield self.head
        yield from self.tensors

    def tensor(self, index: int, into: Buffer | None = None) -> Tensor:
        """Return one tensor, on the CPU, decompressed `into` memory; otherwise it shares the memory of its bytes.

        Raises `PackCorruptError` if the bytes do not match their digest.
        """
        name, data, dtype = self.names[index], self.tensors[index], _dtype(self.dtypes[index])
        memory = (new_memory(self.decoded[index]) if into is None else into) if self.stored else data
        values = torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)
        if self.stored:
            decode(data, name, values)
        return self._checked(index, values.view(self.shapes[index]))

    def _checked(self, index: int, values: Tensor) -> Tensor:
        actual = digest(values, is_forgeable=not self.mac)
        if actual != self.digests[index]:
            name = self.names[index]
            raise PackCorruptError(f"The bytes of {name} have the digest {actual}; expected {self.digests[index]}.")
        return values

    def read(self) -> KVTensors:
        """Return the KV after checking every digest; raises `PackCorruptError` for damaged tensors."""
        # Into one piece of memory: many small ones are slower to get.
        memory = new_memory(sum(self.decoded) if self.stored else 0).data
        places = [memory[start:stop] for start, stop in pairwise(accumulate(self.decoded, initial=0))]
        tensors = in_threads(lambda index: self.tensor(index, places[index]), range(len(places)), self.nbytes)
        stop = len(tensors) - self.states
        return KVTensors(tuple(tensors[:stop:2]), tuple(tensors[1:stop:2]), tuple(tensors[stop:]))

    def read_into(self, room: KVTensors, file: FileIO) -> bool:
        """Read the tensors from their open `file` into `room`; `False` if that, or the file, has another form.

        Raises as `read`.
        """
        places = list(chain.from_iterable(zip(room.keys, room.values, strict=True)))
        forms = [(tuple(place.shape), str(place.dtype).removeprefix("torch.")) for place in places]
        if forms != list(zip(self.shapes, self.dtypes, strict=True)):
            return False
        starts, own = list(accumulate(self.sizes, initial=len(self.head))), threading.local()

        def read(index: int) -> None:
            at, place = starts[index], places[index]
            if self.stored:
                if not hasattr(own, "memory"):  # One of each thread: new memory takes longer than filling it.
                    own.memory = new_memory(max(self.stored)).data
                parts = [own.memory[: self.stored[index]]]
            else:
                parts = [memoryview(raw(head)) for head in place]
            for part in parts:
                at += fill(file, part, at)
            if at < starts[index + 1]:
                raise PackCorruptError(f"The file ends at byte {at}; expected {self.nbytes}.")
            if self.stored:
                decode(parts[0], self.names[index], place)
            self._checked(index, place)  # While it is in the processor's cache.

        in_threads(read, range(len(places)), self.nbytes)
        return True

    def has_mac(self, seal: bytes) -> bool:
        """Whether the MAC is that of this key; reading checks tensors against the digests that it covers."""
        return hmac.compare_digest(self.mac.encode(), _mac(self, seal).encode())

    def entries(self) -> dict[str, object]:
        """Return the tensor entries of the safetensors header; a compressed tensor is listed as bytes."""
        plain = ((DTYPES[dtype], shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True))
        forms = [("U8", (size,)) for size in self.stored] if self.stored else plain
        named = zip(self.names, forms, self.sizes, strict=True)
        return header_entries((name, *form, size) for name, form, size in named)


def encode_entry(
    entry: Entry, kv: KVTensors, compression: Compression = "none", seal: bytes | None = None
) -> EntryFile:
    """Encode an entry as a file; equal entries give equal bytes. With `seal`, the file carries a MAC.

    Raises `PackError` for what the format cannot hold.
    """
    check_compression(compression)
    if kv.tokens != len(entry.token_ids):
        raise PackError(f"Got KV of {kv.tokens} tokens for an entry of {len(entry.token_ids)}.")
    halves = chain.from_iterable(zip(kv.keys, kv.values, strict=True))
    tensors = [tensor.detach().cpu().contiguous() for tensor in (*halves, *kv.states)]
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    buffers, stored = list(map(raw, tensors)), tuple[int, ...]()
    # `_check` refuses other dtypes below.
    if compression != "none" and set(dtypes) <= set(DTYPES):
        buffers = in_threads(encode, tensors, kv.nbytes)
        stored = tuple(map(len, buffers))
    digests = in_threads(lambda tensor: digest(tensor, is_forgeable=seal is None), tensors, kv.nbytes)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    file = EntryFile(entry, dtypes, shapes, tuple(digests), len(kv.states), stored, tensors=tuple(buffers))
    try:
        file = file if seal is None else replace(file, mac=_mac(file, seal))
        metadata = _to_json(file)
    except (TypeError, ValueError, PackCorruptError) as error:
        raise PackError(
            f"KV cannot be stored: {error} Expected integer token ids and KV of one of {[*DTYPES]}."
        ) from error
    return replace(file, head=_ENVELOPE.write_head(metadata, file.entries()))


def read_header(data: Buffer, size: int | None = None) -> EntryFile:
    """Read and check the header of a file of `size` bytes; `data` is its beginning, or all of it without `size`.

    Raises `PackCorruptError` for damage that header and size show, `PackError` for intact ones of another version.
    """
    size = len(data) if size is None else size
    head = bytes(data[: header_stop(data, size)])
    metadata, entries, _ = _ENVELOPE.read_head(head)
    file = replace(_from_json(metadata), head=head)
    if entries != file.entries():
        raise PackCorruptError("The tensors of the header are not those of the metadata.")
    if size != file.nbytes:
        raise PackCorruptError(f"The file has {size} bytes; expected {file.nbytes}.")
    return file


def open_entry(data: Buffer) -> EntryFile:
    """Open the whole file in `data` and check its header, as `read_header`; a read-only buffer is copied."""
    file = read_header(data)
    buffer = memoryview(bytearray(data) if memoryview(data).readonly and not file.stored else data)
    edges = pairwise(accumulate(file.sizes, initial=len(file.head)))
    return replace(file, tensors=tuple(buffer[start:stop] for start, stop in edges))


def _content(file: EntryFile) -> dict[str, object]:
    """What the header says of the entry, without its MAC. Raises `PackCorruptError` for what it cannot hold."""
    _check(file)
    entry, tensors = file.entry, dict[str, dict[str, object]]()
    for at, (name, dtype) in enumerate(zip(file.names, file.dtypes, strict=True)):
        of_states = {"dtype": dtype} if name.startswith(_STATE) else {}
        of_compressed = {"stored": file.stored[at]} if file.stored else {}
        tensors[name] = {"digest": file.digests[at], "shape": file.shapes[at], **of_states, **of_compressed}
    return {
        "at": entry.at,
        "before": entry.before,
        "begins": entry.begins,
        "compression": file.compression,
        "dtype": file.dtypes[0],
        "fingerprint": entry.model.to_dict(),
        "label": entry.label,
        "layers": file.layers,
        "owners": sorted(entry.owners),
        "states": file.states,
        "tensors": tensors,
        "token_ids": entry.token_ids,
    }


def _to_json(file: EntryFile) -> str:
    return to_json(_content(file) | {"mac": file.mac}, sort_keys=True)


def _from_json(text: str) -> EntryFile:
    """Parse the output of `_to_json`; raises `PackCorruptError` for anything else."""
    try:
        data = json.loads(text)
        names = _names(len(data["tensors"]), data["states"])
        entry = Entry(
            ModelFingerprint.from_dict(data["fingerprint"]),
            data["at"],
            data["before"],
            tuple(data["token_ids"]),
            frozenset(data["owners"]),
            data["label"],
            data["begins"],
        )
        tensors = [data["tensors"][name] for name in names]
        file = EntryFile(
            entry,
            tuple(tensor.get("dtype", data["dtype"]) for tensor in tensors),
            tuple(tuple(tensor["shape"]) for tensor in tensors),
            tuple(tensor["digest"] for tensor in tensors),
            data["states"],
            tuple(tensor["stored"] for tensor in tensors) if data["compression"] != "none" else (),
            data["mac"],
        )
        # This also finds missing, repeated or reordered names and counts that disagree.
        if _to_json(file) != text:
            raise PackCorruptError("It is not in canonical form.")
    except (KnowledgePackError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise PackCorruptError(f"The metadata describe no entry: {error}") from error
    return file


def _check(file: EntryFile) -> None:
    entry, tokens = file.entry, len(file.entry.token_ids)
    shapes = file.shapes[: len(file.shapes) - file.states]
    for text in (entry.before, entry.label, file.mac, *entry.model.to_dict().values(), *file.digests):
        string(text, "entry")
    _ = entry.key, entry.namespaces  # Raises for owners that are neither handles nor namespaces.
    begins = () if entry.begins is None else (entry.begins,)
    check_integers(chain((entry.at, *begins), entry.token_ids, *file.shapes, file.stored))
    if not shapes or not set(file.dtypes) <= set(DTYPES):
        raise PackCorruptError(f"Got {len(shapes)} tensors of {set(file.dtypes)}; expected {set(DTYPES)}.")
    if any(len(shape) != 3 or shape[1] != tokens for shape in shapes):
        raise PackCorruptError(f"Got the shapes {shapes}; expected (kv_heads, {tokens}, head_dim).")
    if [shape[0] for shape in shapes[::2]] != [shape[0] for shape in shapes[1::2]]:
        raise PackCorruptError("Keys and values of a layer differ in kv_heads, or one of them is missing.")
    # All planes but one are stored as they are, so a small file cannot claim large tensors.
    for size, stored, dtype in zip(file.decoded, file.stored, file.dtypes, strict=False):
        if stored < size - size // _dtype(dtype).itemsize:
            raise PackCorruptError(f"Got {stored} bytes for a tensor of {size}.")


def _names(count: int, states: int) -> list[str]:
    """Return the names of `count` tensors in file order, the last `states` of them states."""
    if type(states) is not int or not 0 <= states <= count:
        raise ValueError(f"Got {states!r} states among {count} tensors.")
    kv = [f"layers.{index // 2}.{'value' if index % 2 else 'key'}" for index in range(count - states)]
    return kv + [f"{_STATE}{index}" for index in range(states)]


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _mac(file: EntryFile, seal: bytes) -> str:
    return hmac.new(seal, b"kp-entry-v2\0" + to_json(_content(file), sort_keys=True).encode(), sha256).hexdigest()
