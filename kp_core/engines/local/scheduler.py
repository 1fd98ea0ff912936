"""Who computes next on one model: decoding steps and short questions together, prefill in turns with them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.model import LocalModel
from kp_core.engines.local.openmp import let_go

__all__ = ["Decoding", "Scheduler"]

_MOST_ROWS = 16
_INTERRUPTED = "The step was interrupted in the thread that computed it for several answers. Ask again."
_PATIENCE = 0.5
"""How long a step waits for those that were decoded together with it before, as a share of what that step took."""
_SHORT = 64  # Most tokens of a question that is computed with others, or of a pass that several prompts may have.
_MOST_TOKENS = 512  # Of a pass for several.
_BURST, _GRACE = 0.5, 0.1  # Seconds for which they may, and in which the next of them has to come.


@dataclass(eq=False)
class Decoding:
    """One answer that is being decoded behind what its buffer holds."""

    buffer: KVBuffer
    number: int = field(default_factory=itertools.count().__next__)
    tokens: Sequence[int] = ()
    logits: Tensor | None = None
    error: BaseException | None = None


class Scheduler:
    """Gives the model to one forward pass at a time.

    Decoding steps that wait together are one pass; a step waits a moment for those that were in the pass before with
    it, so that answers which began at different times fall into step. A question that ends a prompt is a step of
    several tokens. No thread is needed: of those that wait, one computes for all. A reader that does not ask for its
    next token holds nobody up. Where both wait, prefill and decoding take turns, a pass and a step; prompts that come
    together are brought in before a step, which is then one for all of them.
    """

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._changed = threading.Condition()
        self._is_busy, self._prefilling, self._coming, self._is_in_vain = False, 0, 0, False
        self._turn = math.inf  # When steps have theirs before prefill; nobody knows until a prompt had one.
        self._waiting: list[Decoding] = []
        self._took = self._freed = self._came = 0.0
        self._together: set[Decoding] = set()
        self._rows: tuple[list[Decoding], Callable[[Sequence[int]], Tensor]] | None = None

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Steps may wait a moment for a prompt, which is brought in meanwhile."""
        with self._changed:
            self._coming += 1
        try:
            yield
        finally:
            with self._changed:
                self._coming -= 1
                self._changed.notify_all()

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """The model, for one pass over a prompt, of so many tokens."""
        with self._changed:
            self._prefilling += 1
            try:
                self._changed.wait_for(
                    lambda: not self._is_busy and not (self._waiting and self._turn < time.monotonic())
                )
            finally:
                self._prefilling -= 1
            if not self._waiting or self._turn == math.inf:
                self._turn = time.monotonic() + _BURST
            self._is_busy, self._is_in_vain = True, False
        try:
            yield
        finally:
            self._free(self._turn if tokens <= _SHORT else -math.inf)

    def may_join(self, tokens: int) -> bool:
        """Whether a question of so many tokens, for a prompt that is `coming`, may find others to be computed with."""
        with self._changed:
            others = self._coming > 1 or self._is_busy or self._waiting or self._together
            return bool(others and tokens <= _SHORT and self._model.batches)

    def leave(self, decoding: Decoding) -> None:
        """An answer is complete: nobody waits for it any more."""
        with self._changed:
            self._together.discard(decoding)
            if self._rows is not None and decoding in self._rows[0]:
                self._rows = None
            self._changed.notify_all()

    def step(self, decoding: Decoding, *tokens: int) -> Tensor:
        """Compute `tokens` behind the buffer, one or a question; the logits behind the last, `(vocabulary,)`."""
        decoding.tokens, decoding.logits, decoding.error = tokens, None, None
        if len(self._together) > 1 or self._coming or self._waiting:
            let_go()  # Choosing the token has taken threads, too.
        came = time.monotonic()
        with self._changed:
            self._waiting.append(decoding)
            if len(tokens) > 1:  # The next one may be as near.
                self._came, self._is_in_vain, self._turn = came, False, min(self._turn, came + _BURST)
            self._changed.notify_all()
            try:
                while (batch := self._due(decoding, came)) is None:
                    if decoding.logits is not None or decoding.error is not None:
                        break
                    until = max(self._until(came), self._grace if self._coming else 0.0)
                    self._changed.wait(None if self._is_busy else max(until - time.monotonic(), 0.0005))
            except BaseException:  # Ctrl-C while it waits.
                if decoding in self._waiting:
                    self._waiting.remove(decoding)
                else:  # Another thread is writing to its buffer.
                    self._changed.wait_for(lambda: decoding.logits is not None or decoding.error is not None)
                self._together.discard(decoding)
                raise
        if batch is not None:
            self._compute(batch)
        if decoding.error is not None:
            raise decoding.error
        if decoding.logits is None:
            raise AssertionError("a step that was computed has logits")
        return decoding.logits

    def _until(self, came: float) -> float:
        """When a step that `came` then waits for others no longer, if the model is free: they were busy until then."""
        return max(came, self._freed) + _PATIENCE * self._took

    @property
    def _grace(self) -> float:
        """Until when a prompt that is coming may still come, for steps to wait for it."""
        return max(self._freed, self._came) + _GRACE

    def _is_for_prefill(self) -> bool:
        """Whether a prompt has the turn, and waits for it or will in a moment."""
        now = time.monotonic()
        is_due = self._coming and not self._is_in_vain and now < self._grace
        return bool(self._prefilling or is_due) and now < self._turn

    def _due(self, decoding: Decoding, came: float) -> list[Decoding] | None:
        """What to compute now, if it is for this step to do so: it is taken from what waits, and the model is taken."""
        if self._is_busy or decoding not in self._waiting or self._is_for_prefill():
            return None
        batch = [decoding]
        if (len(self._waiting) > 1 or self._together - {decoding}) and self._model.batches:
            if not self._together <= {*self._waiting} and time.monotonic() < self._until(came):
                return None
            room = _MOST_TOKENS - len(decoding.tokens)
            for other in self._waiting:
                if other is not decoding and len(other.tokens) <= room:
                    room -= len(other.tokens)
                    batch.append(other)
            batch = sorted(batch[:_MOST_ROWS], key=lambda each: each.number)
            self._together = set(batch)
        self._waiting = [each for each in self._waiting if each not in batch]
        # A prompt that waits for memory or for a far store holds up one step, not all.
        self._is_busy, self._is_in_vain = True, self._coming > 0
        return batch

    def _compute(self, batch: list[Decoding]) -> None:
        began = time.monotonic()
        try:
            for each, logits in zip(batch, self._logits(batch), strict=True):
                each.logits = logits
        except BaseException as error:
            for each in batch:
                each.error = error if isinstance(error, Exception) else CancelledError(_INTERRUPTED)
            if not isinstance(error, Exception):
                raise
        finally:
            self._took = time.monotonic() - began
            self._free(math.inf)

    def _logits(self, batch: list[Decoding]) -> Tensor:
        if len(batch) == 1:
            if self._rows is not None and batch[0] in self._rows[0]:
                self._rows = None  # What it knows of this buffer ends here.
            found = self._model.forward(torch.tensor([batch[0].tokens], device=self._model.device), batch[0].buffer)
            if found is None:
                raise AssertionError("logits were asked for")
            return found
        if any(len(each.tokens) > 1 for each in batch):
            self._rows = None  # Questions are new rows, and those that were here go on at other places.
            return self._model.ragged([each.buffer for each in batch], [each.tokens for each in batch])
        rows = self._rows
        if rows is None or rows[0] != batch:
            rows = self._rows = batch, self._model.rows([each.buffer for each in batch])
        return rows[1]([each.tokens[0] for each in batch])

    def _free(self, turn: float) -> None:
        if len(self._together) > 1 or self._coming or self._waiting or self._prefilling:
            let_go()
        with self._changed:
            self._is_busy, self._turn, self._freed = False, turn, time.monotonic()
            self._changed.notify_all()
