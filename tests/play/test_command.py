"""`kp play` as a command: what it refuses before a page is there, and whom its server answers."""

from __future__ import annotations

import signal
import socket
import subprocess
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from tests.cli.conftest import ENVIRONMENT, kp, started  # noqa: F401 - a fixture

ENGINE = ("--engine", "tests.cli.engines:tiny")


def test_a_missing_file_is_named_before_a_model_is_loaded(kp):  # noqa: F811
    code, _, said = kp("play", "nowhere.txt", "--engine", "tests.cli.engines:number")
    assert (code, said) == (1, "kp: There is no file nowhere.txt. Check the path.\n")


def test_a_port_that_is_taken_is_named_before_a_model_is_loaded(kp):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, said = kp("play", "--port", port, "--engine", "tests.cli.engines:number")
    assert (code, said) == (1, f"kp: Port {port} cannot be used; give another one with --port.\n")


@pytest.mark.slow
def test_the_server_answers_its_own_page_alone_and_ends_in_one_line(tmp_path, monkeypatch):
    pytest.importorskip("gradio")
    # Nothing goes to a proxy either: nobody listens there.
    monkeypatch.setitem(ENVIRONMENT, "HTTP_PROXY", "http://127.0.0.1:9")
    (tmp_path / "mill.txt").write_text("The mill of Veyl has four sails.")
    (tmp_path / "secret.txt").write_text("nobody's business")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
    with started("play", "mill.txt", "--port", port, *ENGINE, **options) as playing:
        address = next(word for line in playing.stdout for word in line.decode().split() if word.startswith("http://"))
        assert urlsplit(address).hostname == "127.0.0.1"

        def status(path, method="GET", **headers):
            asked = HTTPConnection("127.0.0.1", int(port), timeout=30)
            asked.request(method, path, headers=headers)
            return asked.getresponse().status

        assert status("/") == 200
        assert status("/", Origin=f"http://127.0.0.1:{port}") == 200
        assert status("/", Host="evil.example") == 403  # A name that was made to lead here.
        assert status("/gradio_api/queue/join", "POST", Origin="http://evil.example") == 403
        assert status("/", Origin="null") == 403
        for path in ("/etc/passwd", str(tmp_path / "secret.txt"), "secret.txt", "../secret.txt"):
            assert status(f"/gradio_api/file={path}") in (403, 404)
        for host in _own_addresses():
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((host, int(port)), timeout=5)

        playing.send_signal(signal.SIGINT)
        out, said = playing.communicate(timeout=60)
        assert playing.returncode == 130
        assert "closed; its documents are gone" in out.decode()
        assert "Traceback" not in said.decode()


def _own_addresses():
    """Addresses of this machine other than the loopback one, where it has any."""
    found = {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return {each for each in found if not each.startswith("127.")}
