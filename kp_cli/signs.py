"""Signs of life: while a command loads or computes, a line on standard error says what it does."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["waiting"]

_FIRST_S, _EVERY_S = 1.0, 5.0


@contextmanager
def waiting(doing: str) -> Iterator[None]:
    """Say what is being done if it takes longer than a second, then every five seconds how long it has taken."""
    began, ended = time.monotonic(), threading.Event()

    def say() -> None:
        for number in itertools.count():
            if ended.wait(_EVERY_S if number else _FIRST_S):
                return
            line = f"{doing} ..." + (f" {time.monotonic() - began:.0f} s" if number else "")
            bars = getattr(sys.modules.get("tqdm"), "tqdm", None) if sys.stderr.isatty() else None
            if bars is not None:
                bars.write(line, file=sys.stderr)  # Beside a bar in a terminal, not into it.
            else:
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    thread = threading.Thread(target=say, name="kp-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
