"""Reads input embeddings from a checkpoint, without the rest of its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kp_core.engines.hf.identity import checkpoint_folder, place_of
from kp_core.errors import UnsupportedRequestError

__all__ = ["TokenEmbeddings"]

_INDEX = "model.safetensors.index.json"


class TokenEmbeddings:
    """Reads rows of the input embeddings of `model`, a folder or an id, on demand.

    Raises `UnsupportedRequestError` for models whose input embedding is not a row of one table in safetensors.
    """

    def __init__(self, model: str | Path) -> None:
        place, file = place_of(model)
        try:
            config = AutoConfig.from_pretrained(place, **file, trust_remote_code=False)
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            table = empty.get_input_embeddings()
            self._name = next(name for name, parameter in empty.named_parameters() if parameter is table.weight)
            folder = checkpoint_folder(model)
            index = folder / _INDEX
            files = json.loads(index.read_bytes())["weight_map"] if index.is_file() else {}
            self._file = folder / files.get(self._name, "model.safetensors")
            is_plain = type(table) is torch.nn.Embedding and self([0]).shape[1] == table.embedding_dim
        except (OSError, ValueError, LookupError, AttributeError, StopIteration, SafetensorError) as error:
            raise UnsupportedRequestError(
                f"The embeddings of {model} cannot be read ({type(error).__name__}: {error}); no soft tokens can stand "
                "beside them."
            ) from error
        if not is_plain:
            raise UnsupportedRequestError(
                f"{model} makes more of a token than a row of its embeddings ({type(table).__name__}), so that no soft "
                "tokens can stand beside it here."
            )

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """The embeddings of `ids`, `(len(ids), hidden)`, in the dtype of the checkpoint."""
        with safe_open(self._file, "pt") as opened:
            rows = opened.get_slice(self._name)
            return torch.cat([rows[token : token + 1] for token in ids])
