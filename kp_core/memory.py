"""Memory that is filled fast, and Python's collector of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def new_memory(nbytes: int) -> np.ndarray:
    """Return uninitialised bytes that begin on a cache line.

    NumPy asks Linux for large pages from 4 MiB on and torch does not: they are filled four times as fast.
    """
    data = np.empty(nbytes + 64, np.uint8)
    return data[(at := -data.ctypes.data % 64) : at + nbytes]


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's garbage collector meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
