"""Background work: jobs that run step by step while no request is being answered."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

from kp_core.errors import ModelError

logger = logging.getLogger(__name__)

Job: TypeAlias = Callable[[], Iterable[object] | None]
"""Background work: a function that does all of it at once, or returns an iterable that does one piece at each step."""

_MOST_JOBS = 64  # Background jobs that may wait.


class IdleQueue:
    """Runs background jobs one after the other in one thread, which exists only while there are jobs.

    A step begins only when no request is being answered. A request that arrives during a step waits for at most that
    step. At most `_MOST_JOBS` jobs may wait.
    """

    def __init__(self) -> None:
        self._closed, self._requests, self._is_registered = False, 0, False
        self._jobs: deque[tuple[Job, Future[None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> Future[None]:
        """Queue `job`. The returned future completes with the job, receives its error, and can be cancelled.

        Raises `ModelError` when too many jobs wait, or after `close`.
        """
        future: Future[None] = Future()
        with self._changed:
            if self._closed or len(self._jobs) >= _MOST_JOBS:
                reason = "it was closed" if self._closed else f"{_MOST_JOBS} jobs wait already"
                raise ModelError(f"The engine takes no more background work: {reason}.")
            self._jobs.append((job, future))
            if self._thread is None:
                if not self._is_registered:
                    # The interpreter must not exit while a thread is inside torch. Unregistering frees no slot.
                    atexit.register(self.close)
                    self._is_registered = True
                self._thread = threading.Thread(target=self._work, name="kp-idle", daemon=True)
                self._thread.start()
        return future

    @contextmanager
    def request(self) -> Iterator[None]:
        """Hold this while a request is answered; no step begins meanwhile."""
        with self._changed:
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Cancel the waiting jobs, and wait for the step under way."""
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
        steps: Iterator[object] | None = None
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or not self._requests)
                    if self._closed:
                        break
                steps = iter(job() or ()) if steps is None else steps
                if next(steps, self) is self:
                    future.set_result(None)
                    return
            future.set_exception(ModelError("The engine was closed before this background work was done."))
        except Exception as error:  # noqa: BLE001 - a job may fail in any way, and its future takes the error
            # At interpreter exit a job cannot use other threads. A later run meets the same work again.
            is_exiting = "interpreter shutdown" in str(error) or not threading.main_thread().is_alive()
            logger.log(logging.DEBUG if is_exiting else logging.WARNING, "Background work failed: %s", error)
            future.set_exception(error)
