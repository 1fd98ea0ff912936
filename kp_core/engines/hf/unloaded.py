"""What `kp serve` reads from the files of a model that another process loads: its RoPE and its embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from kp_core.engines.hf.identity import checkpoint_folder, load_part
from kp_core.engines.hf.kinds import kind_of
from kp_core.engines.hf.model import CausalModel
from kp_core.errors import ModelError, UnsupportedRequestError
from kp_core.rope import Rope

_INNER = 16  # Inner width of the MLPs of a narrow model (`rope_of`), which does not affect keys.


def rope_of(model: str | Path) -> Rope:
    """The RoPE of a model, measured on a narrow random model of the same architecture.

    The narrow model has the same layers and head width, but two attention heads and narrow MLPs. Raises `ModelError` if
    there is no such model, `UnsupportedRequestError` if its keys cannot be moved, or this cannot be determined.
    """
    config = load_part("AutoConfig", model)
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
        return CausalModel(narrow).rope
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
            empty = AutoModelForCausalLM.from_config(load_part("AutoConfig", model), trust_remote_code=False)
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
