"""Replays recorded passes: of decoding, and over short questions.

On a GPU, launching the kernels of a short pass takes longer than computing them, so a recorded pass is replayed by one
launch. It reads and writes the same memory each time: tokens and positions are in tensors that the host writes before,
keys and values go to the places that the positions say, and attention reads whole buffers and masks what is not there
yet. `capturing` records on CUDA. Tests record and replay on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from itertools import chain
from typing import TypeAlias
from weakref import finalize

import torch
from torch import Tensor

from kp_core.engines.hf.attention import Sees, bias_of, by_products
from kp_core.engines.hf.kinds import Network
from kp_core.engines.hf.rows import cache_of_rows
from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.scheduler import is_out_of_memory
from kp_core.memory import without_collection

logger = logging.getLogger(__name__)

Record: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records a pass. Returns a function that runs the same calls on the same memory again, and returns the same tensor."""

PLAIN_PASSES = 2
"""A pass is recorded behind so many that ran plainly, since recording takes as long as a pass, and some run once."""
_NARROWEST, _WIDEST = 32, 128
"""Tokens of the recorded passes over a question: a power of two between these. Longer passes keep a GPU busy."""
_MOST_TOGETHER = 32  # Groups of answers whose steps are kept. Each takes some megabytes.


class Replays:
    """The passes of a model that `record` recorded, each kept as long as its buffers."""

    def __init__(self, model: Network, record: Record) -> None:
        self._model, self.record = model, record
        self._together: dict[tuple[int, ...], ReplayedRows] = {}
        """Steps of several answers, by the ids of their buffers. The least recently used are first."""

    def alone(self, buffer: KVBuffer, tokens: int) -> ReplayedRows | None:
        """The pass over `tokens` new tokens of `buffer`, which keeps it; `None` for more tokens than are recorded."""
        if tokens > _WIDEST:
            return None
        width = 1 if tokens == 1 else max(_NARROWEST, 1 << (tokens - 1).bit_length())
        kept = buffer.recorded.get(width)
        if not isinstance(kept, ReplayedRows):
            kept = buffer.recorded[width] = ReplayedRows(self._model, [buffer], self.record, width)
        return kept

    def rows(self, buffers: Sequence[KVBuffer]) -> Callable[[Sequence[int]], Tensor]:
        """See `Model.rows`."""
        # Later answers get the same buffers in another order.
        order = sorted(range(len(buffers)), key=lambda at: id(buffers[at]))
        ordered, places = [buffers[at] for at in order], [order.index(at) for at in range(len(order))]
        replayed = self._grouped(ordered)
        return lambda tokens: replayed.step(ordered, [[tokens[at]] for at in order])[places]

    def _grouped(self, buffers: Sequence[KVBuffer]) -> ReplayedRows:
        names = tuple(map(id, buffers))
        replayed = self._together.pop(names, None)
        if replayed is None:
            replayed = ReplayedRows(self._model, buffers, self.record)
            for buffer in buffers:
                finalize(buffer, self._forget, id(buffer))
        self._together[names] = replayed
        for oldest in [*self._together][:-_MOST_TOGETHER]:
            del self._together[oldest]
        return replayed

    def _forget(self, buffer: int) -> None:
        """Drop the steps over a buffer, by its id, when it is freed."""
        for names in [*self._together]:
            if buffer in names:
                self._together.pop(names, None)


