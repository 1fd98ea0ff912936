"""Forked processes, as of gunicorn with preload and of multiprocessing: each entry answers, or raises at once."""

import asyncio
import multiprocessing
import os
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from langchain_core.documents import Document

from kp_core import PackStore
from kp_core.banks import ChromaFactStore, Fact, MemoryFactStore
from kp_core.banks.embed import SentenceTransformerEmbedder
from kp_core.errors import FactError, ModelError
from kp_langchain import ChatKnowledgePacks
from kp_langchain import KnowledgePackRetriever as LangChainRetriever
from kp_llamaindex import KnowledgePackLLM
from kp_llamaindex import KnowledgePackRetriever as LlamaIndexRetriever
from tests.conftest import tiny_engine, until
from tests.kits import HashEmbedder

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no forks")

FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
_HANGS_S = 60
TEXT = "The gate of the harbour is green and old, and nobody knows who painted it."


OF_LIBRARIES = set()
"""Threads of the system that are none of Python's, and stay."""


def settle():
    """Wait until threads that have ended in Python have also left the system.

    On its way out such a thread frees buffers of MKL, under a lock that a fork at that moment would keep locked: the
    forked process then hangs in its first product.
    """
    tasks, until_s = Path("/proc/self/task"), time.monotonic() + 1
    while tasks.exists():
        ours = {each.native_id for each in threading.enumerate()}
        beside = {int(each.name) for each in tasks.iterdir()} - ours - OF_LIBRARIES
        if not beside:
            return
        if time.monotonic() > until_s:  # What ends is gone by now.
            OF_LIBRARIES.update(beside)
        time.sleep(0.005)


def in_child(act):
    """What `act` returns or raises in a forked process; an error if it takes long."""
    ours, theirs = FORK.Pipe(duplex=False)

    def send():
        try:
            theirs.send((act(), None))
        except Exception as error:  # noqa: BLE001 - it is raised by the other process
            theirs.send((None, error))

    settle()
    process = FORK.Process(target=send)
    process.start()
    try:
        if not ours.poll(_HANGS_S):
            pytest.fail("The forked process hangs.")
        returned, error = ours.recv()
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise error
    return returned


async def read(stream):
    return [delta async for delta in stream]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """An engine, models of both frameworks and retrievers, all of which answered already."""
    engine, store = tiny_engine(), PackStore(tmp_path_factory.mktemp("packs"))
    facts = MemoryFactStore(HashEmbedder())
    LangChainRetriever.from_facts([Fact(TEXT)], engine=engine, store=store, fact_store=facts)
    torch.randn(600, 600).softmax(-1) @ torch.randn(600, 600)  # Starts threads of OpenMP, if there are cores.
    parts = {
        "engine": engine,
        "chat": ChatKnowledgePacks(engine=engine, max_tokens=3),
        "llm": KnowledgePackLLM(engine=engine, max_tokens=3),
        "found": LangChainRetriever(fact_store=facts, store=store, engine=engine),
        "nodes": LlamaIndexRetriever(facts, engine=engine, store=store),
        "facts": facts,
    }
    asyncio.run(engine.agenerate("Hi", max_tokens=2))
    engine.when_idle(lambda: None).result()
    return parts


def ids(generation):
    return generation.token_ids


ENTRIES = {
    "generate": lambda of: ids(of["engine"].generate("Hi there", max_tokens=3)),
    "stream": lambda of: list(of["engine"].stream("Hi there", max_tokens=3)),
    "agenerate": lambda of: ids(asyncio.run(of["engine"].agenerate("Hi there", max_tokens=3))),
    "agenerate with a timeout": lambda of: ids(asyncio.run(of["engine"].agenerate("Hi", max_tokens=3, timeout=60))),
    "astream": lambda of: asyncio.run(read(of["engine"].astream("Hi there", max_tokens=3))),
    "many": lambda of: [ids(answer) for _, answer in of["engine"].generate_many({1: "Hi", 2: "Ho"}, max_tokens=2)],
    "in a thread": lambda of: thread(lambda: ids(of["engine"].generate("Hi there", max_tokens=3))),
    "prefill": lambda of: of["engine"].prefill("Hi there").usage.prompt_tokens,
    "explain": lambda of: str(of["engine"].explain("Hi")).count("\n"),
    "grammar": lambda of: of["engine"].generate("Hi", max_tokens=9, response_schema={"enum": ["a", "b"]}).text,
    "build": lambda of: of["engine"].build_pack(TEXT).token_ids,
    "idle": lambda of: of["engine"].when_idle(lambda: None).result(),
    "fingerprint": lambda of: of["engine"].fingerprint.id,
    "refresh": lambda of: of["engine"].refresh(),
    "invoke": lambda of: of["chat"].invoke("Hi").text,
    "ainvoke": lambda of: asyncio.run(of["chat"].ainvoke("Hi")).text,
    "chat stream": lambda of: [chunk.text for chunk in of["chat"].stream("Hi")],
    "chat astream": lambda of: "".join(chunk.text for chunk in asyncio.run(read(of["chat"].astream("Hi")))),
    "abatch": lambda of: [answer.text for answer in asyncio.run(of["chat"].abatch(["Hi", "Ho"]))],
    "batch": lambda of: [answer.text for answer in of["chat"].batch(["Hi", "Ho"])],
    "complete": lambda of: of["llm"].complete("Hi").text,
    "acomplete": lambda of: asyncio.run(of["llm"].acomplete("Hi")).text,
    "stream_complete": lambda of: [part.delta for part in of["llm"].stream_complete("Hi")],
    "search": lambda of: [hit.fact.text for hit in of["facts"].search(TEXT, 1)],
    "add": lambda of: of["facts"].add([Fact("Another fact.", id="1")], overwrite=True).superseded,
    "retriever": lambda of: [found.page_content for found in of["found"].invoke(TEXT)],
    "async retriever": lambda of: [found.page_content for found in asyncio.run(of["found"].ainvoke(TEXT))],
    "nodes": lambda of: [found.text for found in of["nodes"].retrieve(TEXT)],
    "async nodes": lambda of: [found.text for found in asyncio.run(of["nodes"].aretrieve(TEXT))],
    "upsert": lambda of: of["found"].upsert([Document("A new fact, as long as the others.")])["failed"],
}


