"""Decides who computes next on one model: decoding steps and short suffixes of prompts, in turns with prefill."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.model import Model
from kp_core.errors import ModelError
from kp_core.threads import computing, release_openmp_threads

_Result = TypeVar("_Result")

_MOST_ROWS = 16  # Most answers in one pass.
_INTERRUPTED = "The step was interrupted in the thread that computed it for several answers. Ask again."
_PATIENCE = 0.5
"""How long a step waits for the answers that it shared its last pass with, as a share of the duration of a pass."""
_SHORT = 64  # Most tokens of a suffix computed with others, and of a pass after which prefill keeps its turn.
_MOST_TOKENS = 512  # Most tokens of a pass for several answers.
_BURST = 0.5  # Seconds that prefill passes may follow each other while decoding steps wait.
_GRACE = 0.1  # Seconds that decoding steps wait for a prompt that is about to be computed.
_OUT_OF_MEMORY = (
    "The device has too little memory for this request, also after everything that no request uses was freed. Send "
    "fewer or shorter requests at once, or load the engine with smaller cache_bytes or chunk_tokens."
)
_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What libraries say that raise no error of their own for it: Metal, torch on a CPU, cuBLAS."""


@dataclass(eq=False)
class Decoding:
    """One answer that is being decoded in its buffer."""

    buffer: KVBuffer
    number: int = field(default_factory=itertools.count().__next__)
    tokens: Sequence[int] = ()
    logits: Tensor | None = None
    error: BaseException | None = None


