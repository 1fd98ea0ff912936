"""Fifty threads and tasks on one engine, for a while: answers are right, memory and threads stay what they are.

`KP_SOAK_SECONDS=600 pytest -m slow tests/core/engines/test_soak.py` goes on for longer, as `make test-nightly` does.
"""

import asyncio
import gc
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest

from kp_core import PackStore, load_engine
from kp_core.errors import (
    GenerationTimeoutError,
    ModelError,
    OptionError,
    PackNotFoundError,
    PromptError,
)
from tests.conftest import until
from tests.kits import tiny_model, tiny_tokenizer

logger = logging.getLogger(__name__)

SECONDS = float(os.environ.get("KP_SOAK_SECONDS") or 20)
WORKERS = 50
BUDGET = 24 * 256 * 512
"""Bytes of KV: of about twenty requests at once, so that others wait."""
BOOK = "The keeper counts ships, and writes each of them into a long book. " * 4
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
PAIRS = [("The formal one.\n", "an 7 er"), ("the other, formal", "er er er 42")]
BAD = [
    ({"nonsense": 1}, OptionError),
    ({"temperature": -1}, OptionError),
    ({"max_tokens": 10_000}, ModelError),
    ({"packs": ["kp:default/" + "a" * 21]}, PackNotFoundError),
    ({"response_schema": {"type": "nonsense"}}, PromptError),
    ({"timeout": 1e-9}, GenerationTimeoutError),
]


class World:
    """An engine with a store, in which some packs come and go, requests, and what each is answered when it is alone."""

    def __init__(self, folder, requests):
        model = tiny_model("llama")
        model.config.max_position_embeddings = 16384
        self.engine = load_engine(model, tokenizer=tiny_tokenizer(), chunk_tokens=128, cache_bytes=BUDGET)
        self.store, self.draw = PackStore(folder), random.Random(7)
        built = list(self.engine.build_packs([f"{BOOK}Book {number}." for number in range(6)], progress=False))
        handles = [str(self.store.put(pack)) for pack in built]
        self.leaving = built[3:]
        steering = self.engine.make_steering(PAIRS, progress=False)
        self.requests = [self._request(handles, steering) for _ in range(requests)]
        present = [self._alone(request) for request in self.requests]
        for pack in self.leaving:
            self.store.remove(self.store.handle(pack.text, "default"))
        # A handle that does not resolve stays text.
        self.expected = [{one, self._alone(request)} for one, request in zip(present, self.requests, strict=True)]
        assert any(len(each) == 2 for each in self.expected), "a pack that is gone is not without effect"

    def _request(self, handles, steering):
        draw = self.draw
        options = {"max_tokens": draw.randint(1, 24), "view": self.store.view("default")}
        if draw.random() < 0.3:
            options |= {"temperature": 0.8, "seed": draw.randrange(99)}
        if draw.random() < 0.2:
            options["stop"] = ["e"]
        if draw.random() < 0.15:
            options |= {"response_schema": SCHEMA, "max_tokens": 40}
        elif draw.random() < 0.15:
            options["steering"] = draw.choice([1, 4]) * steering
        text = draw.choice([*handles, BOOK, "", ""])
        if draw.random() < 0.2:
            text = f"{draw.choice(handles[:3])}\n\n{handles[1]}"
            options |= {"composer": "splice"} if draw.random() < 0.5 and "steering" not in options else {}
        messages = [{"role": "user", "content": f"{text}\n\nWhat of {draw.randrange(30)}?"}]
        if draw.random() < 0.3:
            messages += [{"role": "assistant", "content": "A ship."}, {"role": "user", "content": "And then?"}]
        return messages, options

    def _alone(self, request):
        messages, options = request
        return self.engine.generate(messages, **options).text

    def any(self):
        """A request, and what it may be answered."""
        at = self.draw.randrange(len(self.requests))
        return (*self.requests[at], self.expected[at])


