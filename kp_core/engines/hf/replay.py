"""Decodes by replaying a recorded step: on a GPU one launch for the whole model, where launching kernels one by one
takes longer than computing them.

A recorded step reads and writes the same memory each time. So tokens and positions are in tensors that the host writes
before, keys and values go to the place that the position says, and attention reads a fixed number of keys and masks
those that are not there yet. `captured` records on CUDA. Tests record and replay on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kp_core.engines.hf.attention import Sees
from kp_core.engines.hf.rows import RowsLayer
from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.scheduler import is_out_of_memory

__all__ = ["PLAIN_STEPS", "Record", "ReplayedRows", "captured"]

logger = logging.getLogger(__name__)

Record: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records a step. Returns a function that runs the same calls on the same memory again, and returns the same tensor."""

PLAIN_STEPS = 2
"""Steps before the one that is recorded: they set up what libraries make once, and a short answer needs no recording.
"""
_STRIDE = 1024
"""Keys are read up to a multiple of this; behind it, the step is recorded again."""


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture a step as a CUDA graph. Raises what CUDA raises if the step needs the host, `RuntimeError` most often."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate memory meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class ReplayedRows:
    """Decodes one token of each of `buffers`, as `Rows`, by a step that `record` records.

    A step that cannot be recorded runs plainly, and its reason is logged.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,  # noqa: ANN401
        buffers: Sequence[KVBuffer],
        sees: Sequence[Sees],
        record: Record,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self._model, self._options, self._buffers, self._sees = model, options, tuple(buffers), sees
        self._record: Record | None = record
        self._replay: Callable[[], Tensor] | None = None
        self._device = buffers[0].layers[0].keys.device
        self._ids, self._positions = torch.zeros(2, len(buffers), 1, dtype=torch.long, device=self._device)
        self._stops = [0] * len(buffers)
        """Keys of each buffer that a step reads."""
        self._masks: dict[Sees, list[Tensor]] = {}
        self._cache = Cache(
            layers=[
                RowsLayer(list(layers), (), range(len(buffers)), self._positions)
                for layers in zip(*(buffer.layers for buffer in buffers), strict=True)
            ]
        )
        self._steps = 0

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Run one token behind each buffer and write its KV there; returns the logits, `(rows, vocabulary)`."""
        lengths = [buffer.length for buffer in self._buffers]
        if any(length >= stop for length, stop in zip(lengths, self._stops, strict=True)):
            self._make_room(lengths)
        self._ids.copy_(torch.tensor(tokens)[:, None])
        self._positions.copy_(torch.tensor(lengths)[:, None])
        if self._replay is None and self._record is not None and self._steps >= PLAIN_STEPS:
            try:
                self._replay = self._record(self._compute)
            except Exception as error:  # whatever CUDA or a model raises
                if is_out_of_memory(error):
                    raise
                self._record = None
                logger.warning("Steps of decoding are not recorded: %s", str(error).partition("\n")[0])
        logits = self._compute() if self._replay is None else self._replay()
        self._steps += 1
        for buffer, length in zip(self._buffers, lengths, strict=True):
            buffer.passed(length + 1)
        return logits.clone()

    @property
    def is_recorded(self) -> bool:
        """Whether the next step is a replay, unless it needs more keys."""
        return self._replay is not None

    def _make_room(self, lengths: Sequence[int]) -> None:
        """Let steps read more keys. Those that are not there yet become zero, since a weight of 0 times NaN is NaN."""
        self._replay = None
        for row, (buffer, length) in enumerate(zip(self._buffers, lengths, strict=True)):
            self._stops[row] = stop = min(buffer.capacity, (length // _STRIDE + 1) * _STRIDE)
            for layer in buffer.layers:
                layer.keys[:, :, length:stop] = 0
                layer.values[:, :, length:stop] = 0

    def _compute(self) -> Tensor:
        """One pass. It takes no number from the host that changes between steps."""
        self._masks = {sees: [self._mask(row, sees) for row in range(len(self._stops))] for sees in set(self._sees)}
        output = self._model(
            input_ids=self._ids,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            kp_attend=self._attend,
            **self._options,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _mask(self, row: int, sees: Sees) -> Tensor:
        """Which of its keys a row sees, `(stop,)`."""
        position, keys = self._positions[row], torch.arange(self._stops[row], device=self._device)
        visible: Tensor = keys <= position
        if sees.window:
            is_chunk = sees.is_chunked
            visible &= keys >= (position // sees.window * sees.window if is_chunk else position - sees.window + 1)
        return visible

    def _attend(
        self, layer: int, query: Tensor, _key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of `query`, `(rows, heads, 1, head_dim)`, of each row over its own buffer."""
        if sinks is not None:
            raise ValueError("attention with sinks is not written for recorded steps")
        outputs = []
        for row, buffer in enumerate(self._buffers):
            kv, stop = buffer.layers[layer], self._stops[row]
            kv_heads, share = kv.keys.shape[1], query.shape[1] // kv.keys.shape[1]
            # Query heads of a key head are rows of one matrix: its keys are read once, and not repeated.
            grouped = query[row].reshape(1, kv_heads, share, -1)
            mask = self._masks[self._sees[layer]][row].expand(1, kv_heads, share, stop)
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    grouped, kv.keys[:, :, :stop], kv.values[:, :, :stop], attn_mask=mask, scale=scale
                )
            )
        return torch.cat(outputs).reshape(len(outputs), query.shape[1], 1, value.shape[3])
