"""A real server of `kp serve` on the bundled model; without vLLM (`make setup-vllm`) its tests are skipped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from kp_core import PackStore, bundled_model
from kp_core.engines.vllm.access import add_key
from tests.conftest import DEMO

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # Threads that are bound to cores wait for one another whenever something else runs there.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
TENANTS = tuple(f"tenant-{number}" for number in range(8))


class Server:
    """The process, its address, its store and its keys by namespace."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "packs"
        self.store = PackStore(self.path)
        self.keys = {name: add_key(folder / "keys.json", [name], write=True) for name in ("own", "plain", *TENANTS)}
        self.reader = add_key(folder / "keys.json", ["own"])
        self.model = bundled_model()
        self.process = None

    def start(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # The log of a failed start is what one wants to see.
        self.log = (self.folder / "server.log").open("ab")
        ours = ["serve", str(self.model), "--store", str(self.path), "--keys", str(self.folder / "keys.json")]
        ours += ["--facts", str(self.folder / "facts")]
        vllms = ["--max-model-len", "2048", "--max-num-batched-tokens", "1024", "--max-num-seqs", "8"]
        self.process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "kp_core.cli", *ours, "--port", str(port), "--dtype", "float32", "--", *vllms],
            env=os.environ | SETTINGS,
            stdout=self.log,
            stderr=self.log,
        )
        deadline = time.monotonic() + 560
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError((self.folder / "server.log").read_text()[-3000:])

    def stop(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
            self.log.close()
            self.process = None

    def ask(self, path, body=None, key="own", method=None):
        """Status and JSON."""
        headers = {"authorization": f"Bearer {self.keys.get(key, key)}"}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        done = httpx.request(
            method or ("GET" if body is None else "POST"),
            self.url + path,
            content=content,
            headers=headers,
            timeout=300,
        )
        return done.status_code, done.json()

    def chat(self, content, key="own", max_tokens=24, **more):
        """What the model says, and the counts."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": max_tokens, **more}
        status, said = self.ask("/v1/chat/completions", body, key)
        assert status == 200, said
        return said["choices"][0]["message"]["content"], said["usage"]

    def compile(self, text, key="own", **more):
        status, said = self.ask("/v1/packs", {"text": text, "namespace": key, **more}, key)
        assert status == 200, said
        return said


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make test-vllm` runs this in an environment of its own")
    made = Server(tmp_path_factory.mktemp("served"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="session")
def questions():
    """Twenty questions of the demo, each with the facts it needs between others: `(question, text)`."""
    facts, asked = (
        list(map(json.loads, (DEMO / name).read_text().splitlines())) for name in ("facts.jsonl", "questions.jsonl")
    )
    texts = {fact["id"]: fact["text"] for fact in facts}
    found = []
    for number, each in enumerate(asked[:20]):
        others = [fact["text"] for fact in facts[number * 4 : number * 4 + 4]]
        found.append((each["question"], "\n".join([*others, *(texts[name] for name in each["facts"])]) + "\n"))
    return found
