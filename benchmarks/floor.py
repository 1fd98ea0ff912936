"""The least that any engine can take for a first token: one pass of the suffix over a cache that holds the rest."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

__all__ = ["Floor"]


class _ResidentLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is untyped
    """A preallocated cache layer that can be set back to its first `kept` tokens at no cost.

    With a `window`, it gives what the cache of transformers would have kept.
    """

    def __init__(self, capacity: int, window: int = 0) -> None:
        super().__init__()
        self.capacity, self.filled, self.window, self.is_sliding = capacity, 0, window, bool(window)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.zeros(*states.shape[:2], self.capacity, states.shape[3], dtype=states.dtype, device=states.device)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen, start = self._offset(), self.filled
        self.filled += key_states.shape[2]
        self.keys[:, :, start : self.filled] = key_states
        self.values[:, :, start : self.filled] = value_states
        return self.keys[:, :, seen : self.filled], self.values[:, :, seen : self.filled]

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length - self._offset(), self._offset()

    def _offset(self) -> int:
        return max(self.filled + 1 - self.window, 0) if self.window else 0


class Floor:
    """The suffix over a resident cache, and nothing else."""

    def __init__(self, model: PreTrainedModel, prefix: Sequence[int], room: int, chunk_tokens: int = 512) -> None:
        self._model, self._kept = model, len(prefix)
        windows = (getattr(layer, "sliding_window", 0) for layer in DynamicCache(config=model.config).layers)
        self._layers = [_ResidentLayer(len(prefix) + room, window) for window in windows]
        self._cache = Cache(layers=list(self._layers))
        for start in range(0, len(prefix), chunk_tokens):
            self._forward(prefix[start : start + chunk_tokens])

    @torch.inference_mode()
    def first_token(self, suffix: Sequence[int]) -> tuple[int, float]:
        """The token behind prefix and suffix, and the seconds it took."""
        for layer in self._layers:
            layer.filled = self._kept
        began = time.perf_counter()
        token = self._forward(suffix)
        return token, time.perf_counter() - began

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int]) -> int:
        batch = torch.tensor([list(ids)], device=self._model.device)
        output = self._model(input_ids=batch, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())
