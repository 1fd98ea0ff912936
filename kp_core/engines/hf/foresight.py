"""Predicts from a model's configuration what will work with it. No weights are downloaded or read."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kp_core.engines.hf.identity import place_of, unreadable
from kp_core.engines.hf.kinds import CacheKind, kind_of, measured_shape, positions_of, rope_parameters
from kp_core.engines.hf.loading import KV_SHARE, _best_device, _best_dtype, memory_bytes
from kp_core.engines.hf.model import rope_of
from kp_core.engines.local.buffer import CacheShape
from kp_core.errors import UnsupportedModelError, UnsupportedRequestError
from kp_core.rope import Rope

__all__ = ["Foresight", "foresee", "foresee_rope"]

logger = logging.getLogger(__name__)

_PROBE = 8
_INNER = 16  # Inner width of the narrow model's MLPs, which does not affect keys.


@dataclass(frozen=True)
class Foresight:
    """Properties of a model as it would run here, in `dtype`.

    `weight_bytes` is the size of the weights in that dtype, `None` for a quantised checkpoint. `bytes_per_token` is the
    size of one token's KV, `state_bytes` that of the recurrent states stored once at the end of each pack. `memory` is
    the device's memory in bytes, `positions` the length of the model's context in tokens.
    """

    kind: CacheKind
    dtype: str
    weight_bytes: int | None
    bytes_per_token: int
    state_bytes: int
    memory: int
    positions: int

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt whose KV fits into memory beside the weights, and into the default KV budget."""
        available = min(self.memory - (self.weight_bytes or 0), self.memory // KV_SHARE)
        return max(0, min(self.positions, available // max(1, self.bytes_per_token)))


def foresee(model: str | Path, dtype: str | None = None) -> Foresight:
    """Predict what `load_engine(model, dtype=dtype)` finds. For an id on the hub, only `config.json` is downloaded.

    Raises `UnsupportedModelError`, with the reason, if packs cannot serve the model, `ModelError` if there is no such
    model.
    """
    device = _best_device()
    torch_dtype: torch.dtype = getattr(torch, dtype) if dtype else _best_dtype(device)
    config = _config_of(model)
    kind, text = kind_of(config), config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise unreadable(model, error) from error
    try:
        shape = _shape_of(empty, kind)
        per_token, states = shape.bytes_per_token, shape.state_bytes
    except (RuntimeError, NotImplementedError, UnsupportedModelError) as error:
        # A mixture of experts chooses experts by values, which the meta device does not have.
        logger.debug("%s gives no shapes: %s", config.model_type, error)
        layers = len(kind.windows) - kind.windows.count(None)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = 2 * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        if kind.is_latent:
            heads, width = 1, text.kv_lora_rank + text.qk_rope_head_dim
        per_token, states = layers * heads * width * torch_dtype.itemsize, 0
    is_quantised = getattr(config, "quantization_config", None) is not None
    weights = sum(parameter.numel() * parameter.element_size() for parameter in set(empty.parameters()))
    return Foresight(
        kind=kind,
        dtype=str(torch_dtype).removeprefix("torch."),
        weight_bytes=None if is_quantised else weights,
        bytes_per_token=per_token,
        state_bytes=states,
        memory=memory_bytes(device),
        positions=positions_of(text),
    )


def foresee_rope(model: str | Path) -> Rope:
    """The RoPE of a model, measured on a narrow random model of the same architecture.

    The narrow model has the same layers and head width, but two attention heads and narrow MLPs. Raises `ModelError` if
    there is no such model, `UnsupportedRequestError` if its keys cannot be moved, or this cannot be determined.
    """
    config = _config_of(model)
    kind = kind_of(config)
    if why := kind.lacks.get("compose"):
        raise UnsupportedRequestError(f"Tokens of this model stay where they were computed: {why}.")
    try:
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        shared = getattr(text, "num_key_value_heads", None) not in (None, heads)
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1 if shared else 2, "hidden_size": 2 * width}
        sizes |= dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), _INNER)
        for name, size in sizes.items():
            if isinstance(getattr(text, name, None), int):
                setattr(text, name, size)
        narrow = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        return rope_of(narrow.base_model, _shape_of(narrow, kind), rope_parameters(text))
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        raise UnsupportedRequestError(
            f"How the keys of this model turn cannot be told from its configuration ({type(error).__name__}: {error}). "
            "Use composer='exact'."
        ) from error


def _config_of(model: str | Path) -> Any:  # noqa: ANN401
    place, file = place_of(model)
    try:
        return AutoConfig.from_pretrained(place, **file, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise unreadable(model, error) from error


def _shape_of(model: Any, kind: CacheKind) -> CacheShape:  # noqa: ANN401
    parameters = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in parameters else "past_key_values"
    return measured_shape(model, kind.windows, _PROBE, name)
