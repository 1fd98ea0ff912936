"""Identifies a model by its files or its tensors: equal tensors have equal digests."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from torch import Tensor

from kp_core.bundled import cache_directory, check_reachable, converted
from kp_core.errors import MissingDependencyError, ModelError
from kp_core.packs.blobs import replace_file
from kp_core.packs.fingerprint import NUMERICS, ModelFingerprint
from kp_core.prompt.template import ChatTemplate

if TYPE_CHECKING:  # Importing it takes seconds, and not every engine needs it.
    from transformers import PreTrainedModel

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
_SETTLED_S = 10.0  # The digest of a file that was changed within so many seconds is not kept.
_VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Fields of a configuration that differ between loads or releases without changing what is computed."""


def fingerprint_of(
    source: str | Path | PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401
    template: ChatTemplate,
    revision: str | None = None,
    numerics: Sequence[str] = ("unknown",) * len(NUMERICS),
) -> ModelFingerprint:
    """Identity and `numerics` of a model: of the files of a folder or an id, or of the tensors in memory of an object.

    Both identities are equal unless transformers renames or splits tensors when it saves them. Weights in files count
    as stored. Raises `ModelError` for files that cannot be read.
    """
    adapters = "none"
    if isinstance(source, str | Path):
        try:
            folder = checkpoint_folder(source, revision)
            weights = digest_files(folder)
            files = [folder / "config.json"]
            if folder.is_file():  # A GGUF file contains it; if it was unpacked, its folder is faster.
                files = [*cache_directory().glob(f"gguf-{weights}-*/config.json")]
            config = json.loads(files[0].read_bytes() if files else load_part("AutoConfig", folder).to_json_string())
        except (OSError, ValueError, ImportError) as error:
            raise unreadable(source, error) from error
    else:
        config = json.loads(source.config.to_json_string())
        tensors, added = _split(source)
        weights = digest_tensors(tensors)
        if state := adapter_state(source):
            adapter_json = json.dumps(state, sort_keys=True, default=sorted)
            adapters = _digest(adapter_json.encode(), digest_tensors(added).encode())
    return ModelFingerprint(
        weights=weights,
        adapters=adapters,
        config=_digest(_stable({name: value for name, value in config.items() if name not in _VOLATILE})),
        rope=_stable(_rope(config)).decode(),
        **tokenizer_identity(tokenizer, template),
        **dict(zip(NUMERICS, numerics, strict=True)),
    )


def identity_of(source: str | Path, *, trust_remote_code: bool = False) -> ModelFingerprint:
    """The identity of a checkpoint from its files alone, for any engine; the numerics are `unknown`.

    `source` is a folder or an id. Raises `ModelError`, and `PromptError` without a chat template.
    """
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    return fingerprint_of(source, tokenizer, ChatTemplate(tokenizer))


def tokenizer_identity(tokenizer: Any, template: ChatTemplate) -> dict[str, str]:  # noqa: ANN401
    """The fields of a fingerprint that depend on the tokenizer alone."""
    serialised = tokenizer.backend_tokenizer.to_str()

    def digest() -> str:
        canonical = json.loads(serialised)
        for state_of_last_call in ("padding", "truncation"):
            canonical.pop(state_of_last_call, None)
        return _digest(_stable(canonical))

    # A release that digests another form needs another name.
    name = f"tokenizer-{_digest(serialised.encode())}"
    return {"tokenizer": _kept_digest(name, digest), "chat_template": template.digest}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE part of a configuration file of any transformers release, in the form of transformers 5."""
    older = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    parameters = older | (config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = parameters.pop("type", None)
    return parameters if kind is None else {"rope_type": kind} | parameters


def _stable(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _split(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's own tensors and those of its adapters, by name; tied tensors occur once.

    Own tensors have the names that they have without adapters.
    """
    inner = {"base_layer", "original_module"}  # Where peft keeps the wrapped module.
    wrapped, tensors = adapter_state(model), (dict[str, Tensor](), dict[str, Tensor]())
    memories: set[tuple[object, ...]] = set()
    for name, tensor in model.state_dict().items():
        # The memory of a quantised tensor is that of its parts.
        memory = (tensor.shape, *(part.data_ptr() for _, part in plain_parts("", tensor)))
        if tensor.numel() and memory in memories:
            continue
        memories.add(memory)
        parts = name.split(".")
        heads = [index for index in range(len(parts)) if ".".join(parts[:index]) in wrapped]
        added = any(parts[index] not in inner for index in heads)
        own_parts = parts if added else [part for index, part in enumerate(parts) if index not in heads]
        tensors[added][".".join(own_parts)] = tensor
    return tensors


def place_of(source: str | Path) -> tuple[str | Path, dict[str, str]]:
    """The path or id for `from_pretrained`, and its further arguments: `gguf_file` for a GGUF file."""
    path = Path(source)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path.parent, {"gguf_file": path.name}
    return source, {}


def checkpoint_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `source` itself if it is a folder or a GGUF file, else that in the local cache.

    Without a `revision`, missing files are downloaded. Raises `OSError` or `ValueError`.
    """
    if Path(source).is_dir() or place_of(source)[1]:
        return Path(source)
    check_reachable(source, revision)
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


def stamp_files(source: str | Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of each file of a model in a folder, or of a GGUF file, to detect changes."""
    folder = Path(source)
    patterns = ("config.json", "model*", "pytorch_model*") if folder.is_dir() else ()
    matches = [folder] if folder.is_file() else [file for pattern in patterns for file in folder.glob(pattern)]
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
        {f"{name} {formats[name]} {list(tensor.shape)}": partial(one, tensor) for name, tensor in plain.items()}
    )


def plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors in `tensor`, by name: itself, or the numbers and scales of a quantised tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    parts, context = tensor.__tensor_flatten__()
    for part in parts:
        yield from plain_parts(f"{name}.{part} of {type(tensor).__name__} {context}", getattr(tensor, part))


def digest_files(folder: Path) -> str:
    """Digest of the weight files that transformers would load; equals `digest_tensors` of the stored tensors.

    Files in other formats than safetensors are digested whole. The digest is kept in the user's cache directory until
    path, size, times or inode of a file change. Raises `OSError` or `ValueError`.
    """
    candidates = (folder, *(folder / name for name in _WEIGHTS))
    weights_file = next((file for file in candidates if file.is_file()), None)
    if weights_file is None:
        raise OSError(f"it holds none of {', '.join(_WEIGHTS)}.")
    names = [weights_file.name]
    if weights_file.suffix == ".json":
        names = sorted(set(json.loads(weights_file.read_bytes())["weight_map"].values()))
    files = [weights_file.parent / name for name in names]
    state, changed = _state_of(files)
    # A file that was just written may be written again within the resolution of its times.
    return _kept_digest(
        state,
        lambda: _digest_contents(files),
        lambda: time.time() - changed > _SETTLED_S and _state_of(files)[0] == state,
    )


def _kept_digest(name: str, compute: Callable[[], str], may_keep: Callable[[], bool] = lambda: True) -> str:
    """The digest in the user's cache directory under `name`; if there is none, what `compute` returns, kept there."""
    kept = cache_directory() / "digests" / name
    with suppress(OSError, UnicodeDecodeError):
        if re.fullmatch("[0-9a-f]{32}", text := kept.read_text("ascii")):
            return text
    digest = compute()
    if may_keep():
        with suppress(OSError):
            replace_file(kept, [digest.encode()])
    return digest


def _state_of(files: Sequence[Path]) -> tuple[str, float]:
    """A digest of what changes with every change of the files, and the time of the last one."""
    stats = [file.stat() for file in files]
    states = [
        (str(file.resolve()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for file, stat in zip(files, stats, strict=True)
    ]
    return _digest(_stable(states)), max(max(stat.st_mtime, stat.st_ctime) for stat in stats)


def _digest_contents(files: Sequence[Path]) -> str:
    parts: dict[str, Callable[[], bytes]] = {}
    for file in files:
        name, size, start = file.name, file.stat().st_size, 0
        header: dict[str, Any] = {name: {"dtype": "file", "shape": [size], "data_offsets": [0, size]}}
        if name.endswith(".safetensors"):
            with file.open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(start - 8))
        header.pop("__metadata__", None)
        for tensor, entry in header.items():
            begin, stop = (start + offset for offset in entry["data_offsets"])
            label = f"{tensor} {entry['dtype']} {entry['shape']}"
            parts[label] = partial(_digest_range, file, begin, stop)
    return _digest_parts(parts)


def _digest(*parts: bytes) -> str:
    """BLAKE2b-128 of the concatenated parts."""
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


def _digest_parts(parts: Mapping[str, Callable[[], bytes]]) -> str:
    names = sorted(parts)
    # hashlib releases the GIL while it hashes.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: parts[name](), names)
        return _digest(*(f"{name}\0".encode() + part_digest for name, part_digest in zip(names, digests, strict=True)))


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


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:  # noqa: ANN401
    """The tokenizer of a folder, a GGUF file or an id, which needs no weights; raises `ModelError`."""
    if place_of(source)[1]:
        return converted_tokenizer(Path(source))
    return load_part("AutoTokenizer", source, trust_remote_code=trust_remote_code)


def load_part(kind: str, source: str | Path, *, trust_remote_code: bool = False) -> Any:  # noqa: ANN401
    """What `kind` (`AutoConfig`, `AutoTokenizer`) reads of a model in a folder or of an id; raises `ModelError`."""
    place, file = place_of(source)
    check_reachable(place)
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(place, **file, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise unreadable(source, error) from error


def converted_tokenizer(file: Path) -> Any:  # noqa: ANN401
    """The tokenizer of a GGUF file, which is converted once; raises `ModelError`."""
    import transformers

    def convert(target: Path) -> None:
        load_part("AutoTokenizer", file).save_pretrained(target)

    name = _digest(f"{file.resolve()}{stamp_files(file)}".encode())
    folder = converted(f"tokenizer-{name}", convert, source=file.name)
    # Its class alone is imported, because `AutoTokenizer` imports all of transformers, which takes seconds.
    kind = json.loads((folder / "tokenizer_config.json").read_bytes())["tokenizer_class"]
    return getattr(transformers, kind).from_pretrained(folder)


def unreadable(source: str | Path, error: Exception) -> ModelError:
    """The error to raise, in one line, for a model that raised `error` when it was read."""
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return ModelError(
            f"{str(source)!r} can only be loaded by running code that comes with it. Read that code; if you trust it, "
            "pass `trust_remote_code=True`."
        )
    if isinstance(error, ImportError):
        return MissingDependencyError(f"Could not load {str(source)!r}, as a package is missing: {reason}")
    return ModelError(
        f"Could not load {str(source)!r}: {reason} Expected a Hugging Face id of a causal language model, or a folder "
        "with config.json, weights and tokenizer."
    )


def adapter_state(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """By path of each module with peft adapters: their names, activation, scale and merging."""
    acting = ("_active_adapter", "_disable_adapters")
    return {
        path: {
            name: value
            for name, value in vars(module).items()
            if (name in acting or not name.startswith("_")) and name != "training" and _is_plain(value)
        }
        for path, module in model.named_modules()
        if "_disable_adapters" in vars(module)
    }


def _is_plain(value: object) -> bool:
    """Whether a value is plain data, which has a stable form."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
