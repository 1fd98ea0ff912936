"""Answers decoded together: the tokens of one by one, nobody held up, and turns with prefill."""

import itertools
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kp_core import PackStore, load_engine
from kp_core.engines.local import scheduler as scheduler_module
from kp_core.engines.local.buffer import TILE, KVBuffer
from kp_core.engines.local.scheduler import Decoding, Scheduler
from kp_core.errors import OptionError, PromptError
from kp_core.threads import _pause, release_openmp_threads
from tests.conftest import tiny_engine, until
from tests.kits import ARCHITECTURES, tiny_model, tiny_tokenizer
from tests.matrix import architectures

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
BOOK = "The keeper counts ships, and writes each of them into a long book. " * 4


def behind(engine, prefix, own):
    """A buffer that begins with the run `prefix`, as a request that found it in the tree has it."""
    buffer = KVBuffer(engine.model.shape, 1024)
    engine.scheduler.forward(prefix, buffer, 0)
    buffer.runs = [(7, 0, len(prefix))]
    if own:
        engine.scheduler.forward(own, buffer, 0)
    return buffer


def lengths(architecture, shared):
    """Every length on one architecture and one length on each, with every change; all of both nightly."""
    with_every_change = {("llama", each) for each in LENGTHS} | {("gpt_neox", LENGTHS[1]), ("qwen3_moe", LENGTHS[2])}
    marks = () if (architecture, shared) in with_every_change else pytest.mark.nightly
    return pytest.param(architecture, shared, marks=marks)


LENGTHS = (2 * TILE + 9, TILE + 200, 40)


@pytest.mark.parametrize(
    ("architecture", "shared"), [lengths(*pair) for pair in itertools.product(ARCHITECTURES, LENGTHS)]
)
def test_rows_are_what_each_is_alone(architecture, shared):
    """Also where rows cross the edge of a tile at different steps."""
    engine = decoding_together(architecture)
    draw = random.Random(shared)
    prefix = [draw.randrange(256) for _ in range(shared)]
    owns = [[draw.randrange(256) for _ in range(count)] for count in (3, 90, 0, 17)]
    # Two begin otherwise, and share with nobody.
    starts = [prefix, prefix, prefix[::-1], prefix, prefix[1:]]
    owns.append([5])
    together, alone = ([behind(engine, *pair) for pair in zip(starts, owns, strict=True)] for _ in range(2))
    for buffers in (together, alone):
        for row in (2, 4):
            buffers[row].runs = [(20 + row, 0, shared)]
    step_rows = engine.model.rows(together)
    for step in range(70):  # More than a tail has room for at first.
        tokens = [draw.randrange(256) for _ in owns]
        found = step_rows(tokens)
        expected = torch.cat(
            [engine.scheduler.forward([token], buffer) for token, buffer in zip(tokens, alone, strict=True)]
        )
        assert same(engine, found, expected), step
    for one, other in zip(together, alone, strict=True):
        assert one.length == other.length
        kept = [buffer.read(0, buffer.length) for buffer in (one, other)]
        sides = zip(kept[0].keys + kept[0].values, kept[1].keys + kept[1].values, strict=True)
        assert all(same(engine, mine, theirs) for mine, theirs in sides)


def decoding_together(architecture):
    engine = tiny_engine(architecture, chunk_tokens=1024).engine
    if "batch" in engine.lacks:
        pytest.skip("one by one: its attention is the library's own")
    return engine


def same(engine, one, other):
    """The same bits where the model gives them, else the same but for rounding."""
    if "bitwise" in engine.model.lacks:
        return torch.allclose(one, other, atol=1e-4)
    return torch.equal(one, other)


@architectures
def test_questions_of_any_length_in_one_pass_are_what_each_is_alone(architecture):
    engine = decoding_together(architecture)
    draw = random.Random(5)
    prefix = [draw.randrange(256) for _ in range(40)]  # More than a window of any tiny model.
    pairs = [(prefix, [draw.randrange(256) for _ in range(own)]) for own in (0, 3, 30)]
    together, alone = ([behind(engine, *pair) for pair in pairs] for _ in range(2))
    together.append(KVBuffer(engine.model.shape, 64))
    alone.append(KVBuffer(engine.model.shape, 64))
    for counts in [(1, 20, 9, 4), (33, 1, 1, 2), (1, 1, 1, 1)]:
        asked = [[draw.randrange(256) for _ in range(count)] for count in counts]
        found = engine.model.ragged(together, asked)
        expected = torch.cat([engine.scheduler.forward(ids, buffer) for ids, buffer in zip(asked, alone, strict=True)])
        assert same(engine, found, expected), counts
        assert [each.length for each in together] == [each.length for each in alone]