class Soak:
    """What the workers do, and what came of it."""

    def __init__(self, world, seconds):
        self.world, self.engine = world, world.engine
        self.until, self.counts, self.wrong = time.monotonic() + seconds, Counter(), []
        self.goes_on = lambda: time.monotonic() < self.until and not self.wrong

    def check(self, kind, said, expected, *, is_whole=True):
        self.counts[kind] += 1
        if said not in expected and (is_whole or not any(each.startswith(said) for each in expected)):
            self.wrong.append((kind, said, expected))

    def guarded(self, work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the result of the test
            self.wrong.append(error)

    def thread(self, seed):
        draw = random.Random(seed)
        while self.goes_on():
            (messages, options, expected), chance = self.world.any(), draw.random()
            if chance < 0.1:
                bad, error = draw.choice(BAD)
                with pytest.raises(error):
                    self.engine.generate(messages, **{**options, **bad})
                self.counts["bad"] += 1
            elif chance < 0.43:
                self._cancelled(messages, options, expected, draw)
            else:
                self.check("finished", self.engine.generate(messages, **options).text, expected)

    def _cancelled(self, messages, options, expected, draw):
        if draw.random() < 0.5:
            stream = self.engine.stream(messages, **options)
            said = "".join(delta.text for delta in itertools.islice(stream.deltas(), draw.randrange(6)))
            if draw.random() < 0.8:  # Else it is left to the garbage collector.
                stream.close()
        else:
            cancel = threading.Event()
            timer = threading.Timer(draw.random() * 0.2, cancel.set)
            timer.start()
            said = self.engine.generate(messages, **options, cancel=cancel).text
            timer.cancel()
            timer.join()
        self.check("cancelled", said, expected, is_whole=False)

    async def task(self, seed):
        draw = random.Random(seed)
        while self.goes_on():
            (messages, options, expected), chance = self.world.any(), draw.random()
            if chance < 0.1:
                bad, error = draw.choice(BAD)
                with pytest.raises(error):
                    await self.engine.agenerate(messages, **{**options, **bad})
                self.counts["bad"] += 1
            elif chance < 0.3:
                asking = asyncio.ensure_future(self.engine.agenerate(messages, **options))
                await asyncio.sleep(draw.random() * 0.2)
                asking.cancel()
                try:
                    self.check("cancelled", (await asking).text, expected)
                except asyncio.CancelledError:
                    self.counts["cancelled"] += 1
            elif chance < 0.43:
                stream, said = self.engine.astream(messages, **options), []
                async for piece in stream:
                    said.append(piece)
                    if draw.random() < 0.2:
                        break
                await stream.aclose()
                self.check("cancelled", "".join(said), expected, is_whole=False)
            else:
                self.check("finished", (await self.engine.agenerate(messages, **options)).text, expected)

    def tasks(self):
        async def main():
            await asyncio.gather(*(self.task(100 + number) for number in range(WORKERS // 2)))

        asyncio.run(main())

    def packs(self):
        """Packs are put and removed, and compiled anew."""
        for at in itertools.count():
            if not self.goes_on():
                return
            pack = self.world.leaving[at % 3]
            handle = self.world.store.put(pack)
            assert self.engine.build_pack(pack.text).kv.equal(pack.kv)
            time.sleep(0.05)
            self.world.store.remove(handle)
            self.counts["packs"] += 1

    def many(self):
        while self.goes_on():
            chosen = [self.world.any() for _ in range(12)]
            asked = {number: {"messages": one[0], **one[1]} for number, one in enumerate(chosen)}
            for number, answer in self.engine.generate_many(asked, at_once=4, progress=False):
                self.check("finished", answer.text, chosen[number][2])
                if number % 8 == 7:
                    break


def resident():
    """Bytes and threads of this process, as the system counts them; zeros where it does not say."""
    about = Path("/proc/self/status")
    lines = dict(line.split(":", 1) for line in about.read_text().splitlines()) if about.exists() else {}
    return int(lines.get("VmRSS", "0").split()[0]) * 1024, int(lines.get("Threads", "0"))


@pytest.mark.timeout(SECONDS * 2 + 300)
@pytest.mark.parametrize("seconds", [2, pytest.param(SECONDS, marks=pytest.mark.slow)])
def test_soak(seconds, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, logger="kp_core")  # pytest keeps what is logged: handles that stay text.
    world = World(tmp_path, 80 if seconds >= 60 else 12)
    soak, engine, pool = Soak(world, seconds), world.engine, world.engine.engine.pool
    work = [(soak.tasks,), (soak.packs,), (soak.many,), *((soak.thread, seed) for seed in range(WORKERS // 2))]
    seen, before = [], threading.active_count()
    with ThreadPoolExecutor(len(work), "soak") as threads:
        jobs = [threads.submit(soak.guarded, *each) for each in work]
        while not all(job.done() for job in jobs):
            seen.append((*resident(), pool.used + pool.nbytes + engine.cached_bytes))
            time.sleep(min(0.25, seconds / 50))
    assert not soak.wrong, soak.wrong[:3]
    done = soak.counts
    everything = done["finished"] + done["cancelled"] + done["bad"]
    if everything > 1000:
        assert done["cancelled"] > everything / 5
        assert done["bad"] > everything / 20
    assert min(done[kind] for kind in ("finished", "cancelled", "bad", "packs")) > 0
    # What is left: no buffer, no path, no thread but those that asyncio's requests share.
    looks = itertools.count(1)
    until(lambda: pool.used == 0 or (next(looks) % 50 == 0 and gc.collect() < 0))
    assert all(node.users == 0 for node in list(engine.engine.tree._age))
    until(lambda: sum(not each.name.startswith("kp-async") for each in threading.enumerate()) <= before)
    # Sums of three that are read one after the other; a request beyond the budget would show.
    assert max(kv for *_, kv in seen) <= BUDGET + 6 * 256 * 512
    logger.info("%s; memory, threads, KV: %s", dict(done), seen[:: max(1, len(seen) // 10)])
    if seconds >= 60:
        early, late = seen[len(seen) // 3 : len(seen) // 2], seen[-len(seen) // 4 : -3]
        was, now = ([median(column) for column in zip(*part, strict=True)] for part in (early, late))
        # oneDNN keeps up to 1,024 kernels, one for each number of rows and shape: new lengths bring new ones.
        assert now[0] <= was[0] + 300e6, "memory grows"
        assert now[1] <= was[1] + 10, "threads grow, beyond those that asyncio's requests share"
