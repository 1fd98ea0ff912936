"""One budget for buffers and prefix tree: what does not fit waits, first come, first served, and may give up."""

import asyncio
import gc
import itertools
import logging
import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from kp_core import PackStore, load_engine
from kp_core.engines.local.buffer import BufferPool, KVBuffer
from kp_core.engines.local.tree import PrefixTree
from kp_core.errors import GenerationTimeoutError, ModelError
from kp_core.plan.plan import Limit
from kp_core.session.stream import in_thread
from tests.conftest import until
from tests.kits import tiny_model, tiny_tokenizer

BUFFER = 256 * 512
"""Bytes of the tiny model's KV of 256 tokens, which is a buffer."""
NEVER = Limit()


def engine_of(buffers):
    """An engine with room for so many buffers."""
    budget = int(buffers * BUFFER)
    return load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=64, cache_bytes=budget)


def pool_of(engine):
    return engine.engine.pool


def held(engine):
    """Bytes in use by answers; what nobody refers to any more is collected."""
    gc.collect()
    return pool_of(engine).used


def queued(engine, count):
    return lambda: len(pool_of(engine)._queue) == count


def hold(engine, **options):
    """A stream that has begun, and is not read on; its buffer has 256 tokens."""
    stream = engine.stream("Hold on.", max_tokens=200, temperature=1.0, seed=3, **options)
    next(stream.deltas())
    return stream


def test_the_budget_holds_and_nothing_that_fits_is_refused():
    engine = engine_of(6)
    shape = engine.engine.model.shape
    for seed in range(20):
        draw, budget = random.Random(seed), 6 * BUFFER
        tree = PrefixTree(budget)
        pool, used, paths, reserved = BufferPool(shape, tree, budget), [], [], []
        for _ in range(60):
            match draw.randrange(6):
                case 0 | 1:
                    capacity, path = draw.randrange(1, 1400), draw.choice(paths) if paths else None
                    size = -(-capacity // 256) * BUFFER
                    idle = any(buffer.capacity >= capacity for buffer in pool._waiting)
                    taken = sum(each.nbytes for each in used) + sum(reserved)
                    fits = idle or taken + tree.held_bytes() + size <= budget
                    buffer = pool.take(capacity, path.held if path and path.tokens <= capacity else ())
                    assert (buffer is not None) == fits
                    used += [buffer] if buffer else []
                case 2 if used:
                    pool.give(used.pop(draw.randrange(len(used))))
                case 3:
                    size = draw.randrange(3 * BUFFER)
                    reserved += [size] if pool.reserve(size) else []
                case 4 if reserved:
                    pool.free(reserved.pop())
                case _:
                    ids = tuple(draw.randrange(9) for _ in range(draw.randrange(1, 300)))
                    path, kv = tree.match(ids), KVBuffer(shape, len(ids))
                    kv.passed(len(ids))
                    path.extend(ids, kv.read(0, len(ids)))
                    paths.append(path)
                    if len(paths) > 3:
                        paths.pop(draw.randrange(len(paths))).release()
            assert pool.used == sum(each.nbytes for each in used) + sum(reserved)
            assert pool.used + pool.nbytes + tree.nbytes <= budget
            assert tree.nbytes <= tree.budget_bytes
        assert tree.budget_bytes >= tree.nbytes


def test_what_cannot_fit_frees_nothing():
    engine = engine_of(3)
    shape = engine.engine.model.shape
    tree = PrefixTree(3 * BUFFER)
    pool, kv = BufferPool(shape, tree, 3 * BUFFER), KVBuffer(shape, 100)
    kv.passed(100)
    path = tree.match(range(100))
    path.extend(range(100), kv.read(0, 100))
    path.release()
    in_use, idle = pool.take(200, ()), pool.take(200, ())
    pool.give(idle)
    before = tree.nbytes, pool.nbytes, pool.used
    assert before == (100 * BUFFER // 256, BUFFER, in_use.nbytes)
    assert not pool.reserve(2 * BUFFER + 1)
    assert (tree.nbytes, pool.nbytes, pool.used) == before
    assert pool.reserve(2 * BUFFER)
    assert (tree.nbytes, pool.nbytes, pool.used) == (0, 0, 3 * BUFFER)


def test_what_does_not_fit_waits_and_gets_its_answer():
    engine, alone = engine_of(3.5), engine_of(40)
    asked = [f"Question {number}? {'Why? ' * (number % 4 * 5)}" for number in range(12)]
    expected = [alone.generate(each, max_tokens=8).text for each in asked]
    seen, over, pool = [], threading.Event(), pool_of(engine)

    def watch():
        while not over.is_set():
            seen.append(pool.used + pool.nbytes + engine.cached_bytes)
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda each: engine.generate(each, max_tokens=8).text, asked))
    over.set()
    watching.join()
    assert found == expected
    # Read without a lock, in the middle of a change; a buffer more would show.
    assert 2 * BUFFER < max(seen) < 4.5 * BUFFER
    assert held(engine) == 0