def thread(act):
    results = []
    worker = threading.Thread(target=lambda: results.append(act()))
    worker.start()
    worker.join()
    return results


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_each_entry_answers_in_a_forked_process(entry, warm):
    here = in_child(lambda: entry(warm))
    assert here == entry(warm)


def test_a_process_forked_while_others_are_answered_begins_with_nothing_in_memory():
    engine = tiny_engine()
    expected = engine.generate("Hi there", max_tokens=4).token_ids
    streams = [engine.stream("Hi there", max_tokens=40) for _ in range(2)]
    for stream in streams:
        next(stream.deltas())
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with engine.engine.pool._changed, engine.engine.tree.lock, engine.engine.scheduler._changed, engine._planning:
            inside.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    try:
        assert in_child(lambda: engine.generate("Hi there", max_tokens=4).token_ids) == expected
        assert in_child(lambda: engine.engine.pool.used) == 0
    finally:
        leave.set()
        holder.join()
    assert len({stream.result().token_ids for stream in streams}) == 1


def test_background_work_is_done_by_the_process_that_began_it():
    engine, done, go = tiny_engine(), [], threading.Event()

    def job():
        go.wait()
        yield
        done.append(os.getpid())

    future = engine.when_idle(job)
    until(lambda: engine._idle._thread is not None)

    def child():
        go.set()
        engine.when_idle(lambda: None).result()
        return done

    assert in_child(child) == []
    go.set()
    future.result()
    assert done == [os.getpid()]


def test_a_process_forked_from_a_forked_one_answers_too():
    engine = tiny_engine()
    expected = engine.generate("Hi", max_tokens=3).token_ids
    assert in_child(lambda: in_grandchild(engine)) == expected


def in_grandchild(engine):
    asyncio.run(engine.agenerate("Hi", max_tokens=3))
    return in_child(lambda: asyncio.run(engine.agenerate("Hi", max_tokens=3)).token_ids)


@pytest.mark.parametrize("name", ["generate", "stream", "agenerate", "astream", "many", "prefill", "build"])
def test_a_model_that_does_not_work_across_a_fork_says_so_at_once(name, warm, monkeypatch):
    monkeypatch.setattr(warm["engine"].engine.model, "forks", False)
    with pytest.raises(ModelError, match=r"(?s)forked.*post_fork"):
        in_child(lambda: ENTRIES[name](warm))
    assert ENTRIES["generate"](warm)


@pytest.mark.slow
def test_a_database_of_chroma_says_at_once_where_it_was_opened(tmp_path):
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        store.add([Fact(TEXT)])
        for act in (
            lambda: store.search(TEXT, 1),
            lambda: store.add([Fact("Another fact.")]),
            lambda: list(store.facts()),
            lambda: store.delete(["x"]),
            lambda: len(store),
        ):
            with pytest.raises(FactError, match=f"process {os.getpid()}.*post_fork"):
                in_child(act)
        in_child(store.close)
        assert [hit.fact.text for hit in store.search(TEXT, 1)] == [TEXT]


@contextmanager
def held(*locks):
    """Another thread holds `locks`."""
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            inside.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        holder.join()


@pytest.mark.parametrize("act", ["get", "put", "open"])
def test_a_store_of_packs_that_another_thread_uses_works_in_a_forked_process(act, tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path, max_bytes=10**7)
    pack = engine.build_pack(TEXT)
    handle = store.put(pack)
    acts = {
        "get": lambda: store.get(handle).text,
        "put": lambda: str(store.put(engine.build_pack("Another text, as long as the first."))),
        "open": lambda: PackStore(tmp_path).get(handle).text,
    }
    with held(*store._turns):
        assert in_child(acts[act])
    assert acts[act]()


@pytest.mark.slow
def test_an_embedder_that_another_thread_loads_works_in_a_forked_process():
    embedder = SentenceTransformerEmbedder()
    expected = embedder.embed([TEXT])
    with held(embedder._lock):
        assert in_child(lambda: embedder.embed([TEXT])) == pytest.approx(expected, abs=1e-6)
