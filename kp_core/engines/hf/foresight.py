"""Tells from the files of a model what will work with it, without loading it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kp_core.engines.hf.identity import checkpoint_folder, load_part, unreadable
from kp_core.engines.hf.kinds import CacheKind, kind_of, measured_shape, positions_of
from kp_core.engines.hf.loading import best_device, best_dtype
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.local.buffer import default_cache_bytes, memory_bytes
from kp_core.errors import ModelError, UnsupportedModelError, UnsupportedRequestError
from kp_core.rope import Rope

__all__ = ["Foresight", "foresee", "foresee_rope", "token_embeddings"]

logger = logging.getLogger(__name__)

_INNER = 16  # Inner width of the MLPs of a narrow model (`foresee_rope`), which does not affect keys.


@dataclass(frozen=True)
class Foresight:
    """Properties of a model as it would run here, in `dtype`.

    `weight_bytes` is the size of the weights in that dtype, `None` for a quantised checkpoint. `bytes_per_token` is of
    one token's KV, `state_bytes` that of the recurrent states at the end of each pack, `memory` that of the device,
    `cache_bytes` the default budget of KV. `positions` is the length of the context in tokens.
    """

    kind: CacheKind
    dtype: str
    weight_bytes: int | None
    bytes_per_token: int
    state_bytes: int
    memory: int
    cache_bytes: int
    positions: int

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt whose KV fits into memory beside the weights, and into the default KV budget."""
        available = min(self.memory - (self.weight_bytes or 0), self.cache_bytes)
        return max(0, min(self.positions, available // max(1, self.bytes_per_token)))


def foresee(model: str | Path, dtype: str | None = None) -> Foresight:
    """Predict what `load_engine(model, dtype=dtype)` finds. For an id on the hub, only `config.json` is downloaded.

    Raises `UnsupportedModelError`, with the reason, if packs cannot serve the model, `ModelError` if there is no such
    model.
    """
    device = best_device()
    torch_dtype: torch.dtype = getattr(torch, dtype) if dtype else best_dtype(device)
    config = load_part(AutoConfig, model)
    kind, text = kind_of(config), config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise unreadable(model, error) from error
    try:
        shape = measured_shape(empty, kind.windows)
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
        memory=(memory := memory_bytes(device)),
        cache_bytes=default_cache_bytes(device, memory, memory - (0 if is_quantised else weights)),
        positions=positions_of(text),
    )


def foresee_rope(model: str | Path) -> Rope:
    """The RoPE of a model, measured on a narrow random model of the same architecture.

    The narrow model has the same layers and head width, but two attention heads and narrow MLPs. Raises `ModelError` if
    there is no such model, `UnsupportedRequestError` if its keys cannot be moved, or this cannot be determined.
    """
    config = load_part(AutoConfig, model)
    if why := kind_of(config).lacks.get("compose"):
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
        return CausalModel(narrow, keep_attention=True).rope
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        raise UnsupportedRequestError(
            f"How the keys of this model turn cannot be told from its configuration ({type(error).__name__}: {error}). "
            "Use composer='exact'."
        ) from error


def token_embeddings(model: str | Path) -> Callable[[Sequence[int]], Tensor]:
    """A function that reads rows of the input embeddings of `model`, a folder or an id, from its files.

    It takes token ids, and returns `(ids, hidden)` in the dtype of the checkpoint. Raises `UnsupportedRequestError` for
    models whose input embedding is not a row of one table in safetensors.
    """

    def read(ids: Sequence[int]) -> Tensor:
        with safe_open(file, "pt") as opened:
            rows = opened.get_slice(name)
            return torch.cat([rows[token : token + 1] for token in ids])

    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(load_part(AutoConfig, model), trust_remote_code=False)
        table = empty.get_input_embeddings()
        name = next(name for name, parameter in empty.named_parameters() if parameter is table.weight)
        folder = checkpoint_folder(model)
        index = folder / "model.safetensors.index.json"
        files = json.loads(index.read_bytes())["weight_map"] if index.is_file() else {}
        file = folder / files.get(name, "model.safetensors")
        is_plain = type(table) is torch.nn.Embedding and read([0]).shape[1] == table.embedding_dim
    except (ModelError, OSError, ValueError, LookupError, AttributeError, StopIteration, SafetensorError) as error:
        raise UnsupportedRequestError(
            f"The embeddings of {model} cannot be read ({type(error).__name__}: {error}); no soft tokens can stand "
            "beside them."
        ) from error
    if not is_plain:
        raise UnsupportedRequestError(
            f"{model} makes more of a token than a row of its embeddings ({type(table).__name__}), so that no soft "
            "tokens can stand beside it here."
        )
    return read
