"""Finding a model and a tokenizer, and telling which they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kp_core.bundled import BUNDLED_MODEL
from kp_core.engines.hf.checkpoint import checkpoint_folder, digest, digest_files, digest_tensors, stamp_files
from kp_core.engines.hf.kinds import kind_of
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.hf.watch import adapter_state
from kp_core.errors import ModelChangedError, ModelError, UnsupportedModelError
from kp_core.packs.fingerprint import CUT_RULE, NUMERICS, ModelFingerprint
from kp_core.prompt.template import ChatTemplate

__all__ = [
    "identity_of",
    "load",
    "load_tokenizer",
    "memory_bytes",
    "name_of",
    "take_fingerprint",
    "tokenizer_identity",
]

# What a file of weights raises that is none, or pickles more than weights: torch unpickles nothing else.
_UNREADABLE = (OSError, ValueError, ImportError, SafetensorError, UnpicklingError, RuntimeError, LookupError, EOFError)
_VOLATILE = {
    "_name_or_path",
    "checkpoint_stamp",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""What differs from load to load, or release to release, without changing what is computed."""


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
    *,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer on `device` in `dtype`; what cannot be served is refused before its weights are loaded.

    Of a model of peft, this is the base model with its adapters inside. Code in a checkpoint runs only with
    `trust_remote_code`. Raises `ModelError`, `UnsupportedModelError`.
    """
    where = None if device is None else _device(device)
    wanted = None if dtype is None else _dtype(dtype)
    if not isinstance(model, str | Path):
        base = _causal_lm(model)
        if tokenizer is None:
            raise ModelError("Got a model object without its tokenizer; pass `tokenizer=` too.")
        if wanted not in (None, base.dtype):
            raise ModelError(f"Got dtype={dtype} for a model object in {base.dtype}; convert it with `model.to`.")
        return (base if where is None else base.to(where)), tokenizer
    where = where or _best_device()
    try:
        if (Path(model) / "adapter_config.json").is_file():
            raise ModelError(
                f"{str(model)!r} holds an adapter of peft. Load its base model, put the adapter on it with "
                "`peft.PeftModel.from_pretrained(base, ...)`, and pass that object with `tokenizer=`."
            )
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        kind_of(config)
        _check_room(Path(model), config.dtype, wanted or _best_dtype(where), where)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        stamp = stamp_files(Path(model))
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=wanted or _best_dtype(where), trust_remote_code=trust_remote_code
        )
    except _UNREADABLE as error:
        raise _unreadable(model, error) from error
    loaded.config.checkpoint_stamp = stamp  # See `take_fingerprint`.
    return loaded.to(where), tokenizer


def _check_room(folder: Path, stored: torch.dtype | None, wanted: torch.dtype, device: torch.device) -> None:
    """Raise `ModelError` for weights in `folder` that are more than all memory, before the system ends the process."""
    scale = wanted.itemsize / (stored or wanted).itemsize
    needed = scale * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if needed > (room := memory_bytes(device)):
        raise ModelError(
            f"{folder} needs about {needed / 1e9:,.1f} GB in {str(wanted).removeprefix('torch.')}, and there are "
            f"{room / 1e9:,.1f} GB of memory. Take a smaller model, or a narrower dtype."
        )


def name_of(model: object) -> str:
    """What people call a model: its id, the last part of its folder, or what its configuration has of either."""
    if model is None:
        return BUNDLED_MODEL
    if isinstance(model, str | Path):
        return Path(model).resolve().name if Path(model).is_dir() else str(model)
    base = _causal_lm(model)
    return name_of(base.name_or_path or str(base.config.model_type))


def memory_bytes(device: torch.device) -> int:
    """The memory where `device` keeps its tensors, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def take_fingerprint(
    model: CausalModel,
    tokenizer: Any,  # noqa: ANN401
    template: ChatTemplate,
    chunk_tokens: int,
    source: str | Path | PreTrainedModel,
) -> ModelFingerprint:
    """Identity and numerics of a loaded model, where `source` is what `load` was given.

    For a folder or an id, the identity is that of `identity_of`; for a model object, that of its tensors as they are,
    which equals it unless transformers renames or splits tensors when it saves them. Raises `ModelChangedError` when a
    folder is not what it was when it was loaded.
    """
    if isinstance(source, str | Path) and stamp_files(Path(source)) != model.config.checkpoint_stamp:
        raise ModelChangedError(f"The files of {str(source)!r} changed after they were loaded. Make a new engine.")
    revision = getattr(model.config, "_commit_hash", None)
    numerics = (str(model.shape.dtype).removeprefix("torch."), str(chunk_tokens), CUT_RULE, "local")
    return ModelFingerprint(
        **_identity(source, tokenizer, template, revision), **dict(zip(NUMERICS, numerics, strict=True))
    )