def test_a_request_larger_than_the_budget_is_an_error_of_its_caller_alone():
    engine = engine_of(2)
    running, expected = hold(engine), hold(engine_of(9)).result().text
    large = "x" * 600
    for ask in (
        lambda: engine.generate(large),
        lambda: engine.stream("Hi", max_tokens=600),
        lambda: engine.prefill(large),
        lambda: engine.build_pack(large),
        lambda: asyncio.run(engine.agenerate(large)),
        lambda: list(engine.generate_many({"a": large}, progress=False)),
    ):
        with pytest.raises(ModelError, match=r"at most the budget of 262,144 bytes\. .* larger cache_bytes"):
            ask()
    assert running.result().text == expected
    assert engine.generate("Hi", max_tokens=2).usage.completion_tokens > 0


def test_who_waits_for_memory_may_give_up_and_others_come_in_turn():
    engine = engine_of(1.5)
    running, cancel = hold(engine), threading.Event()
    with ThreadPoolExecutor(4) as threads:
        given_up = threads.submit(engine.generate, "One?", max_tokens=4, cancel=cancel)
        until(queued(engine, 1))
        late = threads.submit(engine.generate, "Two?", max_tokens=4, timeout=1.0)
        until(lambda: queued(engine, 2)() or late.done())
        patient = threads.submit(engine.generate, "Three?", max_tokens=4)
        with pytest.raises(GenerationTimeoutError):
            late.result(30)
        cancel.set()
        assert given_up.result(30).finish_reason == "cancelled"
        until(queued(engine, 1))
        assert not patient.done()
        running.close()
        assert patient.result(30).text == engine.generate("Three?", max_tokens=4).text


@pytest.mark.timeout(120)
async def test_streams_that_have_begun_go_on_however_many_wait_for_their_memory(monkeypatch):
    # Seventy steps, each of which would wait for the next prompt.
    monkeypatch.setattr("kp_core.engines.local.scheduler._GRACE", 0.001)
    engine = engine_of(1.5)
    stream, pieces = engine.astream("Hold on.", max_tokens=200, temperature=1.0, seed=3), []
    waiting = []
    async for piece in stream:
        pieces.append(piece)
        if not waiting:
            waiting = [asyncio.ensure_future(engine.agenerate(f"{n}?", max_tokens=2)) for n in range(70)]
            await asyncio.to_thread(until, queued(engine, 64))
            assert not any(task.done() for task in waiting)
    assert "".join(pieces) == engine_of(9).generate("Hold on.", max_tokens=200, temperature=1.0, seed=3).text
    assert len([await task for task in waiting]) == 70


def test_first_come_first_served():
    pool, order = pool_of(engine_of(2)), []

    def come(number):
        with pool.turn(NEVER):
            order.append(number)

    threads = []
    with pool.turn(NEVER):
        for number in range(8):
            threads.append(threading.Thread(target=come, args=(number,)))
            threads[-1].start()
            until(lambda: len(pool._queue) == len(threads) + 1)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(CancelledError), pool.turn(Limit(cancel)):
            raise AssertionError("its turn never came")
    for thread in threads:
        thread.join()
    assert order == list(range(8))


@pytest.mark.parametrize("way", ["generate", "stream", "prefill", "agenerate", "astream"])
def test_what_was_cancelled_before_it_began_computes_nothing(way, monkeypatch):
    engine, cancel = engine_of(4), threading.Event()
    cancel.set()

    def forward(*_, **__):
        raise AssertionError("a forward pass")

    async def pieces():
        return [piece async for piece in engine.astream("Hello?", cancel=cancel)]

    with monkeypatch.context() as patched:
        patched.setattr(type(engine.engine.model), "forward", forward)
        if way == "stream":
            assert engine.stream("Hello?", cancel=cancel).result().finish_reason == "cancelled"
        elif way in ("generate", "agenerate"):
            asked = engine.generate if way == "generate" else lambda *a, **o: asyncio.run(engine.agenerate(*a, **o))
            assert asked("Hello?", cancel=cancel).finish_reason == "cancelled"
        elif way == "astream":
            assert asyncio.run(pieces()) == []
        else:
            with pytest.raises(CancelledError):
                engine.prefill("Hello?", cancel=cancel)
    assert held(engine) == 0
    assert engine.generate("Hello?", max_tokens=2).usage.completion_tokens > 0


