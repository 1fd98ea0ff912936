"""Identifies a model by its files or its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from kp_core.engines.hf.checkpoint import (
    checkpoint_folder,
    digest,
    digest_files,
    digest_tensors,
    place_of,
    plain_parts,
    stamp_files,
)
from kp_core.engines.hf.loading import causal_lm, load_tokenizer, unreadable
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.hf.watch import adapter_state
from kp_core.errors import ModelChangedError
from kp_core.packs.fingerprint import NUMERICS, ModelFingerprint
from kp_core.prompt.template import ChatTemplate

__all__ = ["identity_of", "take_fingerprint", "tokenizer_identity"]

_VOLATILE = {
    "_name_or_path",
    "checkpoint_commit",
    "checkpoint_stamp",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Fields of a configuration that differ between loads or releases without changing what is computed."""


def take_fingerprint(
    model: CausalModel,
    tokenizer: Any,  # noqa: ANN401
    template: ChatTemplate,
    source: str | Path | PreTrainedModel,
) -> ModelFingerprint:
    """Identity and numerics of a loaded model; `source` is the model argument of `load`.

    For a folder or an id, the identity is that of `identity_of`. For a model object, it is computed from the tensors in
    memory; both are equal unless transformers renames or splits tensors when it saves them. Raises `ModelChangedError`
    when the files of a folder changed after loading.
    """
    if isinstance(source, str | Path) and stamp_files(Path(source)) != model.config.checkpoint_stamp:
        raise ModelChangedError(f"The files of {str(source)!r} changed after they were loaded. Make a new engine.")
    revision = getattr(model.config, "checkpoint_commit", None)
    numerics = (str(model.shape.dtype).removeprefix("torch."), model.engine, model.passes)
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
    """The identity of a checkpoint from its files alone, for any engine; the numerics are `unknown`.

    `source` is a folder or an id. Weights count as stored: neither their distribution over safetensors files nor the
    dtype in which they are loaded matters. Raises `ModelError`, and `TemplateError` without a chat template.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    identity = _identity(source, tokenizer, ChatTemplate(tokenizer, template_options))
    return ModelFingerprint(**identity, **dict.fromkeys(NUMERICS, "unknown"))


def tokenizer_identity(tokenizer: Any, template: ChatTemplate) -> dict[str, str]:  # noqa: ANN401
    """The fields of a fingerprint that depend on the tokenizer alone."""
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
    """The fields of a fingerprint that identify the model."""
    adapters = "none"
    if isinstance(source, str | Path):
        try:
            folder = checkpoint_folder(source, revision)
            place, file = place_of(folder)
            # A GGUF file contains its configuration.
            config = (
                json.loads(AutoConfig.from_pretrained(place, **file).to_json_string())
                if file
                else json.loads((folder / "config.json").read_bytes())
            )
            weights = digest_files(folder)
        except (OSError, ValueError, ImportError) as error:
            raise unreadable(source, error) from error
    else:
        base = causal_lm(source)
        config = json.loads(base.config.to_json_string())
        tensors, added = _split(base)
        weights = digest_tensors(tensors)
        if state := adapter_state(base):
            adapter_json = json.dumps(state, sort_keys=True, default=sorted)
            adapters = digest([adapter_json.encode(), digest_tensors(added).encode()])
    return {
        "weights": weights,
        "adapters": adapters,
        "config": digest([_stable({name: value for name, value in config.items() if name not in _VOLATILE})]),
        **tokenizer_identity(tokenizer, template),
        "rope": _stable(_rope(config)).decode(),
    }


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
