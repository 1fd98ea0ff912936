"""`kp up`: a process that keeps a model loaded, and the commands that run there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kp_cli.app import run
from kp_cli.resident import connected, run_folder
from tests.cli.conftest import ENVIRONMENT, Kp, as_json
from tests.conftest import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="It needs Unix sockets.")

OWN = ("--engine", "tests.cli.engines:own")
ASKED = ("ask", "bank", "Which bird is on the flag?", "-k", "2", "--max-tokens", "4", *OWN, "--json")
OURS = {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}
CLIENT = "import sys; from kp_cli.resident import run_there; sys.exit(run_there(sys.argv[1:]))"


def is_up() -> bool:
    with connected() as connection:
        return connection is not None


@pytest.fixture
def beside(kp: Kp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `kp up` in this process, and meanwhile a function that is called with `client`."""
    monkeypatch.setenv("KP_CACHE", str(tmp_path / "c"))
    monkeypatch.setattr("kp_cli.resident.GIVEN", dict(os.environ))

    def client(*arguments: str, **changed: str) -> tuple[int, str, str]:
        command, environment = [sys.executable, "-c", CLIENT, *arguments], ENVIRONMENT | os.environ | OURS | changed
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)  # noqa: S603, PLW1510
        return done.returncode, done.stdout, done.stderr

    def serve(asking: Callable[[Callable[..., tuple[int, str, str]]], None], idle: str = "1") -> int:
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                until(is_up)
                asking(client)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
            finally:
                with connected() as connection:
                    if connection is not None:
                        connection.sendall(b'{"down": true}\n')

        thread = threading.Thread(target=ask)
        thread.start()
        code = run(["up", "--here", "--idle", idle, *OWN])
        thread.join()
        if errors:
            raise errors[0]
        return code

    return serve


def test_commands_run_there(kp: Kp, bank: Path, beside: Callable[..., int], tmp_path: Path) -> None:
    told = as_json(kp(*ASKED))

    def asking(client: Callable[..., tuple[int, str, str]]) -> None:
        for _ in range(2):
            report = as_json(client(*ASKED))
            assert report["answers"]["packs"]["text"] == told["answers"]["packs"]["text"]
            assert report["sources"] == told["sources"]
        assert report["answers"]["packs"]["usage"]["computed_tokens"] <= 2, "it is in memory"
        code, out, err = client("ask", "nothing", "x", *OWN)
        assert (code, out, "There is no collection in nothing" in err) == (1, "", True)
        assert client("ask", "bank")[0] == 2
        # A client that goes away ends its answer, and nothing else.
        long = [sys.executable, "-c", CLIENT, *ASKED[:-1], "--max-tokens", "1500"]
        there: dict[str, Any] = {"env": ENVIRONMENT | os.environ | OURS, "cwd": tmp_path, "stdout": subprocess.PIPE}
        with subprocess.Popen(long, **there) as process:  # noqa: S603 - our own
            assert process.stdout is not None
            assert process.stdout.read(1)
            process.kill()
        assert as_json(client(*ASKED))["sources"] == told["sources"]
        # A reader that has enough is no error.
        reading, writing = os.pipe()
        os.close(reading)
        search = [sys.executable, "-c", CLIENT, "search", "bank", "Which bird?"]
        with subprocess.Popen(search, **there | {"stdout": writing, "stderr": subprocess.PIPE}) as process:  # noqa: S603
            os.close(writing)
            said = process.communicate()[1].splitlines()
            assert (process.returncode, [line for line in said if b" ..." not in line]) == (1, [])
        # What it would do differently runs elsewhere.
        for arguments, changed, reason in (
            (("ask", "bank", "x", "--engine", "tests.cli.engines:bare"), {}, "another model"),
            (ASKED, {"KP_SECRET": "0"}, "another environment"),
        ):
            code, out, err = client(*arguments, **changed)
            assert (code, out, reason in err) == (0, "", True), err

    assert beside(asking) == 0
    assert not is_up()
    assert (run_folder().stat().st_mode & 0o777, list(run_folder().iterdir())) == (0o700, [])


def test_what_is_no_request_of_ours_changes_nothing(beside: Callable[..., int]) -> None:
    def asking(_: Callable[..., tuple[int, str, str]]) -> None:
        for line in (b"GET / HTTP/1.1", b"5", b"{}", b'{"arguments": ["ask"]}', b"[]", b" "):
            with connected() as connection:
                assert connection is not None
                connection.sendall(line + b"\n")
                assert connection.recv(1) == b""
        assert is_up()

    assert beside(asking) == 0


def test_it_ends_by_itself_and_others_cannot_take_its_place(kp: Kp, beside: Callable[..., int]) -> None:
    assert beside(lambda _: None, "0.01") == 0
    assert "There is no resident engine." in kp("down")[1]
    assert kp("up", "--idle", "soon")[0] == 2
    run_folder().chmod(0o755)
    (run_folder() / "engine").touch()
    assert not is_up()