@architectures
@pytest.mark.parametrize("start", [40, 250, 600])  # Rows in the first tile, beyond its end, behind whole tiles.
def test_questions_behind_one_buffer_are_what_each_is_alone(architecture, start):
    engine = decoding_together(architecture)
    draw = random.Random(start)
    prefix = [draw.randrange(256) for _ in range(start)]
    shared = behind(engine, prefix, [])
    before = shared.read(0, start)
    for counts in [(1, 20, 9, 4), (33, 1, 70), (7, 7, 7), (150, 2)]:
        asked = [[draw.randrange(256) for _ in range(count)] for count in counts]
        found = engine.model.ragged([shared] * len(asked), asked)
        shared.truncate(start)
        alone = [engine.scheduler.forward(ids, behind(engine, prefix, [])) for ids in asked]
        assert same(engine, found, torch.cat(alone)), counts
    assert shared.read(0, start).equal(before)


def test_the_engine_says_which_models_decode_together():
    for name in ARCHITECTURES:
        engine = tiny_engine(name).engine
        assert ("batch" in engine.supports) == ("batch" not in engine.lacks), name


def test_all_plain_architectures_decode_together():
    assert {name for name in ARCHITECTURES if "batch" in tiny_engine(name).supports} >= {
        "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "qwen3_moe"
    }  # fmt: skip


@pytest.fixture
def asked(tmp_path):
    """An engine, a store with a long pack, and random requests."""
    engine, store = tiny_engine(chunk_tokens=1024), PackStore(tmp_path)
    handles = [str(store.put(engine.build_pack(BOOK + f"Book {number}."))) for number in range(3)]

    def requests(seed, count):
        draw = random.Random(seed)
        for number in range(count):
            options = {"max_tokens": draw.randint(1, 24)}
            if draw.random() < 0.3:
                options |= {"temperature": 0.8, "seed": draw.randrange(99)}
            if draw.random() < 0.2:
                options["stop"] = ["e"]
            if draw.random() < 0.2:
                options["response_schema"] = {
                    "type": "object",
                    "properties": {"a": {"enum": ["x", "y"]}},
                    "required": ["a"],
                }
                options["max_tokens"] = 40
            text = draw.choice([*handles, "", BOOK])
            yield f"{text}\n\nWhat of {number}?", options

    return engine, store.view("default"), requests


@pytest.mark.parametrize(
    "mixes", [5, pytest.param(50, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.nightly)]
)
def test_random_mixes_get_the_tokens_of_one_by_one(asked, mixes):
    engine, view, requests = asked
    draw, known = random.Random(mixes), list(requests(mixes, 15 if mixes < 50 else 60))

    def ask(at):
        return engine.generate(known[at][0], view=view, **known[at][1]).token_ids

    engine.clear_cache()
    one = [ask(at) for at in range(len(known))]
    for _ in range(mixes):
        mixed = draw.choices(range(len(known)), k=draw.randint(2, 9))
        if draw.random() < 0.5:
            engine.clear_cache()
        with ThreadPoolExecutor(len(mixed)) as pool:
            assert list(pool.map(ask, mixed)) == [one[at] for at in mixed]


def passes(engine, monkeypatch):
    """What the scheduler computes from here on: how many rows each step has, `-1` for a chunk of a prompt."""
    seen, scheduler = [], engine.engine.scheduler
    logits, prefill = scheduler._logits, scheduler.prefill
    monkeypatch.setattr(scheduler, "_logits", lambda batch: seen.append(len(batch)) or logits(batch))
    monkeypatch.setattr(scheduler, "prefill", lambda tokens: seen.append(-1) or prefill(tokens))
    return seen


def test_answers_fall_into_step(monkeypatch):
    # On a busy machine, too, none comes late.
    monkeypatch.setattr(scheduler_module, "_PATIENCE", 100.0)
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=64)
    scheduler = engine.engine.scheduler
    seen = passes(engine, monkeypatch)
    start = threading.Barrier(4)

    def ask(number):
        buffer = KVBuffer(engine.engine.model.shape, 128)
        engine.engine.scheduler.forward([1, 2, 3 + number], buffer, 0)
        decoding = Decoding(buffer)
        start.wait()
        for _ in range(60):
            scheduler.step(decoding, 5)
        scheduler.leave(decoding)

    seen.clear()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    steps = [rows for rows in seen if rows > 0]
    assert sum(steps) == 240
    assert sum(steps) / len(steps) >= 3.0