@pytest.mark.timeout(60)
def test_a_thread_that_dies_with_its_stream_open_leaves_nothing_behind(monkeypatch):
    # pytest's own keeps the traceback, and with it the stream.
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    engine = engine_of(1.5)
    expected = engine.generate("And you?", max_tokens=8).text

    def die():
        stream = engine.stream("Hold on.", max_tokens=200, temperature=1.0, seed=3)
        next(stream.deltas())
        begun.set()
        go.wait(30)
        raise SystemExit  # A thread dies of it in silence.

    begun, go = threading.Event(), threading.Event()
    dying = threading.Thread(target=die)
    dying.start()
    assert begun.wait(30)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.generate, "And you?", max_tokens=8)
        until(queued(engine, 1))
        assert held(engine) == BUFFER
        go.set()
        dying.join()
        assert waiting.result(30).text == expected
    assert held(engine) == 0


@pytest.mark.parametrize("way", ["agenerate", "astream"])
def test_an_event_loop_that_closes_harms_nobody_else(way, monkeypatch):
    # It tells that it could not tell the loop; pytest keeps what was logged, and with it the stream.
    monkeypatch.setattr(logging.getLogger("concurrent.futures"), "disabled", True)
    engine = engine_of(3)
    expected = engine.generate("And you?", max_tokens=8).text
    loop = asyncio.new_event_loop()

    async def ask():
        options = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
        if way == "agenerate":
            return await engine.agenerate("Hold on.", **options)
        return [piece async for piece in engine.astream("Hold on.", **options)]

    async def begin():
        tasks.add(asyncio.ensure_future(ask()))
        await asyncio.to_thread(until, lambda: pool_of(engine).used)

    tasks = set()
    loop.run_until_complete(begin())
    loop.close()  # Nobody is told: the task is not cancelled.
    assert engine.generate("And you?", max_tokens=8).text == expected
    tasks.pop()._log_destroy_pending = False
    # Collecting takes long, and holds up all threads meanwhile.
    looks = itertools.count(1)
    until(lambda: pool_of(engine).used == 0 or (next(looks) % 50 == 0 and held(engine) == 0))
    assert engine.generate("And you?", max_tokens=8).text == expected


def test_a_session_that_closes_or_refreshes_leaves_requests_that_run(tmp_path):
    engine, store = engine_of(8), PackStore(tmp_path)
    handle = store.put(engine.build_pack("The gate of the harbour is green."))
    asked, options = f"{handle}\n\nWhich gate?", {"view": store.view("default"), "max_tokens": 20}
    expected = engine.generate(asked, **options).text
    running = [engine.stream(asked, **options) for _ in range(4)]
    for stream in running:
        next(stream.deltas())
    with pytest.raises(ModelError, match="Answers are under way"):
        engine.refresh()
    engine.close()
    assert [stream.result().text for stream in running] == [expected] * 4
    assert engine.generate(asked, **options).text == expected
    assert held(engine) == 0


@pytest.mark.parametrize("entry", ["agenerate", "astream"])
@pytest.mark.parametrize("gone", [0.3, 0.0])
def test_the_time_of_an_async_request_counts_from_the_call_and_not_from_a_free_thread(entry, gone):
    engine = engine_of(8)

    async def asked():
        inside, go = threading.Semaphore(0), threading.Event()

        def waits():
            inside.release()
            go.wait()

        tasks = [asyncio.ensure_future(in_thread(waits, Limit())) for _ in range(64)]  # All threads for requests.
        await asyncio.to_thread(lambda: [inside.acquire() for _ in tasks])
        try:
            if entry == "agenerate":
                asking = engine.agenerate("Hi", max_tokens=2, timeout=0.3)
            else:
                stream = engine.astream("Hi", max_tokens=2, timeout=0.3)
                await asyncio.sleep(gone)  # It counts from the call, whenever the first piece is read.
                asking = read_all(stream)
            with pytest.raises(GenerationTimeoutError, match=r"after 0\.3 s"):
                await asyncio.wait_for(asking, 20)
        finally:
            go.set()
            await asyncio.gather(*tasks)

    asyncio.run(asked())
    assert asyncio.run(engine.agenerate("Hi", max_tokens=2, timeout=60)).token_ids


async def read_all(stream):
    return [piece async for piece in stream]
