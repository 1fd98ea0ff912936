"""Decides who computes next on one model, and in which memory.

Prompts are filled one after the other (`BufferPool.turn`), in buffers that share one budget with the prefix tree.
Decoding steps and short questions run together, in turns with prefill (`Scheduler`).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kp_core.engines.local.buffer import CacheShape, KVBuffer
from kp_core.engines.local.tree import Name, PrefixTree
from kp_core.errors import CacheBudgetError
from kp_core.kv import KVTensors
from kp_core.plan import Limit

if TYPE_CHECKING:
    from kp_core.engines.hf.model import CausalModel
    from kp_core.engines.hf.rows import Memory

__all__ = ["BufferPool", "Cancelled", "Decoding", "Scheduler", "let_go"]

logger = logging.getLogger(__name__)

_IDLE = 2  # Idle buffers that are kept, whatever their size.
_LOOK_S = 0.05
"""How often a waiting request checks its limit, in seconds. Reaching the limit sends no signal."""
_LONG_S = 10.0  # Seconds after which a request that waits for memory is logged.
_MOST_ROWS = 16  # Most answers in one pass.
_INTERRUPTED = "The step was interrupted in the thread that computed it for several answers. Ask again."
_PATIENCE = 0.5
"""How long a step waits for the answers that it shared its last pass with, as a share of the duration of a pass."""
_SHORT = 64  # Most tokens of a question computed with others, and of a pass after which prefill keeps its turn.
_MOST_TOKENS = 512  # Most tokens of a pass for several answers.
_BURST, _GRACE = 0.5, 0.1  # Seconds for which prefill keeps its turn, and for which steps wait for the next prompt.
_SOFT = 1  # `omp_pause_soft` of OpenMP: threads end, and their settings stay.


class Cancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The request was cancelled, or its time was up, before its prompt was prefilled."""