def test_who_went_on_alone_comes_back_with_all_its_keys():
    engine = tiny_engine(chunk_tokens=1024).engine
    prefix = [number * 7 % 256 for number in range(TILE + 60)]
    together, alone = ([Decoding(behind(engine, prefix, [row, 3])) for row in range(3)] for _ in range(2))
    scheduler, token = Scheduler(engine.model), itertools.cycle(range(1, 200, 3))
    for rows in [(0, 1, 2), (0, 1, 2), (1,), (0, 1, 2), (2,), (2,), (0, 1), (0, 1, 2)]:
        for row in rows:
            together[row].tokens = alone[row].tokens = (next(token),)
        found = scheduler._logits([together[row] for row in rows])
        expected = [engine.scheduler.forward(alone[row].tokens, alone[row].buffer) for row in rows]
        assert same(engine, found, torch.cat(expected)), rows


def test_openmp_lets_go_and_computes_again():
    big = torch.randn(600, 600, generator=torch.Generator().manual_seed(0))
    expected = big @ big

    def compute():
        found = []
        for _ in range(3):
            found.append(big @ big)
            release_openmp_threads()
        return all(torch.equal(each, expected) for each in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(job.result() for job in [pool.submit(compute) for _ in range(8)])
    assert compute()
    if sys.platform == "linux" and torch.backends.openmp.is_available():
        assert _pause()(1) == 0, "torch's libgomp is found, and does it"


def test_a_reader_that_pauses_holds_nobody_up():
    engine = tiny_engine(chunk_tokens=1024)
    paused = engine.stream(BOOK, max_tokens=50, temperature=1.0, seed=1)
    next(paused.deltas())
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(engine.generate, f"Hello {number}", max_tokens=20) for number in range(2)]
        assert all(job.result(timeout=30) for job in jobs)
    assert paused.result().usage.completion_tokens > 0


class Plain:
    """A model that computes nothing, and notes what it was asked for."""

    def __init__(self, *, batches=True):
        self.lacks, self.log = {} if batches else {"batch": "for a test"}, []

    def forward(self, _ids, _buffer, logits=1):
        self.log.append(1)
        time.sleep(0.01)
        return torch.zeros(logits, 4)

    def rows(self, buffers):
        def step(tokens):
            self.log.append(len(buffers))
            time.sleep(0.01)
            return torch.zeros(len(tokens), 4)

        return step

    def ragged(self, buffers, tokens):
        self.log.append([len(each) for each in tokens])
        time.sleep(0.01)
        return torch.zeros(len(buffers), 4)


def test_prefill_and_decoding_take_turns():
    model = Plain(batches=False)
    scheduler = Scheduler(model)
    stop = threading.Event()

    def decode():
        decoding = Decoding(None)
        while not stop.is_set():
            scheduler.step(decoding, 1)

    reader = threading.Thread(target=decode)
    reader.start()
    until(lambda: model.log)
    for _ in range(10):
        with scheduler.prefill(1024):
            model.log.append("chunk")
            until(lambda: scheduler._waiting)
    stop.set()
    reader.join()
    chunks = [at for at, what in enumerate(model.log) if what == "chunk"]
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(chunks)), model.log


def test_short_questions_that_come_together_go_before_a_step_that_is_one_for_all(monkeypatch):
    # On a busy machine, too, none comes late.
    monkeypatch.setattr(scheduler_module, "_BURST", 60.0)
    monkeypatch.setattr(scheduler_module, "_GRACE", 10.0)
    model = Plain()
    scheduler, turn = Scheduler(model), threading.Lock()
    start = threading.Barrier(6)

    def ask(_):
        start.wait()
        with scheduler.coming(), turn, scheduler.prefill(20):
            time.sleep(0.05)
            model.log.append("question")
        decoding = Decoding(None)
        for _ in range(10):
            scheduler.step(decoding, 1)
        scheduler.leave(decoding)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert model.log[:6] == ["question"] * 6
    assert model.log[6] >= 5, "whoever was brought in last may come a moment later"


def test_questions_that_come_together_are_one_pass(monkeypatch):
    monkeypatch.setattr(scheduler_module, "_BURST", 60.0)
    monkeypatch.setattr(scheduler_module, "_GRACE", 10.0)
    model = Plain()
    scheduler, turn, start = Scheduler(model), threading.Lock(), threading.Barrier(6)

    def ask(number):
        start.wait()
        with scheduler.coming(), turn:
            time.sleep(0.02)
            assert scheduler.may_join(20 + number)
            assert not scheduler.may_join(200)
        decoding = Decoding(None)
        scheduler.step(decoding, *range(20 + number))
        assert decoding.logits is not None
        scheduler.step(decoding, 1)
        scheduler.leave(decoding)

    with ThreadPoolExecutor(6) as pool:
        with scheduler.coming():
            jobs = [pool.submit(ask, number) for number in range(6)]
            until(lambda: len(scheduler._waiting) == 6)
        for job in jobs:
            job.result()
    assert sorted(model.log[0]) == [20, 21, 22, 23, 24, 25]


