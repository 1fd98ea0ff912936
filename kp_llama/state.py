"""Reads and writes the state of a sequence as llama.cpp lays it out, so that any of its tokens can be taken out.

All numbers are little-endian. The state begins with `_HEAD`. For each cell, `_CELL` follows, in the order of cells in
memory, which need not be that of positions. After `_LAYERS` come the keys of each layer, then the values of each layer:
`_ROWS`, and a row per cell. This holds with flash attention; without it, values are transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kp_core import KVTensors
from kp_core.engines.local.buffer import CacheShape
from kp_core.errors import ModelError, PackError

BUILDS = ("0.3.36",)
"""Releases of llama-cpp-python with this layout."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""The number of each dtype of the cache in ggml."""

_HEAD = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_LAYERS = np.dtype([("transposed", "<u4"), ("layers", "<u4")])
_ROWS = np.dtype([("type", "<i4"), ("bytes", "<u8")])
_MAGIC = 0xAF143CD8


def measured_shape(state: np.ndarray, dtype: torch.dtype, key_dim: int, value_dim: int) -> CacheShape:
    """The shape of the cache in `state`, the first one of a model, with heads of these dimensions.

    Raises `ModelError` if it is laid out in another way.
    """
    at = _HEAD.itemsize + _CELL.itemsize * _cells(state)
    (count,) = _numbers(state, _LAYERS, at)["layers"].tolist()
    at, widths = at + _LAYERS.itemsize, list[int]()
    while at < len(state) and len(widths) < 2 * count:
        widths.append(int(_numbers(state, _ROWS, at)["bytes"][0]) // dtype.itemsize)
        at += _ROWS.itemsize + widths[-1] * dtype.itemsize * _cells(state)
    layers = tuple((width // key_dim, key_dim, value_dim) for width in widths[:count])
    if widths != [heads * dims[side] for side in (0, 1) for heads, *dims in layers]:
        raise _unknown(f"rows of {widths} numbers")
    shape = CacheShape(layers, dtype, torch.device("cpu"))
    read_state(shape, state)
    return shape


def state_size(shape: CacheShape, tokens: int) -> int:
    """Bytes of the state of so many tokens."""
    rows = 2 * len(shape.layers) * _ROWS.itemsize
    return _HEAD.itemsize + _LAYERS.itemsize + rows + (_CELL.itemsize + shape.bytes_per_token) * tokens


def read_state(shape: CacheShape, state: np.ndarray) -> KVTensors:
    """The KV in `state`, bytes of `(size,)`, by position. Its tensors are views of `state` if cells are in order.

    Raises `ModelError` for a state of another layout, and for positions that do not follow one another.
    """
    tokens = _cells(state)
    if len(state) != state_size(shape, tokens):
        raise _unknown(f"{len(state):,} bytes for {tokens:,} tokens, instead of {state_size(shape, tokens):,}")
    cells = _numbers(state, _CELL, _HEAD.itemsize, tokens)
    order = np.argsort(cells["position"], kind="stable")
    positions = cells["position"][order]
    if (cells["sequences"] != 1).any() or (np.diff(positions) != 1).any():
        raise _unknown("cells of several sequences, or positions with gaps")
    layers = _numbers(state, _LAYERS, _HEAD.itemsize + cells.nbytes)
    if layers.tolist() != [(0, len(shape.layers))]:
        raise _unknown(f"(transposed, layers) = {layers.tolist()}")
    index = None if (np.diff(order) == 1).all() else torch.from_numpy(order)
    tensors = list[Tensor]()
    for head, rows in _sides(shape, state, tokens):
        size = rows.shape[1] * rows.shape[2] * shape.dtype.itemsize
        if head.tolist() != [(TYPES[shape.dtype], size)]:
            raise _unknown(f"(type, bytes of a row) = {head.tolist()}")
        tensors.append((rows if index is None else rows[index]).transpose(0, 1))
    count = len(shape.layers)
    return KVTensors(tuple(tensors[:count]), tuple(tensors[count:]))


def write_state(shape: CacheShape, kv: KVTensors, start: int, state: np.ndarray) -> None:
    """Write the state of a sequence that has only `kv`, at the positions from `start` on: bytes, `(size,)`.

    Raises `PackError` for KV of another shape.
    """
    if not shape.fits(replace(kv, states=())):
        raise PackError(f"Got KV of {kv.layers} layers, {kv.dtype}; expected that of this model.")
    _numbers(state, _HEAD, 0)[:] = (_MAGIC, 0, 1, kv.tokens)
    cells = _numbers(state, _CELL, _HEAD.itemsize, kv.tokens)
    cells["position"], cells["sequences"], cells["sequence"] = np.arange(start, start + kv.tokens), 1, 0
    _numbers(state, _LAYERS, _HEAD.itemsize + cells.nbytes)[:] = (0, len(shape.layers))
    for (head, rows), tensor in zip(_sides(shape, state, kv.tokens), chain(kv.keys, kv.values), strict=True):
        head[:] = TYPES[shape.dtype], rows.shape[1] * rows.shape[2] * shape.dtype.itemsize
        rows.copy_(tensor.transpose(0, 1))


def _sides(shape: CacheShape, state: np.ndarray, tokens: int) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Views of `state`: `_ROWS` and the rows, `(tokens, heads, dim)`, of the keys and then the values of each layer."""
    offset = _HEAD.itemsize + _CELL.itemsize * tokens + _LAYERS.itemsize
    for heads, dim in [(layer[0], layer[side]) for side in (1, 2) for layer in shape.layers]:
        head, offset = _numbers(state, _ROWS, offset), offset + _ROWS.itemsize
        count = tokens * heads * dim
        rows = torch.frombuffer(state, dtype=shape.dtype, count=count, offset=offset).view(tokens, heads, dim)
        yield head, rows
        offset += count * shape.dtype.itemsize


def _cells(state: np.ndarray) -> int:
    """The number of cells in `state`. Raises `ModelError` if it does not begin as a state does."""
    magic, _, streams, cells = _numbers(state, _HEAD, 0)[0].tolist()
    if (magic, streams) != (_MAGIC, 1) or cells * _CELL.itemsize > len(state):
        raise _unknown(f"(magic, streams, cells) = {magic:#x}, {streams}, {cells}")
    return int(cells)


def _numbers(state: np.ndarray, dtype: np.dtype, offset: int, count: int = 1) -> np.ndarray:
    """A view of `count` records of `state`. Raises `ModelError` if it ends before."""
    if offset + count * dtype.itemsize > len(state):
        raise _unknown(f"{len(state):,} bytes")
    return np.frombuffer(state, dtype, count, offset)


def _unknown(found: str) -> ModelError:
    return ModelError(
        f"llama.cpp gave a state with {found}. Only the layout of llama-cpp-python {', '.join(BUILDS)} is known, for "
        "models with plain attention."
    )
