"""A real server of `kp serve` on the bundled model; without vLLM (`make setup-vllm`) its tests are skipped."""

import json
from pathlib import Path

import httpx
import pytest

from benchmarks.vllm import TENANTS, WAYS
from benchmarks.vllmserver import KpServer
from kp_core import PackStore, bundled_model, load_engine
from tests.conftest import DEMO, skip_together

# Threads that are bound to cores wait for one another whenever something else runs there.
# With 2 GiB of KV, five servers at a time and the tests filled 24 GB, and the kernel ended one.
SETTINGS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
VLLMS = ["--max-model-len", "2048", "--max-num-batched-tokens", "1024", "--max-num-seqs", "8"]


@pytest.hookimpl(trylast=True)  # behind `-m`, so that the test that stands for all is one of those asked for
def pytest_collection_modifyitems(config, items):
    skip_together(config, items, Path(__file__).parent, "vllm", "`make test-vllm` runs them")


class Server(KpServer):
    """What tests ask it."""

    def __init__(self, folder, place=None, environment=None):
        super().__init__(
            *(folder, str(bundled_model()), ("own", "plain", *WAYS, *TENANTS)),
            options=VLLMS,
            ours=["--packets"] if place else ["--facts", str(folder / "facts")],
            environment=SETTINGS | (environment or {}),
            place=place,
        )
        self.reader = "5" * 32
        self.rights[self.reader] = {"namespaces": ["own"]}

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


class Both:
    """The same request to the server and to the engine here, each with a store of its own."""

    def __init__(self, server, smol, folder):
        self.server, self.here, self.local, self._there = server, smol, PackStore(folder), {}

    @property
    def there(self):
        if self.server.url not in self._there:  # It has another one after each start.
            self._there = {self.server.url: load_engine(engine=self.server.url, api_key=self.server.keys["own"])}
        return self._there[self.server.url]

    def ask(self, content, texts, **options):
        """The answers to `content`, a string or messages, in which `{0}` is the first of `texts`, as a pack."""
        found = []
        for session, store in ((self.there, self.server.store), (self.here, self.local)):
            # The engine here moves what has KV; the server compiles before it moves.
            lazy = session is self.there or "composer" not in options
            packs = [session.build_pack(each, namespace="own", lazy=lazy) for each in texts]
            handles = [store.put(pack) for pack in packs]
            said = [{"role": "user", "content": content}] if isinstance(content, str) else content
            messages = [{**each, "content": each["content"].format(*handles)} for each in said]
            found.append(session.generate(messages, view=store.view("own"), **options))
        return found


@pytest.fixture(scope="session")
def server(tmp_path_factory):
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


@pytest.fixture
def both(server, smol, tmp_path):
    return Both(server, smol, tmp_path)