def test_questions_asked_together_get_their_own_tokens_and_leave_no_other_bits(tmp_path, monkeypatch):
    engine, store = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=64), PackStore(tmp_path)
    options = {"view": store.view("default"), "max_tokens": 12}
    handle = str(store.put(engine.build_pack(BOOK)))
    asked = [f"{handle}\n\nWhat of {number}{' ships' * number}?" for number in range(6)]
    alone = [engine.generate(each, **options) for each in asked]
    engine.clear_cache()
    engine.prefill(handle, view=options["view"])
    counts, ragged = [], engine.engine.model.ragged
    monkeypatch.setattr(
        engine.engine.model, "ragged", lambda *each: counts.append([*map(len, each[1])]) or ragged(*each)
    )
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda each: engine.generate(each, **options), asked))
        assert [each.token_ids for each in found] == [each.token_ids for each in alone]
        assert [each.usage.computed_tokens for each in found] == [
            len(each.prompt.token_ids) - each.usage.reused_tokens for each in found
        ]
    assert any(sum(count > 1 for count in each) > 1 for each in counts), counts
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(found, alone, strict=True))


def test_prompts_that_wait_for_something_else_hold_steps_up_once(monkeypatch):
    monkeypatch.setattr(scheduler_module, "_GRACE", 1.0)
    scheduler = Scheduler(Plain())
    with scheduler.prefill(20):
        pass
    waited = []
    with scheduler.coming():
        for _ in range(3):
            began = time.monotonic()
            scheduler.step(Decoding(None), 1)
            waited.append(time.monotonic() - began >= 0.9)
    assert waited == [True, False, False]


def test_a_stream_of_short_questions_stops_no_answer(monkeypatch):
    monkeypatch.setattr(scheduler_module, "_BURST", 0.1)
    model = Plain()
    scheduler, stop = Scheduler(model), threading.Event()

    def ask():
        while not stop.is_set():
            with scheduler.coming(), scheduler.prefill(20):
                time.sleep(0.01)

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(ask) for _ in range(3)]
        began = time.monotonic()
        try:
            for _ in range(3):
                scheduler.step(Decoding(None), 1)
        finally:
            took = time.monotonic() - began
            stop.set()
        for job in jobs:
            job.result()
    assert took < 15


def test_an_error_of_a_step_reaches_all_who_wait_and_no_others(monkeypatch):
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=64)
    model = engine.engine.model
    assert "batch" not in model.lacks
    monkeypatch.setattr(type(model), "rows", lambda *_: (_ for _ in ()).throw(MemoryError("no room for rows")))
    failed = []

    def ask(number):
        try:
            return engine.generate(f"Hello {number}", max_tokens=40, temperature=1.0, seed=number).text
        except MemoryError as error:
            failed.append(error)
            return None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(8)))
    assert failed
    monkeypatch.undo()
    assert engine.generate("Hello", max_tokens=5).usage.completion_tokens > 0


def test_many_requests_come_as_they_are_done_and_an_interrupted_run_goes_on(asked):
    engine, view, requests = asked
    texts = {number: text for number, (text, _) in enumerate(requests(1, 12))}
    expected = {number: engine.generate(text, view=view, max_tokens=6).text for number, text in texts.items()}
    found = {}
    for key, answer in engine.generate_many(texts, at_once=4, view=view, max_tokens=6, progress=False):
        found[key] = answer.text
        if len(found) == 5:
            break
    rest = engine.generate_many(texts.items(), done=found, at_once=4, view=view, max_tokens=6, progress=False)
    rest = {key: answer.text for key, answer in rest}
    assert not set(rest) & set(found)
    assert found | rest == expected
    with pytest.raises(OptionError, match="'a' has no messages"):
        engine.generate_many({"a": {"max_tokens": 3}})
    for option in ({"at_once": 0}, {"at_once": "2"}, {"done": None}):
        with pytest.raises(OptionError, match="Got {}={!r}; expected".format(*next(iter(option.items())))):
            engine.generate_many({}, **option)
    for wrong in ("Hello", "ab", {"role": "user", "content": "Hello"}):
        with pytest.raises(OptionError, match="expected a pair of its key and a conversation"):
            engine.generate_many([wrong])
    for talk in (5, [5], [["user", "Hello"]]):
        with pytest.raises(PromptError):
            list(engine.generate_many({"a": talk}, progress=False))
    with pytest.raises(OptionError, match="temprature"):
        list(engine.generate_many({"a": "Hello"}, temprature=1.0, progress=False))
