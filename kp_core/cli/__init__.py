"""The command line, `kp`.

Exit codes: 0 done; 1 an error, said in one line; 2 a command that was not understood; 3 `kp verify` found something
wrong (with `--repair`: that could not be repaired); 130 interrupted.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run `kp` and exit."""
    try:
        from kp_core.cli.app import run
    except ImportError as error:
        sys.stderr.write(f'kp needs {error.name}: `pip install "knowledge-packs[cli]"`.\n')
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run())
