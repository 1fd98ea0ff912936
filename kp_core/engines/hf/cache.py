"""A KV buffer as a cache of transformers, which writes through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


class _Window(_Layer):
    """One layer whose tokens see `window` tokens: all are kept, and those are given that the new ones may see.

    That is what transformers gives from a cache which forgets the others, so masks and sums are the same.
    """

    is_sliding = True

    def __init__(self, layer: BufferLayer, window: int) -> None:
        super().__init__(layer)
        self._window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """See `BufferLayer.update`."""
        start = self._offset()
        keys, values = self._layer.update(key_states, value_states)
        return keys[:, :, start:], values[:, :, start:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        return self._layer.length + query_length - self._offset(), self._offset()

    def _offset(self) -> int:
        return max(self._layer.length + 1 - self._window, 0)


def cache_of(buffer: KVBuffer, windows: Sequence[int | None] = (), *, layers: int | None = None) -> Cache:
    """The cache that reads and writes `buffer`; raises `LayersDone` once the first `layers` layers are written.

    `windows` is that of the model's `CacheKind`; without it, every layer keeps KV and sees all of it.
    """
    if layers is not None:
        return Cache(layers=[_Layer(layer, is_last=at + 1 == layers) for at, layer in enumerate(buffer.layers)])
    if not isinstance(buffer.view, Cache):
        stored = iter(buffer.layers)
        buffer.view = Cache(
            layers=[_cached(stored, window) for window in windows] or [_Layer(layer) for layer in buffer.layers]
        )
    return buffer.view


def _cached(stored: Iterator[BufferLayer], window: int | None) -> CacheLayerMixin:
    if window is None:
        from transformers.cache_utils import DummyLayer  # Before 5.20 there is none, and no model that needs it.

        return DummyLayer()
    return _Window(next(stored), window) if window else _Layer(next(stored))