def identity_of(
    source: str | Path,
    tokenizer: Any = None,  # noqa: ANN401
    template_options: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> ModelFingerprint:
    """The identity of a checkpoint from its files alone, whatever engine runs it; the numerics are `unknown`.

    `source` is a folder or an id. Weights count as they are stored: neither how they are spread over safetensors files
    nor the dtype they are loaded in matters. Raises `ModelError`, and `TemplateError` without a chat template.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    identity = _identity(source, tokenizer, ChatTemplate(tokenizer, template_options))
    return ModelFingerprint(**identity, **dict.fromkeys(NUMERICS, "unknown"))


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:  # noqa: ANN401
    """The tokenizer of a folder or an id, which may hold no weights; raises `ModelError`."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise _unreadable(source, error) from error


def tokenizer_identity(tokenizer: Any, template: ChatTemplate) -> dict[str, str]:  # noqa: ANN401
    """The fields of a fingerprint that a tokenizer alone decides."""
    canonical = json.loads(tokenizer.backend_tokenizer.to_str())
    for state_of_last_call in ("padding", "truncation"):
        canonical.pop(state_of_last_call, None)
    return {"tokenizer": digest([_stable(canonical)]), "chat_template": template.digest}


def _identity(
    source: str | Path | PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401
    template: ChatTemplate,
    revision: str | None = None,
) -> dict[str, str]:
    """The fields of a fingerprint that say which model it is."""
    adapters = "none"
    if isinstance(source, str | Path):
        try:
            folder = checkpoint_folder(source, revision)
            config = json.loads((folder / "config.json").read_bytes())
            weights = digest_files(folder)
        except (OSError, ValueError) as error:
            raise _unreadable(source, error) from error
    else:
        base = _causal_lm(source)
        config = json.loads(base.config.to_json_string())
        tensors, added = _split(base)
        weights = digest_tensors(tensors)
        if state := adapter_state(base):
            acting = json.dumps(state, sort_keys=True, default=sorted)
            adapters = digest([acting.encode(), digest_tensors(added).encode()])
    return {
        "weights": weights,
        "adapters": adapters,
        "config": digest([_stable({name: value for name, value in config.items() if name not in _VOLATILE})]),
        **tokenizer_identity(tokenizer, template),
        "rope": _stable(_rope(config)).decode(),
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as a configuration file says it, in the form of transformers 5 whichever release wrote it."""
    older = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    found = older | (config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.pop("type", None)
    return found if kind is None else {"rope_type": kind} | found


def _stable(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _split(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model by name, tied ones once: its own, named as without adapters, and those of adapters."""
    inner = {"base_layer", "original_module"}  # Where peft keeps what it wraps.
    wrapped, found = adapter_state(model), (dict[str, Tensor](), dict[str, Tensor]())
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        if tensor.numel() and (tensor.data_ptr(), tensor.shape) in seen:
            continue
        seen.add((tensor.data_ptr(), tensor.shape))
        parts = name.split(".")
        heads = [index for index in range(len(parts)) if ".".join(parts[:index]) in wrapped]
        added = any(parts[index] not in inner for index in heads)
        kept = parts if added else [part for index, part in enumerate(parts) if index not in heads]
        found[added][".".join(kept)] = tensor
    return found


def _causal_lm(model: Any) -> PreTrainedModel:  # noqa: ANN401
    """The Hugging Face model that `model` is or, as a model of peft, wraps; refuses what no engine can run."""
    for adapter in getattr(model, "peft_config", {}).values() if hasattr(model, "get_base_model") else ():
        if getattr(adapter, "is_prompt_learning", False) or getattr(adapter, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"A {adapter.peft_type} adapter acts on positions of the prompt, so a pack would depend on where it "
                "stands. Use one that acts on weights, such as LoRA."
            )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(
            f"Got a model of type {type(model).__name__}; expected a Hugging Face id, a folder, a causal language "
            "model of transformers, or one of peft around it."
        )
    kind_of(base.config)
    if base.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(base).__name__} gives no logits; load it with `AutoModelForCausalLM`.")
    quantised = next((name for name, part in base.named_modules() if "torch.ao." in type(part).__module__), None)
    if quantised:
        raise UnsupportedModelError(
            f"{quantised} is quantised by torch.ao, which keeps no tensors to tell the model by. Pass the model in "
            "float32 or bfloat16, or a checkpoint that was quantised when it was saved."
        )
    absent = next((name for name, tensor in base.named_parameters() if tensor.is_meta), None)
    if absent or "disk" in (getattr(base, "hf_device_map", None) or {}).values():
        raise ModelError(
            f"Weights of the model are not in memory ({absent or 'on disk'}): `device_map` put them elsewhere. Load it "
            "without `device_map`, on a device that holds it whole."
        )
    return base


def _unreadable(source: str | Path, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return ModelError(
            f"{str(source)!r} can only be loaded by running code that comes with it. Read that code; if you trust it, "
            "pass `trust_remote_code=True`."
        )
    return ModelError(
        f"Could not load {str(source)!r}: {reason} Expected a Hugging Face id of a causal language model, or a folder "
        "with config.json, weights and tokenizer."
    )


def _dtype(name: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"Got dtype={name!r}; expected float32, bfloat16 or float16.")
    return dtype


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        if device.type != "meta":
            torch.empty(1, device=device)
            return device
        reason = "it holds no data"
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
    here = ", ".join(sorted({"cpu", _best_device().type}))
    raise ModelError(f"Got device={str(name)!r}, which cannot be used here: {reason}. This machine has: {here}.")


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32  # noqa: SLF001
