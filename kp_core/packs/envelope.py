"""The common form of our files: a safetensors file with JSON in its metadata, and a digest of that JSON.

We write the header ourselves, because the safetensors library orders metadata at random, copies all tensors in memory
to write them, and cannot read a header without a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from kp_core.errors import PackCorruptError, PackError
from kp_core.packs.blobs import Buffer, replace_file

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""The dtypes a tensor may have, and their safetensors names."""

_LARGEST_HEADER = 100_000_000  # The limit of safetensors itself.
_LARGEST_FILE = 1 << 30  # For files that are read whole; packs are not.
_ALIGNMENT = 64  # Tensor data begins on a cache line, for readers that map the file.


@dataclass(frozen=True)
class Envelope:
    """A kind of file: its `format`, the metadata entry with its JSON, and the `version` that we write and read.

    The digest covers the version and the JSON, and with `covers_tensors` also the tensors. Without it, the JSON holds
    digests of the tensors, and the reader checks them. `advice` says what to do with a file of another version.
    """

    format: str
    content: str
    version: str
    covers_tensors: bool = False
    advice: str = "A later release may read it."

    def write_head(
        self, text: str, entries: Mapping[str, object], tensors: Mapping[str, Tensor] | None = None
    ) -> bytes:
        """Return the bytes before the tensors: length field, header around the JSON `text`, padding."""
        digest = self._digest(self.version, text, tensors or {})
        metadata = {"format": self.format, "version": self.version, "digest": digest}
        header = to_json({"__metadata__": {**metadata, self.content: text}, **entries}).encode()
        header += b" " * (-(8 + len(header)) % _ALIGNMENT)
        return len(header).to_bytes(8, "little") + header

    def read_head(self, head: bytes, whole: bytes = b"") -> tuple[str, dict[str, object], dict[str, Tensor]]:
        """Check a `head` and return JSON text, tensor entries, and the tensors of the `whole` file, if given.

        Raises `PackCorruptError` for damage, `PackError` for an intact file of another version.
        """
        entries = mapping(from_json(head[8:]), "header")
        metadata = mapping(entries.pop("__metadata__", None), "__metadata__")
        if set(metadata) != {"format", "version", "digest", self.content} or metadata["format"] != self.format:
            raise PackCorruptError(f"Got the metadata {sorted(metadata)}; expected those of a {self.format!r}.")
        try:
            tensors: dict[str, Tensor] = safetensors.torch.load(whole) if whole else {}
        except (SafetensorError, KeyError) as error:  # A dtype that torch lacks is a `KeyError`.
            raise PackCorruptError(f"The tensors cannot be read: {error}.") from error
        version, text = string(metadata["version"], "version"), string(metadata[self.content], self.content)
        if metadata["digest"] != self._digest(version, text, tensors):
            raise PackCorruptError("The metadata do not match their digest.")
        if version != self.version:
            raise PackError(
                f"Got a file of version {version!r} of the format {self.format!r}; this release reads version "
                f"{self.version!r}. {self.advice}"
            )
        return text, entries, tensors

    def write(self, content: Mapping[str, object], tensors: Mapping[str, Tensor]) -> bytes:
        """Return the file of `content`, as canonical JSON, and `tensors`; equal input gives equal bytes."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        entries = header_entries(
            (name, DTYPES[str(tensor.dtype).removeprefix("torch.")], tensor.shape, tensor.nbytes)
            for name, tensor in plain.items()
        )
        return b"".join((self.write_head(to_json(content, sort_keys=True), entries, plain), *map(raw, plain.values())))

    def read(self, data: bytes) -> tuple[Any, dict[str, Tensor]]:
        """Return the JSON and the tensors of a whole file; nothing is unpickled.

        Raises `PackCorruptError` and `PackError` as `read_head`.
        """
        text, _, tensors = self.read_head(data[: header_stop(data, len(data))], data)
        return from_json(text.encode()), tensors

    def save(self, path: str | Path, content: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
        """Save the output of `write` as `path` and replace what is there; the file appears whole or not at all."""
        target = Path(path).absolute()
        replace_file(target, [self.write(content, tensors)])
        return target

    def load(self, path: str | Path) -> tuple[Any, dict[str, Tensor]]:
        """Read the file at `path` as `read` does, without mapping it; also raises `OSError`."""
        file = Path(path)
        if (size := file.stat().st_size) > _LARGEST_FILE:
            raise PackCorruptError(f"It has {size} bytes; expected at most {_LARGEST_FILE}.")
        return self.read(file.read_bytes())

    def _digest(self, version: str, text: str, tensors: Mapping[str, Tensor]) -> str:
        digest = blake2b(f"{version}\n{text}".encode(), digest_size=16)
        for name, tensor in sorted(tensors.items()) if self.covers_tensors else ():
            digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(raw(tensor))
        return digest.hexdigest()


def header_entries(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> dict[str, object]:
    """Return the safetensors header of contiguous tensors, given name, dtype, shape and size in bytes of each."""
    entries: dict[str, object] = {}
    stop = 0
    for name, dtype, shape, size in tensors:
        start, stop = stop, stop + size
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [start, stop]}
    return entries


def header_stop(data: Buffer, size: int) -> int:
    """Return where the header of a file of `size` bytes ends, from its first 8 bytes; raises `PackCorruptError`."""
    length = int.from_bytes(data[:8], "little")
    if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
        raise PackCorruptError(f"The file of {size} bytes claims a header of {length}.")
    return 8 + length


def raw(tensor: Tensor) -> Buffer:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    data: Buffer = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def string(value: object, name: str) -> str:
    """Return `value` if it is a Unicode string; raise `PackCorruptError` otherwise."""
    if not isinstance(value, str):
        raise PackCorruptError(f"Got {type(value).__name__} under {name!r}; expected a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PackCorruptError(f"The string under {name!r} is not Unicode: {error}.") from error
    return value


def mapping(value: object, name: str) -> dict[str, object]:
    """Return `value` if it is a JSON object; raise `PackCorruptError` otherwise."""
    if not isinstance(value, dict):
        raise PackCorruptError(f"Got {type(value).__name__} under {name!r}; expected an object.")
    return value


def to_json(value: Mapping[str, object], *, sort_keys: bool = False) -> str:
    """Return compact JSON; raises `TypeError` or `ValueError` for a value that JSON cannot express."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, allow_nan=False)


def from_json(data: bytes) -> object:
    """Parse UTF-8 JSON; raises `PackCorruptError` for invalid JSON and for an object that repeats a name."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PackCorruptError(f"Not JSON: {error}.") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise PackCorruptError("A name occurs twice in one JSON object.")
    return unique
