"""Letting go of OpenMP's threads, so that another thread computes at full speed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

__all__ = ["let_go"]

_SOFT = 1


def let_go() -> None:
    """End the threads that OpenMP keeps for this one; they come back when it computes again.

    libgomp keeps threads for every thread that ever computed, and lets them wait awake only while there are no more of
    them than cores. So as soon as a second thread computes, each of the many parallel loops of a forward pass has to
    wake its threads up: a decoding step of SmolLM2 then takes 66 ms on two cores, and 36 with this. Does nothing where
    torch comes without libgomp.
    """
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], int]:
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")) if sys.platform == "linux" else []
    for path in found:
        try:
            pause: Callable[[int], int] = ctypes.CDLL(str(path)).omp_pause_resource_all
        except (OSError, AttributeError):  # Older than OpenMP 5.
            continue
        return pause
    return lambda _: 0
