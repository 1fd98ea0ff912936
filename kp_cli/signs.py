"""Lines on standard error: what a command does while it loads or computes, in the width of the terminal."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["fitted", "waiting"]

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


def fitted(text: str, width: int | None = None) -> str:
    """`text` in lines of at most `width` characters, broken between words.

    By default for standard error: as wide as its terminal; a line stays one in a file or pipe.
    """
    if width is None:
        width = shutil.get_terminal_size().columns if _is_terminal() else sys.maxsize
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
    lines = text.split("\n")
    return "\n".join("\n".join(textwrap.wrap(line, width, **options)) if len(line) > width else line for line in lines)


def _is_terminal() -> bool:
    return sys.stderr.isatty()
