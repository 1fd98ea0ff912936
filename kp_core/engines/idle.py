"""Work for when nobody waits: compiling ahead, upgrades; one step at a time, between requests."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

from kp_core.errors import BusyError

__all__ = ["IdleQueue", "Job"]

logger = logging.getLogger(__name__)

Job: TypeAlias = Callable[[], Iterable[object] | None]
"""Work: a function that does all of it at once, or gives an iterable that does a piece at each step."""


class IdleQueue:
    """Runs jobs one after the other in one thread, which exists only while there are jobs.

    A step begins when no request is being answered; a request that comes meanwhile waits for that step at most. At most
    `limit` jobs wait.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit, self._closed, self._requests = limit, False, 0
        self._jobs: deque[tuple[Job, Future[None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> Future[None]:
        """Do `job` when there is time; the future tells when it is done, takes its error, and can be cancelled.

        Raises `BusyError` when too many jobs wait already, or behind `close`.
        """
        future: Future[None] = Future()
        with self._changed:
            if self._closed or len(self._jobs) >= self._limit:
                reason = "it was closed" if self._closed else f"{self._limit} jobs wait already"
                raise BusyError(f"The engine takes no more background work: {reason}.")
            self._jobs.append((job, future))
            if self._thread is None:
                # A thread inside torch must not be cut off when the interpreter ends.
                atexit.register(self.close)
                self._thread = threading.Thread(target=self._work, name="kp-idle", daemon=True)
                self._thread.start()
        return future

    @contextmanager
    def request(self) -> Iterator[None]:
        """For as long as a request is answered: no step begins."""
        with self._changed:
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Cancel what waits, and wait for the step under way."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    for _, future in self._jobs:
                        future.cancel()
                    self._jobs.clear()
                if not self._jobs:
                    self._thread = None
                    return
                job, future = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                self._run(job, future)

    def _run(self, job: Job, future: Future[Any]) -> None:
        def begun() -> Iterator[object]:
            yield from job() or ()

        try:
            steps = begun()
            while self._may_begin():
                if next(steps, self) is self:
                    future.set_result(None)
                    return
            future.set_exception(BusyError("The engine was closed before this background work was done."))
        except Exception as error:  # noqa: BLE001 - a job may fail in any way, and its future takes the error
            # At the end of the interpreter it may use no other threads; what it was for is met again.
            is_over = not threading.main_thread().is_alive()
            logger.log(logging.DEBUG if is_over else logging.WARNING, "Background work failed: %s", error)
            future.set_exception(error)

    def _may_begin(self) -> bool:
        """Wait until no request is answered; `False` when the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._requests)
            return not self._closed
