"""`kp up`, `kp down`: a process that keeps a model loaded, and runs the commands of `kp_cli.resident`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import Annotated, NoReturn

import typer

from kp_cli.resident import COMMANDS, GIVEN, connected, run_folder, setup
from kp_cli.shared import RESIDENT, ModelOptions, OtherModelError, spread
from kp_cli.signs import waiting
from kp_core.errors import ModelChangedError, ModelError

__all__ = ["down", "up"]

_REQUEST_BYTES, _REQUEST_S = 1 << 20, 5.0


@spread
def up(
    *,
    idle: Annotated[
        float, typer.Option(metavar="MINUTES", min=0.01, help="End after this time without a command.")
    ] = 15,
    here: Annotated[bool, typer.Option("--here", help="Stay in this process, not in the background.")] = False,
    model: ModelOptions,
) -> None:
    """Keep a model loaded: `ask`, `edit`, `search`, `size` and `verify` then begin at once, until `kp down`.

    They are used with the same --model, --engine and --dtype; commands with others load their own.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ModelError("`kp up` needs Unix sockets, which this system lacks.")
    with connected() as connection:
        if connection is not None:
            raise ModelError("A resident engine is up already. `kp down` ends it.")
    folder = run_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    if here:
        session = model.load()
        RESIDENT[model.key] = session
        try:
            _serve(60 * idle)
        finally:
            RESIDENT.clear()
            session.close()
        return
    passed = {"--model": model.model, "--engine": model.engine, "--dtype": model.dtype, "--idle": str(idle)}
    options = [part for name, value in passed.items() if value is not None for part in (name, value)]
    log = folder / "log"
    with log.open("wb") as file, waiting("Loading the model"):
        command = [sys.executable, "-m", "kp_cli", "up", "--here", *options]
        process = subprocess.Popen(  # noqa: S603 - our own
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=GIVEN, start_new_session=True
        )
        is_up = False
        while not is_up:
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines() or ["it said nothing"]
                raise ModelError(f"The resident engine did not start: {lines[-1].removeprefix('kp: ')}")
            time.sleep(0.1)
            with connected() as connection:
                is_up = connection is not None
    typer.echo(f"The model stays loaded, until `kp down` or {idle:g} minutes without a command.")


def down() -> None:
    """End the resident engine of `kp up`."""
    with connected() as connection:
        if connection is None:
            typer.echo("There is no resident engine.")
            return
        connection.sendall(json.dumps({"down": True}).encode() + b"\n")
        with waiting("Waiting for the command that it runs"):
            connection.recv(1)
    typer.echo("The resident engine has ended.")


def _serve(idle_s: float) -> None:
    """Run the commands of clients, one after the other, until none came for `idle_s` seconds or one says `down`."""
    from kp_cli.app import load_command

    for name in COMMANDS:  # What is imported later would take an interrupt for the end of the process.
        load_command(name)
    before = signal.signal(signal.SIGINT, _interrupt)
    place = run_folder() / "engine"
    place.unlink(missing_ok=True)  # Nobody answers there.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        try:
            place.chmod(0o600)
            listener.listen()
            listener.settimeout(idle_s)
            with suppress(TimeoutError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        if not _answer(connection):
                            return
        finally:
            place.unlink(missing_ok=True)
            signal.signal(signal.SIGINT, before)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _answer(connection: socket.socket) -> bool:
    """Run the command of one client, in its files for output. Returns whether to go on."""
    with ExitStack() as stack:
        stack.enter_context(suppress(OSError, KeyboardInterrupt))  # The client has gone.
        connection.settimeout(_REQUEST_S)
        start, files, _, _ = socket.recv_fds(connection, 1, 2)
        streams = [stack.enter_context(os.fdopen(file, "w", buffering=1)) for file in files]
        with connection.makefile("rb") as lines:
            line = start + lines.readline(_REQUEST_BYTES)
        connection.settimeout(None)
        if not line:  # Somebody looked whether there is an engine.
            return True
        try:
            request = json.loads(line)
            if "down" in request:
                return False
            arguments, folder, there, columns = (request[name] for name in ("arguments", "folder", "setup", "columns"))
            out, err = streams
        except (ValueError, TypeError, KeyError):  # Not a client of ours.
            return True
        connection.sendall(b"\n")

        def answer(name: str, value: object) -> None:
            connection.sendall(json.dumps({name: value}).encode() + b"\n")

        if different := [name for name, value in setup().items() if there.get(name) != value]:
            answer("refused", f"it has another {', '.join(different)}; `kp down` ends it")
            return True
        try:
            for session in RESIDENT.values():
                session.fingerprint  # noqa: B018 - raises if the model's files changed
        except ModelChangedError:
            answer("refused", "the files of its model have changed; it ends")
            return False
        os.chdir(folder)
        os.environ["COLUMNS"] = columns
        from kp_cli.app import run

        try:
            with redirect_stdout(out), redirect_stderr(err), _interrupted_with(connection):
                code = run(arguments)
            answer("code", code)
        except SystemExit:  # Of Rich, where the reader has enough (`kp search … | head`).
            answer("code", 1)
        except OtherModelError:
            answer("refused", "it has another model or dtype")
    return True


@contextmanager
def _interrupted_with(connection: socket.socket) -> Iterator[None]:
    """Interrupt the block when the client closes its end, as one does that was interrupted itself."""
    running, turn = True, threading.Lock()

    def watch() -> None:
        with suppress(OSError):
            connection.recv(1)
        with turn:
            if running:
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, name="kp-client", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with turn:
            running = False
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # Ends the wait of the thread.
        thread.join()
