"""Threads: a few of ours, those of OpenMP, and forks, which no thread survives and which leave a lock as it is."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from kp_core.errors import KnowledgePackError

_logger = logging.getLogger(__name__)
_own = threading.local()
_POOL_FROM = 1_000_000  # Below this number of bytes, starting threads costs more than it saves.
_WATCHED = 0.3  # Seconds; in fewer, the system's ticks of 10 ms say little.
_LAST_S = 60
_SOFT = 1  # `omp_pause_soft` of OpenMP: threads end, and their settings stay.

_In = TypeVar("_In")
_Out = TypeVar("_Out")


_ours = WeakSet[Any]()


def make_anew(*parts: object) -> None:
    """Call `forked()` of each of `parts` first in every process that is forked from this one, while they exist.

    It makes their threads, locks and connections anew.
    """
    _ours.update(parts)


class _Computing:
    """Holds the interpreter's exit back while other threads compute: one that is inside torch then aborts the process.

    Servers answer in such threads. At exit, `check` ends them before their next pass.
    """

    def __init__(self) -> None:
        self.forked()
        make_anew(self)
        atexit.register(self.end)

    def forked(self) -> None:
        """In a forked process: none of those threads is there."""
        self._count, self._is_ending, self._changed = 0, False, threading.Condition()

    def check(self) -> None:
        """Raise `CancelledError` at the interpreter's exit."""
        if self._is_ending:
            raise CancelledError("The process ends, and the model computes no more.")

    def __enter__(self) -> None:
        with self._changed:
            self.check()
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Wait until no thread computes, for at most a minute."""
        with self._changed:
            self._is_ending = True
            self._changed.wait_for(lambda: self._count == 0, _LAST_S)


computing = _Computing()


def check_process(owner: int, what: str, error: type[KnowledgePackError]) -> None:
    """Raise `error` unless this is the process `owner`, which opened `what`."""
    if os.getpid() != owner:
        raise error(
            f"{what} was opened in process {owner}, from which this one was forked, and does not work across a fork. "
            "Open it in this process: in gunicorn's `post_fork`, in the initializer of a pool, or start processes with "
            "`multiprocessing.get_context('spawn')`."
        )


def in_threads(act: Callable[[_In], _Out], items: Sequence[_In], nbytes: int) -> list[_Out]:
    """Apply `act` to each item, in threads if `nbytes` is large: reading, hashing and zstd release the GIL."""
    count = min(8, len(_cores()), len(items))
    # A thread of the pool starts no more threads.
    if nbytes < _POOL_FROM or count < 2 or getattr(_own, "is_of_pool", False):
        return list(map(act, items))
    results: list[_Out] = list(items)  # type: ignore[arg-type]  # Each is replaced below.
    with ThreadPoolExecutor(count, initializer=setattr, initargs=(_own, "is_of_pool", True)) as pool:
        # One task per thread: a task per item would cost as much as hashing the item.
        for at, share in enumerate(pool.map(lambda at: list(map(act, items[at::count])), range(count))):
            results[at::count] = share
    return results


def _cores() -> frozenset[int]:
    """The cores that this process may use, if the system reports them."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(own)


@contextmanager
def threads_for_free_cores() -> Iterator[None]:
    """Watch the machine while the body runs; then have torch use as many threads as other processes left cores free.

    One thread too many waits, spinning, in every parallel loop: beside one busy process, two threads on two cores take
    1.7 times as long to prefill as one, and 2.8 times to decode. Does nothing where `OMP_NUM_THREADS` is set, on
    systems without `/proc/stat`, and for a body of less than 0.3 s. Never raises the number.
    """
    import torch

    begun, before = time.monotonic(), _seconds_of_others()
    yield
    took, after, threads = time.monotonic() - begun, _seconds_of_others(), torch.get_num_threads()
    if before is None or after is None or took < _WATCHED or "OMP_NUM_THREADS" in os.environ:
        return
    busy = round((after - before) / took)
    if threads > (free := max(1, len(_cores()) - busy)):
        torch.set_num_threads(free)
        _logger.info(
            "Others keep %d cores busy, so torch uses %d threads. OMP_NUM_THREADS sets their number.", busy, free
        )


def _seconds_of_others() -> float | None:
    """Seconds for which other processes have used the cores of this one; None where the system does not report them."""
    ours = os.times()
    with suppress(OSError, ValueError, LookupError, AttributeError):
        rows = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        of_core = {row[0]: [int(ticks) for ticks in row[1:9]] for row in rows if row[0].startswith("cpu")}
        # The fourth and fifth column are idle, and waiting for a disk.
        ticks = sum(sum(of_core[f"cpu{core}"]) - sum(of_core[f"cpu{core}"][3:5]) for core in _cores())
        return ticks / os.sysconf("SC_CLK_TCK") - ours.user - ours.system
    return None


def release_openmp_threads() -> None:
    """End the OpenMP threads of the calling thread, if torch uses libgomp. New ones start when it computes again.

    libgomp keeps worker threads for every thread that ever computed. They wait without sleeping only while there are no
    more of them than cores, and waking them in every parallel loop is slow: a decoding step of SmolLM2 takes 66 ms on
    two cores, and 36 ms with this function.
    """
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], int]:
    import torch

    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")) if sys.platform == "linux" else []
    for path in libraries:
        try:
            pause: Callable[[int], int] = ctypes.CDLL(str(path)).omp_pause_resource_all
        except (OSError, AttributeError):  # This libgomp is older than OpenMP 5.
            continue
        return pause
    return lambda _: 0


def _before_fork() -> None:
    if "torch" in sys.modules:  # Else the forked process would wait for threads of libgomp that it does not have.
        release_openmp_threads()


def _in_child() -> None:
    for part in list(_ours):
        part.forked()


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
