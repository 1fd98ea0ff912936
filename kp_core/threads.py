"""Threads: a few of ours, those of OpenMP, and forks, which no thread survives and which leave a lock as it is."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakSet

from kp_core.errors import KnowledgePackError

_own = threading.local()
_POOL_FROM = 1_000_000  # Below this number of bytes, starting threads costs more than it saves.
_SOFT = 1  # `omp_pause_soft` of OpenMP: threads end, and their settings stay.

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Forked(Protocol):
    """Something with threads, locks or connections."""

    def forked(self) -> None:
        """Make them anew. Called in a forked process, before anything else runs there."""


_ours: WeakSet[Forked] = WeakSet()


def make_anew(*parts: Forked) -> None:
    """Call `forked` of each of `parts` in every process that is forked from this one, as long as they exist."""
    _ours.update(parts)


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
    # The cores that this process may use, if the system reports them.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(8, cores, len(items))
    # A thread of the pool starts no more threads.
    if nbytes < _POOL_FROM or count < 2 or getattr(_own, "is_of_pool", False):
        return list(map(act, items))
    results: list[_Out] = list(items)  # type: ignore[arg-type]  # Each is replaced below.
    with ThreadPoolExecutor(count, initializer=setattr, initargs=(_own, "is_of_pool", True)) as pool:
        # One task per thread: a task per item would cost as much as hashing the item.
        for at, share in enumerate(pool.map(lambda at: list(map(act, items[at::count])), range(count))):
            results[at::count] = share
    return results


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
