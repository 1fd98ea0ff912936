"""Full disks and clocks that jump, for the length of a `with`."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["clock", "full_disk"]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes in this process: writes fail as they do on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def clock() -> Iterator[Callable[[float], None]]:
    """The wall clock, which what is yielded sets forward or back by so many seconds."""
    jumped, now, now_ns = 0.0, time.time, time.time_ns

    def jump(seconds: float) -> None:
        nonlocal jumped
        jumped += seconds

    time.time = lambda: now() + jumped
    time.time_ns = lambda: now_ns() + int(jumped * 1e9)
    try:
        yield jump
    finally:
        time.time, time.time_ns = now, now_ns
