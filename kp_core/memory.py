"""Memory that is filled fast."""

from __future__ import annotations

import numpy as np

__all__ = ["new_memory"]


def new_memory(nbytes: int) -> np.ndarray:
    """Return uninitialised bytes that begin on a cache line.

    NumPy asks Linux for large pages from 4 MiB on and torch does not: they are filled four times as fast.
    """
    data = np.empty(nbytes + 64, np.uint8)
    return data[(at := -data.ctypes.data % 64) : at + nbytes]
