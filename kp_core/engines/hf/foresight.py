"""Predicts from a model's configuration what will work with it. No weights are downloaded or read."""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kp_core.engines.hf.cache import measured_shape, states_of
from kp_core.engines.hf.checkpoint import place_of
from kp_core.engines.hf.kinds import CacheKind, kind_of, rope_parameters
from kp_core.engines.hf.loading import KV_SHARE, _best_device, _best_dtype, memory_bytes, unreadable
from kp_core.engines.hf.placed import rope_of
from kp_core.errors import UnsupportedRequestError
from kp_core.rope import Rope

__all__ = ["Foresight", "foresee", "foresee_rope"]

logger = logging.getLogger(__name__)

_PROBE, _DIMENSIONS = 8, 4
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
    try:
        place, file = place_of(model)
        config = AutoConfig.from_pretrained(place, **file, trust_remote_code=False)
        kind = kind_of(config)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise unreadable(model, error) from error
    text = config.get_text_config(decoder=True)
    per_token, states = _cache_numbers(empty, config)
    is_quantised = getattr(config, "quantization_config", None) is not None
    weights = (
        None
        if is_quantised
        else sum(parameter.numel() * parameter.element_size() for parameter in set(empty.parameters()))
    )
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2**31 - 1
    rope = rope_parameters(text)
    if rope.get("rope_type") == "longrope":
        positions = rope.get("original_max_position_embeddings") or positions
    name, size = str(torch_dtype).removeprefix("torch."), torch_dtype.itemsize
    return Foresight(kind, name, weights, per_token * size, states, memory_bytes(device), int(positions))


def foresee_rope(model: str | Path) -> Rope:
    """The RoPE of a model, measured on a narrow random model of the same architecture.

    The narrow model has the same layers and head width, but two attention heads and narrow MLPs. Raises `ModelError` if
    there is no such model, `UnsupportedRequestError` if its keys cannot be moved, or this cannot be determined.
    """
    try:
        place, file = place_of(model)
        config = AutoConfig.from_pretrained(place, **file, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise unreadable(model, error) from error
    return _narrow_rope(config)


def _narrow_rope(config: Any) -> Rope:  # noqa: ANN401
    """See `foresee_rope`."""
    kind = kind_of(config)
    if why := kind.lacks.get("compose"):
        raise UnsupportedRequestError(f"Tokens of this model stay where they were computed: {why}.")
    try:
        config = copy.deepcopy(config)
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
        parameters = inspect.signature(narrow.forward).parameters
        shape = measured_shape(
            narrow, kind.windows, _PROBE, "cache_params" if "cache_params" in parameters else "past_key_values"
        )
        return rope_of(narrow.base_model, shape, rope_parameters(text))
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        raise UnsupportedRequestError(
            f"How the keys of this model turn cannot be told from its configuration ({type(error).__name__}: {error}). "
            "Use composer='exact'."
        ) from error


def _cache_numbers(empty: Any, config: Any) -> tuple[int, int]:  # noqa: ANN401
    """Elements in the cache per token, and bytes of states: by a pass on the meta device, else by the configuration."""
    cache = DynamicCache(config=config)
    try:
        with torch.inference_mode():
            ids = torch.zeros(1, _PROBE, dtype=torch.long, device="meta")
            cache_name = (
                "cache_params" if "cache_params" in inspect.signature(empty.forward).parameters else "past_key_values"
            )
            empty(input_ids=ids, **{cache_name: cache}, use_cache=True)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError, LookupError) as error:
        # A mixture of experts chooses experts by values, which the meta device does not have.
        logger.debug("%s gives no shapes: %s", config.model_type, error)
        return _by_config(config, sum(type(layer).__name__ != "DummyLayer" for layer in cache.layers)), 0
    cached = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    tensors = [tensor for tensor in cached if isinstance(tensor, Tensor) and tensor.dim() == _DIMENSIONS]
    states = sum(prod(state.shape) * state.dtype.itemsize for state in states_of(cache))
    return sum(tensor.numel() // max(1, tensor.shape[2]) for tensor in tensors), states


def _by_config(config: Any, layers: int) -> int:  # noqa: ANN401
    text = config.get_text_config(decoder=True)
    if rank := getattr(text, "kv_lora_rank", None):
        return int(layers * (rank + text.qk_rope_head_dim))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(layers * heads * width * 2)
