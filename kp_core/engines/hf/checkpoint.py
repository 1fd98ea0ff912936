"""Finds the files of a checkpoint and digests weights; on disk and in memory, equal tensors have equal digests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor

__all__ = [
    "checkpoint_folder",
    "commit_of",
    "digest",
    "digest_files",
    "digest_tensors",
    "is_away",
    "place_of",
    "plain_parts",
    "stamp_files",
]

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weight files, in the order in which transformers looks for them."""

_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}
_BLOCK = 1 << 20  # Bytes per read.


def place_of(source: str | Path) -> tuple[str | Path, dict[str, str]]:
    """The path or id for `from_pretrained`, and its further arguments: `gguf_file` for a GGUF file."""
    path = Path(source)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path.parent, {"gguf_file": path.name}
    return source, {}


def checkpoint_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `source` itself if it is a folder or a GGUF file, else that in the local cache.

    With the `revision` that was loaded, nothing is downloaded; without it, missing files are. Raises `OSError` or
    `ValueError`.
    """
    if Path(source).is_dir() or place_of(source)[1]:
        return Path(source)
    patterns = ["config.json", "model*.safetensors*"]
    return Path(
        snapshot_download(
            str(source), revision=revision, allow_patterns=patterns, local_files_only=revision is not None
        )
    )


def commit_of(source: str | Path, revision: str | None = None) -> str | None:
    """The commit of a repository in the local cache; `None` for a folder, and if it is not there."""
    if Path(source).is_dir():
        return None
    config_file = try_to_load_from_cache(str(source), "config.json", revision=revision)
    return Path(config_file).parent.name if isinstance(config_file, str) else None


def is_away(source: str | Path, revision: str | None = None) -> bool:
    """Whether `source` is a repository that is not on this machine, so that loading it needs the hub."""
    try:
        return not (constants.HF_HUB_OFFLINE or Path(source).exists() or commit_of(source, revision))
    except HFValidationError:  # A path that does not exist.
        return False


def stamp_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of each file of the model, to detect changes."""
    if folder.is_file():
        return {folder.name: (folder.stat().st_size, folder.stat().st_mtime_ns)}
    matches = [file for pattern in ("config.json", "model*", "pytorch_model*") for file in folder.glob(pattern)]
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in matches}


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Digest of the names, dtypes, shapes and bytes of tensors, in any order.

    A quantised tensor counts as its parts (`plain_parts`).
    """

    def one(tensor: Tensor) -> bytes:
        # numpy has no bfloat16, so the tensor is hashed as bytes.
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
        return blake2b(raw.data, digest_size=16).digest()

    plain = dict(part for name, tensor in tensors.items() for part in plain_parts(name, tensor))
    formats = {name: _FORMATS.get(tensor.dtype, str(tensor.dtype)) for name, tensor in plain.items()}
    return _digest_parts(
        {_label(name, formats[name], tensor.shape): partial(one, tensor) for name, tensor in plain.items()}
    )


def plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors in `tensor`, by name: itself, or the numbers and scales of a quantised tensor.

    The names of the latter contain the type of the quantised tensor.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    parts, context = tensor.__tensor_flatten__()
    for part in parts:
        yield from plain_parts(f"{name}.{part} of {type(tensor).__name__} {context}", getattr(tensor, part))


def digest_files(folder: Path) -> str:
    """Digest of the weight files that transformers would load; equals `digest_tensors` of the stored tensors.

    Files in other formats than safetensors are digested whole. Raises `OSError` or `ValueError` when there are no
    weight files, or they cannot be read.
    """
    candidates = (folder, *(folder / name for name in _WEIGHTS))
    weights_file = next((file for file in candidates if file.is_file()), None)
    if weights_file is None:
        raise OSError(f"it holds none of {', '.join(_WEIGHTS)}.")
    names = [weights_file.name]
    if weights_file.suffix == ".json":
        names = sorted(set(json.loads(weights_file.read_bytes())["weight_map"].values()))
    parts: dict[str, Callable[[], bytes]] = {}
    for name in names:
        file = weights_file.parent / name
        size, start = file.stat().st_size, 0
        header: dict[str, Any] = {name: {"dtype": "file", "shape": [size], "data_offsets": [0, size]}}
        if name.endswith(".safetensors"):
            with file.open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(start - 8))
        header.pop("__metadata__", None)
        for tensor, entry in header.items():
            begin, stop = (start + offset for offset in entry["data_offsets"])
            parts[_label(tensor, entry["dtype"], entry["shape"])] = partial(_digest_range, file, begin, stop)
    return _digest_parts(parts)


def digest(parts: Iterable[bytes]) -> str:
    """BLAKE2b-128 of the concatenated parts."""
    hasher = blake2b(digest_size=16)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _label(name: str, dtype: str, shape: Iterable[int]) -> str:
    return f"{name} {dtype} {list(shape)}"


def _digest_parts(parts: Mapping[str, Callable[[], bytes]]) -> str:
    names = sorted(parts)
    # hashlib releases the GIL while it hashes.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: parts[name](), names)
        return digest(f"{name}\0".encode() + part_digest for name, part_digest in zip(names, digests, strict=True))


def _digest_range(file: Path, start: int, stop: int) -> bytes:
    # Read, not mapped: if a mapped file is truncated meanwhile, the process is killed.
    hasher, block = blake2b(digest_size=16), memoryview(bytearray(min(_BLOCK, stop - start)))
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while start < stop:
            count = opened.readinto(block[: stop - start])
            if not count:
                raise OSError(f"{file} ends before its tensors do.")
            hasher.update(block[:count])
            start += count
    return hasher.digest()
