"""all-MiniLM-L6-v2 for one question, in numpy: importing its libraries takes seconds, a search milliseconds.

The oracle is sentence-transformers, which embeds documents (`kp_core.facts.embed`); the vectors agree to 1e-5.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["QuestionEncoder"]

_LAYERS, _HEADS, _EPSILON, _MOST = 6, 12, 1e-12, 256

Array = NDArray[np.float32]


class QuestionEncoder:
    """A BERT encoder with mean pooling, loaded from the model's folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self._weights: dict[str, Array] = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MOST)

    def __call__(self, text: str) -> Array:
        """Return the vector of `text`, shape `(384,)`, of length 1."""
        ids = self._tokenizer.encode(text.strip()).ids
        words, places, types = (
            self._weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        x = self._normed(words[ids] + places[: len(ids)] + types[0], "embeddings")
        for layer in range(_LAYERS):
            name = f"encoder.layer.{layer}"
            x = self._normed(x + self._attended(x, f"{name}.attention"), f"{name}.attention.output")
            inner = _gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._normed(x + self._linear(inner, f"{name}.output.dense"), f"{name}.output")
        pooled: Array = x.mean(axis=0)
        return pooled / np.linalg.norm(pooled)

    def _attended(self, x: Array, name: str) -> Array:
        heads = (
            self._linear(x, f"{name}.self.{part}").reshape(len(x), _HEADS, -1) for part in ("query", "key", "value")
        )
        query, key, value = (head.transpose(1, 0, 2) for head in heads)
        scores = query @ key.transpose(0, 2, 1) / np.float32(math.sqrt(query.shape[-1]))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = shares / shares.sum(axis=-1, keepdims=True) @ value
        return self._linear(mixed.transpose(1, 0, 2).reshape(x.shape), f"{name}.output.dense")

    def _linear(self, x: Array, name: str) -> Array:
        output: Array = x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return output

    def _normed(self, x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(_EPSILON))
        output: Array = scaled * self._weights[f"{name}.LayerNorm.weight"] + self._weights[f"{name}.LayerNorm.bias"]
        return output


def _gelu(x: Array) -> Array:
    """GELU, x Φ(x); the error function is Abramowitz and Stegun 7.1.26 (error 1.5e-7), because numpy has none."""
    z = np.abs(x) / np.float32(math.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    output: Array = (x * (0.5 + 0.5 * np.sign(x) * (1 - series * np.exp(-z * z)))).astype(np.float32)
    return output
