"""Gives composers the model, and the KV before the region that they fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        self.looked_behind = False
        """Whether the composed KV depends on tokens after the region."""
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
        layers: int | None = None,
    ) -> KVTensors:
        """See `Forward.__call__`."""
        count = 0 if past is None else past.tokens
        places = range(count) if past_positions is None else past_positions
        with self._scheduler.prefill(len(ids)):
            kv = self._model.forward_at(
                ids, range(count, count + len(ids)) if positions is None else positions, past, places, layers=layers
            )
        self.tokens += len(ids) if layers is None else 0
        return kv

    def room(self, tokens: int) -> KVTensors:
        """See `Forward.room`."""
        return self._buffer.view_of(self._start, self._start + tokens)

    def anew(self, kv: KVTensors, places: Sequence[int]) -> KVTensors:
        """See `Forward.anew`."""
        if not places:
            return kv
        places = [self._start + place for place in places]
        with self._holding(kv, len(places)):
            if self._may_wait:
                self.late = places
            else:
                self._model.forward_among([self._ids[at] for at in places], places, self._buffer, places)
        self.tokens += len(places)
        return self._buffer.view_of(self._start, self._start + kv.tokens)

    def attention(self, tokens: int, kv: KVTensors, blank: Sequence[int]) -> Tensor:
        """See `Forward.attention`."""
        self.looked_behind = True
        positions = range(max(self._start + kv.tokens, len(self._ids) - tokens), len(self._ids))
        return self.weights(positions, kv, blank, lambda share: share.sum(dim=(0, 1))).sum(dim=0)

    def weights(
        self,
        positions: range,
        kv: KVTensors,
        blank: Sequence[int],
        reduced: Callable[[Tensor], Tensor],
        layers: int | None = None,
    ) -> Tensor:
        """Attention weights of the tokens at `positions` on the region's `kv`, in all layers or the first `layers`.

        `reduced` is applied to the weights of each layer, `(heads, len(positions), tokens)`; the result has one entry
        for each layer. Tokens at the places `blank` are masked.
        """
        stop, unseen = self._start + kv.tokens, [self._start + place for place in blank]
        ids, places, found = (
            self._ids[positions.start : positions.stop],
            range(stop, stop + len(positions)),
            list[Tensor](),
        )
        with self._holding(kv, len(ids)):
            self._model.forward_among(
                ids,
                positions,
                self._buffer,
                places,
                unseen=unseen,
                weights=lambda share: found.append(reduced(share[..., self._start : stop])),
                layers=layers,
            )
        self.tokens += len(ids)
        return torch.stack(found)

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
