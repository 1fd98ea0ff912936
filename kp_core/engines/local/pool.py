"""The KV memory of one engine: one budget for buffers and prefix tree, and the queue of prompts to fill."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kp_core.engines.local.buffer import CacheShape, KVBuffer
from kp_core.engines.local.tree import Name, PrefixTree
from kp_core.errors import CacheBudgetError
from kp_core.kv import KVTensors
from kp_core.plan import Limit

__all__ = ["BufferPool", "Cancelled"]

logger = logging.getLogger(__name__)

_IDLE = 2
_LOOK_S = 0.05
"""How often a waiting request checks its limit, in seconds. Reaching the limit sends no signal."""
_LONG_S = 10.0


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
