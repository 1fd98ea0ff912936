"""Ask the resident engine of `kp up`: commands that need a model run there while it is up, and load none.

A command goes to it as one line of JSON, over a Unix socket in a folder that only its user can enter, together with
the files that the command prints to. Imports little, since it runs before every command.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kp_cli.signs import waiting
from kp_core.bundled import cache_directory

__all__ = ["COMMANDS", "GIVEN", "connected", "run_folder", "run_there", "setup"]

COMMANDS = frozenset({"ask", "edit", "search", "size", "verify"})
"""What the resident engine runs: commands that need neither a terminal nor standard input."""

_RELEVANT = ("AWS_", "HF_", "HOME", "KP_", "NO_COLOR", "OMP_NUM_THREADS", "XDG_")
GIVEN = dict(os.environ)
"""The environment that this process was started with. Libraries change it later."""


def run_there(arguments: list[str]) -> int | None:
    """Run a command in the resident engine; returns its exit code, or `None` if the engine cannot or there is none."""
    if not arguments or arguments[0] not in COMMANDS or "--debug" in arguments:
        return None
    with ExitStack() as stack:
        connection = stack.enter_context(connected())
        if connection is None:
            return None
        lines = stack.enter_context(connection.makefile("r", encoding="utf-8"))
        request = {
            "arguments": arguments,
            "folder": str(Path.cwd()),
            "setup": setup(),
            "columns": str(shutil.get_terminal_size().columns),
        }
        # An engine that ends at this moment gives no line. Files need a byte to go with.
        with suppress(OSError):
            socket.send_fds(connection, [b" "], [sys.stdout.fileno(), sys.stderr.fileno()])
            connection.sendall(json.dumps(request).encode() + b"\n")
        with waiting("Waiting for the resident engine"):
            lines.readline()  # It begins with the command, which prints for itself.
        answer = json.loads(lines.readline() or "{}")
    if "refused" in answer:
        sys.stderr.write(f"The resident engine is not used: {answer['refused']}.\n")
        return None
    if "code" not in answer:
        sys.stderr.write("kp: The resident engine has ended in the middle of this command. Ask again.\n")
    return int(answer.get("code", 1))


def setup() -> dict[str, str]:
    """Release, Python, environment and encoding: a command does the same in an engine whose setup is the same."""
    try:
        release = version("knowledge-packs")
    except PackageNotFoundError:
        release = ""
    environment = {name: value for name, value in GIVEN.items() if name.startswith(_RELEVANT)}
    digest = sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()
    named = {"version": f"{release} {Path(__file__)}", "Python": sys.executable, "environment": digest}
    return named | {"encoding": sys.stdout.encoding}


@contextmanager
def connected() -> Iterator[socket.socket | None]:
    """A connection to the resident engine; `None` if there is none, or others could have made its socket."""
    place = run_folder() / "engine"
    try:
        about = place.parent.lstat()
        is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
    except (OSError, AttributeError):  # There is no such folder, or no such sockets (Windows).
        is_ours = False
    if not is_ours:
        yield None
        return
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(place))
        except OSError:
            yield None
            return
        yield connection


def run_folder() -> Path:
    """The folder of the socket."""
    return cache_directory() / "run"
