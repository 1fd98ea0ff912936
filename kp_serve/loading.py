"""Packs on their way into the paged cache: later layers are read while the model computes those that are there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from kp_core.errors import KnowledgePackError, PackError
from kp_serve.pieces import Kept, LayeredKV, Loaded, StoredPieces

if TYPE_CHECKING:  # It imports vLLM.
    from kp_serve.blocks import PagedKV

__all__ = ["Loading", "Move"]

logger = logging.getLogger(__name__)

_ERRORS = (OSError, KnowledgePackError)
_THREADS = 2  # They read from a disk, check and copy: memory is what they wait for.


_P = TypeVar("_P", bound=Loaded | Kept)


@dataclass(frozen=True)
class Move(Generic[_P]):
    """The tokens `start:stop` of a request, in these blocks, and the pack (or other stored KV) that ends them."""

    piece: _P
    start: int
    stop: int
    blocks: tuple[int, ...]


class Loading:
    """What one step of vLLM needs of the store.

    `wait` gives a layer to the model when it is in the cache, and `finish` ends it all; neither raises for what cannot
    be read: `failed` then has its blocks, and vLLM fails its request. No number is written that was not checked.

    On the CPU the threads that read also write. Elsewhere the thread of the model writes, in the order of its stream,
    and all before the step, as the step may be a recorded graph that waits for nothing.
    """

    def __init__(self, moves: Sequence[Move[Loaded]], pieces: StoredPieces, cache: PagedKV) -> None:
        self.failed: set[int] = set()
        self._moves, self._cache, self._lock = moves, cache, threading.Lock()
        self._layers: list[list[tuple[Move[Loaded], Future[list[tuple[Tensor, Tensor]]]]]] = [[] for _ in cache.layers]
        self._pool: ThreadPoolExecutor | None = None
        opened = [(move, kv) for move in moves if (kv := self._opened(move, pieces)) is not None]
        if opened:
            self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "kp-load")
        for layer, jobs in enumerate(self._layers):
            for move, kv in opened:
                if self._pool is not None:
                    jobs.append((move, self._pool.submit(self._read, layer, move, kv)))
        if not cache.is_on_cpu:
            self.finish()

    def wait(self, layer: int) -> None:
        """Until a layer is in the cache, for all that this step needs."""
        jobs, self._layers[layer] = self._layers[layer], []
        for move, job in jobs:
            try:
                parts = job.result()
                if not self._cache.is_on_cpu and self._is_wanted(move):
                    self._cache.write(layer, parts, move.blocks)
            except _ERRORS as error:
                self._fail(move, error)

    def finish(self) -> None:
        """Until all layers are; the threads end."""
        for layer in range(len(self._layers)):
            self.wait(layer)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            for move in filter(self._is_wanted, self._moves):
                logger.info("Loaded %d tokens of %s.", move.stop - move.start, move.piece.handle)

    def _opened(self, move: Move[Loaded], pieces: StoredPieces) -> LayeredKV | None:
        try:
            kv = pieces.open(move.piece, move.start, move.stop)
            if kv.layers != len(self._cache.layers):
                raise PackError(f"The KV has {kv.layers} layers; this model has {len(self._cache.layers)}.")
        except _ERRORS as error:
            self._fail(move, error)
            return None
        return kv

    def _read(self, layer: int, move: Move[Loaded], kv: LayeredKV) -> list[tuple[Tensor, Tensor]]:
        if not self._is_wanted(move):
            return []
        parts = kv.read(layer)
        if self._cache.is_on_cpu:
            self._cache.write(layer, parts, move.blocks)
            return []
        return parts

    def _is_wanted(self, move: Move[Loaded]) -> bool:
        """Not when a layer of it has failed already."""
        with self._lock:
            return self.failed.isdisjoint(move.blocks)

    def _fail(self, move: Move[Loaded], error: Exception) -> None:
        if self._is_wanted(move):
            logger.warning("%s cannot be loaded, and its request fails: %s", move.piece.handle, error)
        with self._lock:
            self.failed.update(move.blocks)
