"""Ends idle OpenMP threads, so that another thread computes at full speed."""

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
    """End the OpenMP threads of the calling thread. OpenMP starts new ones when this thread computes again.

    libgomp keeps worker threads for every thread that ever computed. They wait without sleeping only while there are no
    more of them than cores. So once a second thread computes, each of the many parallel loops of a forward pass must
    wake its workers: a decoding step of SmolLM2 then takes 66 ms on two cores, and 36 ms with this function. Does
    nothing if torch comes without libgomp.
    """
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], int]:
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")) if sys.platform == "linux" else []
    for path in libraries:
        try:
            pause: Callable[[int], int] = ctypes.CDLL(str(path)).omp_pause_resource_all
        except (OSError, AttributeError):  # This libgomp is older than OpenMP 5.
            continue
        return pause
    return lambda _: 0