class BufferPool:
    """Gives buffers to requests, from one byte budget that it shares with the prefix tree.

    `budget_bytes` covers buffers in use, idle buffers, and the tree, which gets the rest. The pool keeps two idle
    buffers, or as many as take a quarter of the budget, because new memory costs several times as much as filling it.
    To make room for a new buffer, it frees idle buffers, then the least recently used KV of the tree. A request that
    does not fit beside those under way waits.
    """

    def __init__(self, shape: CacheShape, tree: PrefixTree, budget_bytes: int) -> None:
        self._shape, self._tree = shape, tree
        self.budget_bytes = budget_bytes
        self.used = 0
        """Bytes of the buffers in use."""
        self._waiting: list[KVBuffer] = []
        self._queue: deque[object] = deque()
        # Its lock is reentrant: garbage collection may close an abandoned stream at any line, which returns its buffer.
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of the idle buffers."""
        return sum(buffer.nbytes for buffer in self._waiting)

    @contextmanager
    def turn(self, limit: Limit) -> Iterator[None]:
        """One request at a time, first come, first served. Raises `Cancelled` at `limit`, also while it waits."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
        try:
            while True:
                if limit.is_set():
                    raise Cancelled
                with self._changed:
                    if self._queue[0] is ticket:
                        break
                    self._changed.wait(_LOOK_S if limit.may_end else None)
            yield
        finally:
            with self._changed:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def check(self, capacity: int, pinned: int = 0) -> None:
        """Raise `CacheBudgetError` if a buffer for `capacity` tokens does not fit beside the `pinned` bytes."""
        size = KVBuffer.bytes_for(self._shape, capacity)
        if size + pinned <= self.budget_bytes:
            return
        pinned_note = f", of which {pinned:,} are pinned" if pinned else ""
        raise CacheBudgetError(
            f"The prompt and its answer may take {capacity:,} tokens, whose KV is {size:,} bytes; expected at most the "
            f"budget of {self.budget_bytes:,} bytes{pinned_note}. Shorten the prompt, lower max_tokens, "
            f"{'unpin packs, ' if pinned else ''}or load the engine with a larger cache_bytes."
        )

    def take(self, capacity: int, held: Sequence[tuple[Name, KVTensors]]) -> KVBuffer | None:
        """A buffer for at least `capacity` tokens, filled with the KV that a path `held`; `None` without room now.

        Takes the large enough idle buffer that already holds most of that KV, or allocates one.
        """
        with self._changed:
            fitting = [buffer for buffer in self._waiting if buffer.capacity >= capacity]
            buffer = max(fitting, key=lambda candidate: (candidate.shared(held), -candidate.capacity), default=None)
            size = KVBuffer.bytes_for(self._shape, capacity) if buffer is None else buffer.nbytes
            if buffer is not None:
                self._waiting.remove(buffer)
            elif not self._has_room(size):
                return None
            self.used += size
        try:
            buffer = buffer or KVBuffer(self._shape, capacity)
            buffer.load(held)
        except BaseException:
            self.free(size)
            raise
        return buffer

    def wait(self, capacity: int, limit: Limit) -> None:
        """Wait until there is room for a buffer. Release the tree path before waiting.

        Raises `CacheBudgetError` if there can be no room, and `Cancelled` at `limit`.
        """
        size, start_time, has_warned = KVBuffer.bytes_for(self._shape, capacity), time.monotonic(), False
        with self._changed:
            while not self._has_room(size):
                self.check(capacity, self._tree.held_bytes(pinned_only=True))
                if limit.is_set():
                    raise Cancelled
                if not has_warned and time.monotonic() > start_time + _LONG_S:
                    has_warned = True
                    logger.warning(
                        "A request waits for %s bytes of KV memory; %s of %s are held by answers under way. Streams "
                        "that are open and not read hold theirs: close them, or raise cache_bytes.",
                        f"{size:,}",
                        f"{self.used:,}",
                        f"{self.budget_bytes:,}",
                    )
                self._changed.wait(_LOOK_S)

    def reserve(self, nbytes: int) -> bool:
        """Reserve bytes for buffers outside the pool, until `free`. Returns whether there was room."""
        with self._changed:
            has_room = self._has_room(nbytes)
            self.used += nbytes if has_room else 0
            return has_room

    def free(self, nbytes: int) -> None:
        """Return the bytes of buffers that no longer exist."""
        with self._changed:
            self.used -= nbytes
            self._share()

    def give(self, buffer: KVBuffer) -> None:
        """Return a buffer to the pool, and free the oldest idle buffers if there are too many."""
        with self._changed:
            self.used -= buffer.nbytes
            self._waiting.append(buffer)
            while len(self._waiting) > _IDLE and self.nbytes > self.budget_bytes // 4:
                del self._waiting[0]
            self._share()

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._changed:
            self._waiting.clear()
            self._share()

    def _has_room(self, size: int) -> bool:
        """Make room for `size` bytes: free idle buffers, then evict from the tree. Returns whether there is room."""
        room = self.budget_bytes - self.used - size
        if room < self.nbytes + self._tree.nbytes and room < self._tree.held_bytes():
            return False  # Freeing would not be enough, so nothing is freed.
        while self._waiting and self._left() - size < self._tree.nbytes:
            del self._waiting[0]
        return self._tree.shrink(self._left() - size)

    def _left(self) -> int:
        """Bytes that neither buffers in use nor idle buffers take."""
        return self.budget_bytes - self.used - self.nbytes

    def _share(self) -> None:
        """Give the bytes that became free to the tree, and wake waiting requests."""
        self._tree.shrink(self._left())
        self._changed.notify_all()


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

    Decoding steps that wait at the same time share one pass. A step waits briefly for the answers that it shared its
    last pass with, so that answers that began at different times are decoded together. A question that ends a prompt is
    a step of several tokens. There is no scheduler thread: one of the waiting threads computes for all. A reader that
    does not request its next token delays nobody. If both wait, prefill and decoding alternate, one pass and one step.
    Prompts that arrive together are prefilled before the next step, which they then share.
    """

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._changed = threading.Condition()
        self._is_busy, self._prefilling, self._coming, self._is_in_vain = False, 0, 0, False
        self._turn = math.inf  # The time from which steps go before prefill; infinite until a prompt takes its turn.
        self._waiting: list[Decoding] = []
        self._took = self._freed = self._came = 0.0
        self._together: set[Decoding] = set()
        self._rows: tuple[list[Decoding], Callable[[Sequence[int]], Tensor]] | None = None
        self._memory: Memory = {}
        """Used again by the next rows, until no answers are decoded together."""

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
            if not self._waiting or self._turn == math.inf:
                self._turn = time.monotonic() + _BURST
            self._is_busy, self._is_in_vain = True, False
        try:
            yield
        finally:
            self._free(self._turn if tokens <= _SHORT else -math.inf)

    def may_join(self, tokens: int) -> bool:
        """Whether a question of `tokens` tokens, of a prompt that is `coming`, may share a pass with other steps."""
        with self._changed:
            is_shared = self._coming > 1 or self._is_busy or self._waiting or self._together
            return bool(is_shared and tokens <= _SHORT and self._model.batches)

    def leave(self, decoding: Decoding) -> None:
        """Record that an answer is complete, so that no step waits for it."""
        with self._changed:
            self._together.discard(decoding)
            if self._rows is not None and decoding in self._rows[0]:
                self._rows = None
            if not self._together:
                self._memory = {}
            self._changed.notify_all()

    def step(self, decoding: Decoding, *tokens: int) -> Tensor:
        """Compute `tokens`, one token or a question, after the buffer. Returns the logits after the last.

        The logits have the shape `(vocabulary,)`. Raises the error of the pass, also if another thread computed it.
        """
        decoding.tokens, decoding.logits, decoding.error = tokens, None, None
        if len(self._together) > 1 or self._coming or self._waiting:
            let_go()  # Sampling the token used OpenMP threads too.
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
        """The time until which a step that arrived at `came` waits for others, if the model is free.

        It counts from when the model became free, because the others could not compute before.
        """
        return max(came, self._freed) + _PATIENCE * self._took

    @property
    def _grace(self) -> float:
        """The time until which steps wait for a prompt that is coming."""
        return max(self._freed, self._came) + _GRACE

    def _is_for_prefill(self) -> bool:
        """Whether prefill has the turn, and a prompt waits for the model or is about to."""
        now = time.monotonic()
        is_due = self._coming and not self._is_in_vain and now < self._grace
        return bool(self._prefilling or is_due) and now < self._turn

    def _due(self, decoding: Decoding, came: float) -> list[Decoding] | None:
        """The steps that this thread must compute now, or `None`. Takes them from the waiting ones, and the model."""
        if self._is_busy or decoding not in self._waiting or self._is_for_prefill():
            return None
        batch = [decoding]
        if (len(self._waiting) > 1 or self._together - {decoding}) and self._model.batches:
            if not self._together <= {*self._waiting} and time.monotonic() < self._until(came):
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
            for member, logits in zip(batch, self._logits(batch), strict=True):
                member.logits = logits
        except BaseException as error:
            for member in batch:
                member.error = error if isinstance(error, Exception) else CancelledError(_INTERRUPTED)
            if not isinstance(error, Exception):
                raise
        finally:
            self._took = time.monotonic() - start_time
            self._free(math.inf)

    def _logits(self, batch: list[Decoding]) -> Tensor:
        if len(batch) == 1:
            if self._rows is not None and batch[0] in self._rows[0]:
                self._rows = None  # Its copies of this buffer's keys are out of date after this pass.
            logits = self._model.forward(torch.tensor([batch[0].tokens], device=self._model.device), batch[0].buffer)
            if logits is None:
                raise AssertionError("logits were asked for")
            return logits
        if any(len(member.tokens) > 1 for member in batch):
            self._rows = None  # Questions are new rows, and copies of the other rows' keys are out of date afterwards.
            return self._model.ragged([member.buffer for member in batch], [member.tokens for member in batch])
        rows = self._rows
        if rows is None or rows[0] != batch:
            rows = self._rows = batch, self._model.rows([member.buffer for member in batch], self._memory)
        return rows[1]([member.tokens[0] for member in batch])

    def _free(self, turn: float) -> None:
        if len(self._together) > 1 or self._coming or self._waiting or self._prefilling:
            let_go()
        with self._changed:
            self._is_busy, self._turn, self._freed = False, turn, time.monotonic()
            self._changed.notify_all()


def let_go() -> None:
    """End the OpenMP threads of the calling thread. OpenMP starts new ones when this thread computes again.

    libgomp keeps worker threads for every thread that ever computed. They wait without sleeping only while there are no
    more of them than cores. So once a second thread computes, each of the many parallel loops of a forward pass must
    wake its workers: a decoding step of SmolLM2 then takes 66 ms on two cores, and 36 ms with this function. Does
    nothing if torch comes without libgomp.
    """
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], int]:
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")) if sys.platform == "linux" else []
    for path in libraries:
        try:
            pause: Callable[[int], int] = ctypes.CDLL(str(path)).omp_pause_resource_all
        except (OSError, AttributeError):  # This libgomp is older than OpenMP 5.
            continue
        return pause
    return lambda _: 0
