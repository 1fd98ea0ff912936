"""A real server of `kp serve` on loopback, and what it counted: for benchmarks and tests."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from kp_core import PackStore
from kp_serve.wire import KEYS_VARIABLE

__all__ = ["SETTINGS", "KpServer"]

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parents[1]),
    "VLLM_CPU_KVCACHE_SPACE": "2",
}
"""The environment of a small machine without a hub."""
_START_SECONDS = 560
_STOP_SECONDS = 60


class KpServer:
    """The process, its address, its store and its keys by namespace; started by `start`, as often as one likes.

    `options` are those of `vllm serve`, `ours` further ones of `kp serve`, `environment` what differs from this
    process's, `place` where the packs are, by default in `folder`.
    """

    def __init__(  # noqa: PLR0913 - what a server is
        self,
        folder: Path,
        model: str,
        namespaces: Sequence[str],
        *,
        dtype: str = "float32",
        options: Sequence[str] = (),
        ours: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        place: str | None = None,
    ) -> None:
        self.folder, self.path, self.model = folder, folder / "packs", model
        self.place = place or str(self.path)
        self.store = PackStore(self.place)
        self.keys = {name: secrets.token_hex(32) for name in namespaces}
        self.rights: dict[str, object] = {key: {"namespaces": [name], "write": True} for name, key in self.keys.items()}
        self.dtype, self.options, self.environment = dtype, list(options), {**SETTINGS, **(environment or {})}
        self.ours = list(ours)
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self, **environment: str) -> KpServer:
        """Start it, at an address of its own; raises `RuntimeError` with the end of its log where it does not come."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        log = self.folder / "server.log"
        ours = ["serve", self.model, "--store", self.place]
        options = [*self.ours, "--port", str(port), "--dtype", self.dtype, "--", *self.options]
        with log.open("ab") as out:
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "kp_cli", *ours, *options],
                env=os.environ | self.environment | {KEYS_VARIABLE: json.dumps(self.rights)} | environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == httpx.codes.OK:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"The server did not start:\n{log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End it, if it runs."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(_STOP_SECONDS)
            self.process = None

    def kill(self) -> None:
        """End it and its processes at once, without a word: of a server that is killed alone they stay."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(_STOP_SECONDS)
            self.process = None

    def counted(self, name: str) -> float:
        """The sum of one of vLLM's counters since the server started."""
        headers = {"authorization": f"Bearer {next(iter(self.keys.values()))}"}
        said = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        return sum(map(float, re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", said, re.MULTILINE)))