class ReplayedRows:
    """Runs up to `width` new tokens behind each of some buffers, by a pass that `record` records, if given.

    A row with fewer tokens repeats its last one, at the same place. A pass reads all that the buffers have room for,
    and is recorded once for them. It does not hold the buffers, which may hold it (`KVBuffer.recorded`). A pass that
    cannot be recorded runs plainly, and its reason is logged.
    """

    @torch.inference_mode()
    def __init__(self, model: Network, buffers: Sequence[KVBuffer], record: Record | None, width: int = 1) -> None:
        self._model, self._sees, self._width = model, model.sees, width
        self._layers = [buffer.layers for buffer in buffers]
        self._record = record
        self.replay: Callable[[], Tensor] | None = None
        """The recorded pass."""
        self._inputs = torch.zeros(2, len(buffers), width, dtype=torch.long, device=buffers[0].layers[0].keys.device)
        self._ids, self._positions = self._inputs
        self._biases: dict[Sees, list[Tensor]] = {}
        """The mask of the new tokens of each row over all its buffer has room for, `(width, capacity)`."""
        self._cache = cache_of_rows(buffers)
        self._passes = 0
        # A step of decoding never finds KV on its way.
        self._gates = _gates(self._inputs.device, len(self._sees)) if width > 1 and len(buffers) == 1 else []
        """Per layer, an event that a pass waits for, so that it can begin before the KV of all layers has arrived."""

    @torch.inference_mode()
    def step(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run `tokens` behind each buffer and write their KV there; returns the last logits, `(rows, vocabulary)`."""
        ids, places = [], []
        for buffer, row in zip(buffers, tokens, strict=True):
            buffer.blank(buffer.length + len(row), buffer.capacity)
            missing = self._width - len(row)
            ids.append([*row, *[row[-1]] * missing])
            places.append([*range(buffer.length, buffer.length + len(row)), *[buffer.length + len(row) - 1] * missing])
        self._inputs.copy_(torch.tensor([ids, places]))
        self._await()
        if self.replay is not None:
            logits = self.replay().clone()
        else:
            logits = self._compute().clone()
            self._passes += 1
            if self._record is not None and self._passes >= PLAIN_PASSES:
                self._keep(self._record)
        for buffer, row in zip(buffers, tokens, strict=True):
            buffer.passed(buffer.length + len(row))
        return logits

    def _await(self) -> None:
        """Let the pass wait for KV that is on its way from the host."""
        arriving = [layer for layer in chain(*self._layers) if layer.arrivals]
        if not arriving or not self._gates:
            for layer in arriving:
                layer.arrive()
            return
        torch.cuda.current_stream().synchronize()  # No pass still waits for these events.
        with torch.cuda.stream(_relay(self._inputs.device)):
            for layer, gate in zip(self._layers[0], self._gates, strict=True):
                layer.arrive()
                gate.record()

    def _keep(self, record: Record) -> None:
        """Record the pass, right behind a plain one of this thread, for which libraries prepared what they need."""
        try:
            # A collection may free another recorded pass, and CUDA then ends the recording.
            with without_collection():
                self.replay = record(self._compute)
        except Exception as error:  # whatever CUDA or a model raises
            if is_out_of_memory(error):
                raise
            self._record = None
            logger.warning("Passes are not recorded: %s", str(error).partition("\n")[0])

    def _compute(self) -> Tensor:
        """One pass. It takes no number from the host that changes between passes."""
        places = [torch.arange(layers[0].memory[0].shape[2], device=self._inputs.device) for layers in self._layers]
        self._biases = {
            sees: [
                bias_of(sees.visible(row[:, None], keys), torch.float32)
                for row, keys in zip(self._positions, places, strict=True)
            ]
            for sees in set(self._sees)
        }
        output = self._model.network(
            input_ids=self._ids,
            position_ids=self._positions,
            use_cache=True,
            kp_attend=self._attend,
            **{self._model.takes_cache: self._cache},
            **self._model.keep(1),
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _attend(  # noqa: PLR0913
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of `query`, `(rows, heads, width, head_dim)`, of each row over its own buffer; writes its KV."""
        biases = self._biases[self._sees[layer]]
        for row, layers in enumerate(self._layers):
            layers[layer].put(key[row : row + 1], value[row : row + 1], self._positions[row])
        if self._gates:
            self._gates[layer].wait()
        outputs = [
            by_products(query[row : row + 1], *layers[layer].memory, biases[row], scale, sinks)
            for row, layers in enumerate(self._layers)
        ]
        return torch.cat(outputs)


def capturing(device: torch.device) -> Record:
    """Captures passes as CUDA graphs, which share their memory: only one pass runs at a time.

    It raises what CUDA raises if a pass needs the host, `RuntimeError` most often.
    """
    first = torch.cuda.CUDAGraph()  # While there is one graph, its pool of memory stays.
    with torch.cuda.graph(first):
        torch.zeros(1, device=device)

    def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=first.pool(), capture_error_mode="thread_local"):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return captured


@cache
def _relay(device: torch.device) -> torch.cuda.Stream:
    """A stream that waits for copies, and tells the events of a recorded pass, which cannot wait for copies itself."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _gates(device: torch.device, layers: int) -> list[torch.cuda.Event]:
    """Events that a recorded pass waits for whenever it is replayed; none without CUDA, or with an older torch."""
    if device.type != "cuda" or "external" not in signature(torch.cuda.Event.__new__).parameters:
        return []
    events = [
        torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        for _ in range(layers)
    ]
    for event in events:
        event.record()
    return events
