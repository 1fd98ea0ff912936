"""The middleware before an application like vLLM's, in this process and on loopback: what several test files share."""

import asyncio
import base64
import io
import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
import torch
import uvicorn

from kp_core import KVTensors, MemoryFactStore, Prefix, load_engine
from kp_serve.engine import VLLMEngine
from kp_serve.rights import Rights
from kp_serve.stored import StoredKV
from kp_serve.wire import Access, send_json
from tests.conftest import tiny_engine, until
from tests.kits import HashEmbedder
from tests.serve.test_serving import KEY, Gate, served


class Served(Gate):
    """A gate before an application that computes and stores KV as the connector does, and says what it is told to.

    The keys `a`, `b` and `default` read and write the namespace of their name; `reader` reads `a`.
    """

    def __init__(self, folder, facts=None, store=None):
        super().__init__(folder, tiny_engine(), None)
        self.store = self.store if store is None else store
        names = {"a": "a", "b": "b", "default": "default", "reader": "a"}
        self.keys = {key: f"kp-{key}" for key in names}
        keys = {self.keys[key]: Access((name,), write=key != "reader") for key, name in names.items()}
        tokenizer, self.session = self.gate.state.tokenizer, tiny_engine()
        facts = MemoryFactStore(HashEmbedder()) if facts is None else facts
        self.gate.state = replace(self.gate.state, facts=facts, keys=keys, store=self.store)
        self.gate.state.__dict__["tokenizer"] = tokenizer
        self.gate.app, self.says, self.computed, self.embedded = self._inner, "", 0, []

    async def _inner(self, scope, receive, send):
        message = await receive() if scope["method"] == "POST" else {}
        body = json.loads(message.get("body") or b"null")
        self.seen.append((scope["path"], body))
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}}
        if scope["path"] == "/metrics":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
            await send({"type": "http.response.body", "body": b"vllm:x 1"})
        elif scope["path"] == "/v1/models":
            model = {"id": "tiny", "max_model_len": self.session.max_positions}
            await send_json(send, 200, {"data": [model]})
        elif body.get("stream"):
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            for data in stream_of(self.says, usage):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        elif scope["path"] == "/v1/completions":
            self._store(body)
            await send_json(send, 200, {"choices": [{"index": 0, "text": self.says}], "usage": usage})
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": self.says}, "finish_reason": "stop"}
            await send_json(send, 200, {"choices": [choice], "usage": usage, "prompt": body["messages"]})

    def _store(self, body):
        rights = Rights.read(body["kv_transfer_params"], body["cache_salt"], KEY)
        stored, engine = StoredKV(self.store, served(self.session)), self.session.engine
        # What else clients send as a prompt is vLLM's to refuse.
        given = body.get("prompt")
        ids = tuple(given) if isinstance(given, list) and all(type(each) is int for each in given) else ()
        for parts in stored.find(ids, rights.namespaces) if rights.save else ():
            if not stored.has(parts, rights.namespaces, parts[-1].stop):
                prefix = ids[: parts[-1].start]
                plans = [(Prefix(), prefix), (Prefix(prefix), parts[-1].entry.token_ids)]
                kv = engine.kv([self.session._planner.plan_kv(*plan) for plan in plans])
                stored.write(parts, KVTensors.concat(list(kv)))
                self.computed += 1
        if rights.keeps:  # As of plain tokens: nothing is moved or steered here.
            if embeddings := body.get("prompt_embeds"):
                self.embedded.append(torch.load(io.BytesIO(base64.b64decode(embeddings)), weights_only=True))
                ids = (5,) * len(self.embedded[-1])
            [whole] = engine.kv([self.session._planner.plan_kv(Prefix(), ids)])
            stored.write((rights.keeps,), whole.slice(rights.keeps.start, rights.keeps.stop))

    def ask(self, method, path, body=None, key="a", **more):
        async def go():
            headers = {"authorization": f"Bearer {self.keys[key]}"} if key else {}
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            transport = httpx.ASGITransport(self.gate)
            async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers) as client:
                return await client.request(method, path, **given, **more)

        return asyncio.run(go())

    def add(self, *texts, key="a", **more):
        done = self.ask(
            "POST", "/v1/facts", {"facts": [{"text": text} for text in texts], "namespace": key, **more}, key
        )
        assert done.status_code == 200, done.text
        return done.json()


def stream_of(said, usage, size=3):
    """An answer as vLLM streams it, in pieces that end anywhere."""
    pieces = [said[at : at + size] for at in range(0, len(said), size)] or [""]
    events = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    lines = [f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": [], "usage": usage}]]
    whole = "".join([*lines, "data: [DONE]\n\n"]).encode()
    return [whole[at : at + 50] for at in range(0, len(whole), 50)]


def events_of(data):
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def remote():
    """A session over a server that nobody asks: plans need its words alone."""
    session = tiny_engine()
    engine = VLLMEngine("http://127.0.0.1:9", tokenizer=session.tokenizer)
    about = {"model": "tiny", "root": "", "max_positions": session.max_positions}
    engine.__dict__["_about"] = about | {"identity": served(session).to_dict()}
    return load_engine(engine)


@pytest.fixture
def server(tmp_path):
    return Served(tmp_path)


@contextmanager
def listening(gate):
    """A server on loopback, over HTTP."""
    made = uvicorn.Server(uvicorn.Config(gate, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        until(lambda: made.started)
        yield f"http://127.0.0.1:{made.servers[0].sockets[0].getsockname()[1]}"
    finally:
        made.should_exit = True
        thread.join(60)


@pytest.fixture
def address(server, tmp_path):
    """Where it listens to an engine of ours, which asks for the model's tokenizer."""
    server.session.tokenizer.save_pretrained(tmp_path / "model")
    tokenizer = server.gate.state.tokenizer
    server.gate.state = replace(server.gate.state, model=str(tmp_path / "model"))
    server.gate.state.__dict__["tokenizer"] = tokenizer
    with listening(server.gate) as url:
        yield url
