"""An answer in pieces, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import TypeVar

from kp_core.plan.plan import Limit
from kp_core.session.reading import Generation
from kp_core.tools import Delta

T = TypeVar("T")


@cache
def _threads(name: str) -> ThreadPoolExecutor:
    """The threads for requests of asyncio, by name.

    asyncio's default pool has few threads on a small machine, and answers decoded together wait for each other. A new
    request may wait for memory until running streams end, so steps of streams have their own threads.
    """
    return ThreadPoolExecutor(64, name)


if hasattr(os, "register_at_fork"):  # No thread survives a fork.
    os.register_at_fork(after_in_child=_threads.cache_clear)


class Stream:
    """The visible text of an answer in pieces. `generation` is set after the last piece."""

    def __init__(self, deltas: Generator[Delta, None, Generation]) -> None:
        self._deltas = deltas
        self.generation: Generation | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        for delta in self.deltas():
            if delta.text:
                return delta.text
        raise StopIteration

    def deltas(self) -> Iterator[Delta]:
        """All pieces: text, reasoning and tool calls. Shares its position with iteration over the stream."""
        while True:
            try:
                yield next(self._deltas)
            except StopIteration as stop:
                # A generator gives its return value only once.
                self.generation = self.generation or stop.value
                return

    def result(self) -> Generation:
        """The whole answer; reads the rest of the stream. Raises `RuntimeError` if it was closed before its end."""
        for _ in self.deltas():
            pass
        if self.generation is None:
            raise RuntimeError("The stream was closed before its answer was complete.")
        return self.generation

    def close(self) -> None:
        """Stop generating and release the memory."""
        self._deltas.close()


class AsyncStream:
    """A `Stream` for asyncio. Every step runs in a thread, and cancelling the task sets `cancel`."""

    def __init__(self, start: Callable[[], Stream], limit: Limit) -> None:
        self._start, self._limit = start, limit
        self._stream: Stream | None = None
        # `_close` waits for a step that runs in another thread.
        self._stepping = threading.Lock()

    @property
    def generation(self) -> Generation | None:
        """The whole answer, once the stream has ended."""
        return None if self._stream is None else self._stream.generation

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        async for delta in self.deltas():
            if delta.text:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncIterator[Delta]:
        """All pieces, as `Stream.deltas`."""
        while True:
            is_step = self._stream is not None
            if (delta := await in_thread(self._next, self._limit, self._close, is_step=is_step)) is None:
                return
            yield delta

    async def aclose(self) -> None:
        """Stop generating and release the memory."""
        if self._limit.cancel is not None:
            self._limit.cancel.set()
        await asyncio.to_thread(self._close)

    def _next(self) -> Delta | None:
        with self._stepping:
            if self._stream is None:
                self._stream = self._start()
            return next(self._stream.deltas(), None)

    def _close(self) -> None:
        with self._stepping:
            if self._stream is not None:
                self._stream.close()


async def in_thread(
    work: Callable[[], T], limit: Limit, clean_up: Callable[[], None] | None = None, *, is_step: bool = False
) -> T:
    """Run `work` in a thread, in the context of the task.

    Cancelling the task sets `limit.cancel`; `clean_up` then runs once `work` has returned. Raises
    `GenerationTimeoutError` if the time is up before a thread is free; later, `work` itself must end at `limit`.
    """
    begun = _threads("kp-async-step" if is_step else "kp-async").submit(copy_context().run, work)
    future = asyncio.wrap_future(begun)
    try:
        if limit.timeout is not None:
            await asyncio.wait([future], timeout=max(limit.timeout - limit.spent, 0))
            if not future.done() and begun.cancel():
                limit.check(0)
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if limit.cancel is not None:
            limit.cancel.set()

        def after(done: Future[T] | asyncio.Future[T]) -> None:
            # Nobody awaits the result any more. Reading the error keeps asyncio from logging it.
            if not done.cancelled():
                done.exception()
            if clean_up is not None:
                clean_up()

        future.add_done_callback(after)
        raise
