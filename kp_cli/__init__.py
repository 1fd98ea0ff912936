"""The command line, `kp`.

Exit codes: 0 done; 1 an error, printed in one line; 2 bad usage; 3 `kp verify` or `kp doctor` found a fault
(`kp verify --repair`: one that it could not repair); 130 interrupted.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["INTERRUPTED", "importing", "main", "waiting"]

INTERRUPTED = "Interrupted. What was reported as done is stored; a build goes on from there.\n"
_FIRST_S, _EVERY_S = 1.0, 5.0


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os.write(2, INTERRUPTED.encode())
    os._exit(130)


@contextmanager
def importing() -> Iterator[None]:
    """Let an interrupt end the process at once: half an import is of no use, and libraries catch interrupts."""
    previous = signal.getsignal(signal.SIGINT)
    is_default = previous is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_default:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, previous)


@contextmanager
def waiting(doing: str) -> Iterator[None]:
    """Say what is being done if it takes longer than a second, then every five seconds how long it has taken."""
    ended = threading.Event()

    def say() -> None:
        for number in itertools.count():
            if ended.wait(_EVERY_S if number else _FIRST_S):
                return
            line = f"{doing} ..." + (f" {_FIRST_S + number * _EVERY_S:.0f} s" if number else "")
            bars = getattr(sys.modules.get("tqdm"), "tqdm", None) if sys.stderr.isatty() else None
            if bars is not None:
                bars.write(line, file=sys.stderr)  # Beside a bar in a terminal, not into it.
            else:
                print(line, file=sys.stderr, flush=True)  # noqa: T201 - the command line prints

    thread = threading.Thread(target=say, name="kp-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Run `kp` and exit."""
    try:
        with importing(), waiting("Starting"):
            from kp_cli.app import run
    except ImportError as error:
        sys.exit(f'kp needs {error.name}: `pip install "knowledge-packs[cli]"`.')
    code = run()
    # The command is done. An interrupt of what libraries do at exit needs no traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    sys.exit(code)
