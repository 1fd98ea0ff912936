"""Gives composers the model, and the KV before the region that they fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.model import Model
from kp_core.engines.local.scheduler import Scheduler
from kp_core.kv import KVTensors
from kp_core.prompt.prompt import Prompt
from kp_core.rope import Rope

__all__ = ["Computing"]


class Computing:
    """The `Forward` for a region that begins where the filled part of a buffer ends.

    With `may_wait`, `anew` computes nothing. It records in `late` the places in the buffer whose tokens a later pass
    must compute.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        buffer: KVBuffer,
        prompt: Prompt,
        *,
        may_wait: bool = False,
    ) -> None:
        self._model, self._scheduler, self._buffer, self._start = model, scheduler, buffer, buffer.length
        self._ids, self._may_wait = prompt.token_ids, may_wait
        self.late: Sequence[int] = ()
        self.before = buffer.view_of(0, buffer.length) if buffer.length else None
        self.tokens = 0
        """Tokens computed in all layers, including those in `late`."""

    @property
    def rope(self) -> Rope:
        """See `Forward.rope`."""
        return self._model.rope

    def __call__(
        self,
        ids: Sequence[int],
        positions: Sequence[int] | None = None,
        past: KVTensors | None = None,
        past_positions: Sequence[int] | None = None,
    ) -> KVTensors:
        """See `Forward.__call__`."""
        count = 0 if past is None else past.tokens
        positions = range(count, count + len(ids)) if positions is None else positions
        with self._scheduler.prefill(len(ids)):
            kv = self._model.forward_at(
                ids, positions, past, range(count) if past_positions is None else past_positions
            )
        self.tokens += len(ids)
        return kv

    def room(self, tokens: int) -> KVTensors:
        """See `Forward.room`."""
        return self._buffer.view_of(self._start, self._start + tokens)

    def anew(self, kv: KVTensors, places: Sequence[int]) -> KVTensors:
        """See `Forward.anew`."""
        if not places:
            return kv
        places = sorted(self._start + place for place in places)
        with self._holding(kv, len(places)):
            if self._may_wait:
                self.late = places
            else:
                self._model.forward_among([self._ids[at] for at in places], places, self._buffer, places)
        self.tokens += len(places)
        return self._buffer.view_of(self._start, self._start + kv.tokens)

    def weights(self, kv: KVTensors, blank: Sequence[int], layers: int | None = None) -> Tensor:
        """Largest attention weight of the tokens behind the region on each token of its `kv`.

        Tokens at the places `blank` are masked. Returns `(layers, heads, tokens)`, of the first `layers` if given.
        """
        stop, by_layer = self._start + kv.tokens, list[Tensor]()
        positions = range(stop, len(self._ids))
        with self._holding(kv, len(positions)):
            self._model.forward_among(
                self._ids[stop:],
                positions,
                self._buffer,
                positions,
                unseen=[self._start + place for place in blank],
                weights=lambda share: by_layer.append(share[..., self._start : stop].amax(dim=1)),
                layers=layers,
            )
        return torch.stack(by_layer)

    @contextmanager
    def _holding(self, kv: KVTensors, tokens: int) -> Iterator[None]:
        """Hold the model for a pass of `tokens` tokens, with `kv` appended to the buffer; drops `kv` afterwards."""
        self._buffer.append(kv)
        try:
            with self._scheduler.prefill(tokens):
                yield
        finally:
            self._buffer.truncate(self._start)

    def soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """See `Forward.soft`."""
        with self._scheduler.prefill(len(before) + len(ids)):
            kv = self._model.forward_soft(before, header, ids, trailer)
        self.tokens += len(before) + kv.tokens
        return kv
