"""The command line, `kp`.

Exit codes: 0 done; 1 an error, printed in one line; 2 bad usage; 3 `kp verify` or `kp doctor` found a fault
(`kp verify --repair`: one that it could not repair); 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kp_cli.signs import waiting

__all__ = ["INTERRUPTED", "importing", "main"]

INTERRUPTED = "Interrupted. What was reported as done is stored; a build goes on from there.\n"


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os.write(2, INTERRUPTED.encode())
    os._exit(130)


@contextmanager
def importing() -> Iterator[None]:
    """Let an interrupt end the process at once: half an import is of no use, and libraries catch interrupts."""
    previous_handler = signal.getsignal(signal.SIGINT)
    is_default = (
        previous_handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    )
    if is_default:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, previous_handler)


def main() -> None:
    """Run `kp` and exit."""
    try:
        with importing(), waiting("Starting"):
            from kp_cli.app import run
    except ImportError as error:
        sys.stderr.write(f'kp needs {error.name}: `pip install "knowledge-packs[cli]"`.\n')
        sys.exit(1)
    code = run()
    # The command is done. An interrupt of what libraries do at exit needs no traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    sys.exit(code)
