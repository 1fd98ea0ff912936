"""Finding a model and a tokenizer, and telling which they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kp_core.bundled import BUNDLED_MODEL
from kp_core.engines.hf.model import CausalModel, refuse_unsupported, rope_parameters
from kp_core.errors import ModelError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.prompt.template import ChatTemplate

__all__ = ["load", "memory_bytes", "name_of", "take_fingerprint"]


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer on `device` in `dtype`; what cannot be served is refused before its weights are loaded."""
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise ModelError("Got a model object without its tokenizer; pass `tokenizer=` too.")
        if dtype is not None and _dtype(dtype) != model.dtype:
            raise ModelError(f"Got dtype={dtype} for a model object in {model.dtype}; convert it with `model.to`.")
        return (model if device is None else model.to(device)), tokenizer
    where = torch.device(device) if device is not None else _best_device()
    try:
        config = AutoConfig.from_pretrained(model)
        refuse_unsupported(config)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=_dtype(dtype) if dtype else _best_dtype(where))
        found = tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"Could not load {str(model)!r}: {error} Expected a Hugging Face id of a causal language model, or a "
            "folder with config.json, weights and tokenizer."
        ) from error
    return loaded.to(where), found


def name_of(model: str | Path | PreTrainedModel | None) -> str:
    """What people call a model: its id, the last part of its folder, or what its configuration has of either."""
    if isinstance(model, PreTrainedModel):
        return name_of(model.name_or_path or str(model.config.model_type))
    if model is None:
        return BUNDLED_MODEL
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def memory_bytes(device: torch.device) -> int:
    """The memory where `device` keeps its tensors, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def take_fingerprint(model: CausalModel, tokenizer: Any, template: ChatTemplate, chunk_tokens: int) -> ModelFingerprint:  # noqa: ANN401
    """The identity of everything that decides the bits of this model's KV."""
    config = model.config.to_dict()
    # What differs from load to load without changing what is computed.
    for volatile in ("_name_or_path", "architectures", "transformers_version", "dtype", "_attn_implementation"):
        config.pop(volatile, None)
    return ModelFingerprint(
        weights=_digest_tensors(model.parameters()),
        config=_digest([json.dumps(config, sort_keys=True, default=str).encode()]),
        tokenizer=_digest([tokenizer.backend_tokenizer.to_str().encode()]),
        chat_template=template.digest,
        dtype=str(model.shape.dtype).removeprefix("torch."),
        rope=json.dumps(rope_parameters(model.config), sort_keys=True, default=str),
        chunk_tokens=str(chunk_tokens),
    )


def _digest_tensors(tensors: dict[str, Tensor]) -> str:
    def one(name: str) -> bytes:
        tensor = tensors[name].detach().contiguous()
        # numpy knows no bfloat16; bytes are all that is hashed.
        raw = tensor.flatten().view(torch.uint8).cpu().numpy()
        head = f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        return blake2b(head + b"\0" + blake2b(raw.data, digest_size=16).digest(), digest_size=16).digest()

    # hashlib lets go of the interpreter lock while it hashes.
    with ThreadPoolExecutor() as pool:
        return _digest(pool.map(one, sorted(tensors)))


def _digest(parts: Iterable[bytes]) -> str:
    whole = blake2b(digest_size=16)
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def _dtype(name: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"Got dtype={name!r}; expected float32, bfloat16 or float16.")
    return dtype


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
