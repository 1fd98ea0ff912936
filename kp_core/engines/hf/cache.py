"""A KV buffer as a cache of transformers, which writes through it."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kp_core.engines.local.buffer import BufferLayer, KVBuffer

__all__ = ["LayersDone", "cache_of"]


class LayersDone(Exception):  # noqa: N818 - no error: what was asked for is computed
    """The last layer that was wanted has its keys and values."""


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of a buffer."""

    is_sliding = False

    def __init__(self, layer: BufferLayer, *, is_last: bool = False) -> None:
        super().__init__()
        self._layer, self._is_last = layer, is_last
        self.keys, self.values = layer.keys, layer.values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a buffer is allocated whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """See `BufferLayer.update`."""
        found = self._layer.update(key_states, value_states)
        if self._is_last:
            raise LayersDone
        return found

    def get_seq_length(self) -> int:
        """Tokens filled."""
        return self._layer.length

    def get_max_length(self) -> int:
        """Tokens there is memory for."""
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        return self._layer.length + query_length, 0


def cache_of(buffer: KVBuffer, layers: int | None = None) -> Cache:
    """The cache that reads and writes `buffer`; raises `LayersDone` once the first `layers` layers are written."""
    if layers is not None:
        return Cache(layers=[_Layer(layer, is_last=at + 1 == layers) for at, layer in enumerate(buffer.layers)])
    if not isinstance(buffer.view, Cache):
        buffer.view = Cache(layers=[_Layer(layer) for layer in buffer.layers])
    return buffer.view