class Scheduler:
    """Gives the model to one forward pass at a time.

    Decoding steps that wait at the same time share one pass, which one of the waiting threads computes for all. A step
    waits briefly for the answers that it shared its last pass with. A short suffix of a prompt is a step of several
    tokens. If both wait, prefill and decoding alternate, one pass and one step. Prompts that arrive together are
    prefilled before the next step, which they then share.
    """

    def __init__(self, model: Model, pass_tokens: int = 1024, free_unused: Callable[[], None] = lambda: None) -> None:
        """`pass_tokens` are the most of one pass over a prompt. `free_unused` frees the memory that no request uses."""
        self.model, self.pass_tokens, self._free_unused = model, pass_tokens, free_unused
        self._changed = threading.Condition()
        self._is_busy, self._prefilling, self._coming, self._is_in_vain = False, 0, 0, False
        self._turn = math.inf  # The time from which steps go before prefill; infinite until a prompt takes its turn.
        self._waiting: list[Decoding] = []
        self._took = self._freed = self._came = 0.0
        self._together: set[Decoding] = set()
        self._rows: tuple[list[Decoding], Callable[[Sequence[int]], Tensor]] | None = None

    def retry_after_oom(self, compute: Callable[[], _Result], again: Callable[[], _Result] | None = None) -> _Result:
        """The result of `compute`. If the device has too little memory, frees what no request uses, and tries `again`.

        By default, `again` is `compute`. Raises `ModelError` if there is still too little memory.
        """
        try:
            return compute()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Here the error is gone, and with it the tensors of the failed pass.
        try:
            self._free_unused()
            return (again or compute)()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(_OUT_OF_MEMORY) from error

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Announce a prompt that is being filled; steps may wait briefly for it."""
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
        """Hold the model for one pass over `tokens` tokens of a prompt."""
        with self._changed:
            self._prefilling += 1
            try:
                self._changed.wait_for(
                    lambda: not self._is_busy and not (self._waiting and self._turn < time.monotonic())
                )
            finally:
                self._prefilling -= 1
            computing.check()
            if not self._waiting or self._turn == math.inf:
                self._turn = time.monotonic() + _BURST
            self._is_busy, self._is_in_vain = True, False
        try:
            with computing:
                yield
        finally:
            self._free(self._turn if tokens <= _SHORT else -math.inf)

    def forward(self, ids: Sequence[int], buffer: KVBuffer, logits: int = 1) -> Tensor:
        """See `Model.forward`; waits for the model."""
        with self.prefill(len(ids)):
            return self.model.forward(ids, buffer, logits)

    def may_join(self, tokens: int) -> bool:
        """Whether the last `tokens` tokens of a prompt that is `coming` may share a pass with decoding steps."""
        with self._changed:
            is_shared = self._coming > 1 or self._is_busy or self._waiting or self._together
            return bool(is_shared and tokens <= _SHORT and "batch" not in self.model.lacks)

    def leave(self, decoding: Decoding) -> None:
        """Record that an answer is complete, so that no step waits for it."""
        with self._changed:
            self._together.discard(decoding)
            if self._rows is not None and decoding in self._rows[0]:
                self._rows = None
            self._changed.notify_all()

    def step(self, decoding: Decoding, *tokens: int) -> Tensor:
        """Compute a token, or the suffix of a prompt, behind the buffer. Returns the last logits, `(vocabulary,)`.

        Raises the error of the pass, also if another thread computed it.
        """
        decoding.tokens, decoding.logits, decoding.error = tokens, None, None
        if len(self._together) > 1 or self._coming or self._waiting:
            release_openmp_threads()  # Sampling the token used OpenMP threads too.
        arrival = time.monotonic()
        with self._changed:
            self._waiting.append(decoding)
            if len(tokens) > 1:  # The next prompt may come soon, too, so steps wait for it again.
                self._came, self._is_in_vain, self._turn = arrival, False, min(self._turn, arrival + _BURST)
            self._changed.notify_all()
            try:
                while (batch := self._due(decoding, arrival)) is None:
                    if decoding.logits is not None or decoding.error is not None:
                        break
                    until = max(self._until(arrival), self._grace if self._coming else 0.0)
                    self._changed.wait(None if self._is_busy else max(until - time.monotonic(), 0.0005))
            except BaseException:  # Ctrl-C while waiting.
                if decoding in self._waiting:
                    self._waiting.remove(decoding)
                else:  # Another thread is computing this step and writes to its buffer.
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
        """The time until which a step that arrived at `came` waits for others, if the model is free."""
        return max(came, self._freed) + _PATIENCE * self._took

    @property
    def _grace(self) -> float:
        """The time until which steps wait for a prompt that is coming."""
        return max(self._freed, self._came) + _GRACE

    def _due(self, decoding: Decoding, came: float) -> list[Decoding] | None:
        """The steps that this thread must compute now, or `None`. Takes them from the waiting ones, and the model."""
        computing.check()
        now = time.monotonic()
        is_prompt_due = self._coming and not self._is_in_vain and now < self._grace
        is_for_prefill = (self._prefilling or is_prompt_due) and now < self._turn
        if self._is_busy or decoding not in self._waiting or is_for_prefill:
            return None
        batch = [decoding]
        if (len(self._waiting) > 1 or self._together - {decoding}) and "batch" not in self.model.lacks:
            if not self._together <= {*self._waiting} and now < self._until(came):
                return None
            room = _MOST_TOKENS - len(decoding.tokens)
            for candidate in self._waiting:
                if candidate is not decoding and len(candidate.tokens) <= room:
                    room -= len(candidate.tokens)
                    batch.append(candidate)
            batch = sorted(batch[:_MOST_ROWS], key=lambda member: member.number)
            self._together = set(batch)
        self._waiting = [member for member in self._waiting if member not in batch]
        # A coming prompt may wait for memory or for a remote store, so it delays one step and not all.
        self._is_busy, self._is_in_vain = True, self._coming > 0
        return batch

    def _compute(self, batch: list[Decoding]) -> None:
        start_time = time.monotonic()
        try:
            self.retry_after_oom(partial(self._in_one_pass, batch), partial(self._one_by_one, batch))
        except BaseException as error:
            for member in batch:
                member.error = error if isinstance(error, Exception) else CancelledError(_INTERRUPTED)
            if not isinstance(error, Exception):
                raise
        finally:
            self._took = time.monotonic() - start_time
            self._free(math.inf)

    def _one_by_one(self, batch: list[Decoding]) -> None:
        """Set the logits of each step, or its error, after the pass for all of them failed."""
        self._rows = None
        for member in batch:
            if not member.buffer.has_states:  # The failed pass wrote over them.
                member.error = ModelError(_OUT_OF_MEMORY)
                continue
            try:
                member.logits = self._logits([member])[0]
            except Exception as error:  # noqa: BLE001 - it is raised in the thread of this answer
                member.error = ModelError(_OUT_OF_MEMORY) if is_out_of_memory(error) else error

    def _in_one_pass(self, batch: list[Decoding]) -> None:
        """Set the logits of each step, computed in one pass."""
        for member, logits in zip(batch, self._logits(batch), strict=True):
            member.logits = logits

    def _logits(self, batch: list[Decoding]) -> Tensor:
        if len(batch) == 1:
            if self._rows is not None and batch[0] in self._rows[0]:
                self._rows = None  # Its copies of this buffer's keys are out of date after this pass.
            return self.model.forward(batch[0].tokens, batch[0].buffer)
        if any(len(member.tokens) > 1 for member in batch):
            self._rows = None  # Suffixes are new rows, and copies of the other rows' keys are out of date afterwards.
            return self.model.ragged([member.buffer for member in batch], [member.tokens for member in batch])
        if self._rows is None or self._rows[0] != batch:
            self._rows = None  # So that what it copied is freed before.
            self._rows = batch, self.model.rows([member.buffer for member in batch])
        return self._rows[1]([member.tokens[0] for member in batch])

    def _free(self, turn: float) -> None:
        if len(self._together) > 1 or self._coming or self._waiting or self._prefilling:
            release_openmp_threads()
        with self._changed:
            self._is_busy, self._turn, self._freed = False, turn, time.monotonic()
            self._changed.notify_all()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device has too little memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)
    )
