"""Recorded steps of decoding: replayed, they give the tokens of plain ones. A CPU stands in for CUDA's graphs."""

import gc
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from weakref import finalize

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kp_core import load_engine
from kp_core.engines.hf.probe import use_replay
from kp_core.engines.hf.replay import PLAIN_PASSES, ReplayedRows
from kp_core.engines.local.buffer import KVBuffer
from tests.kits import tiny_model, tiny_tokenizer
from tests.parity.families import model_of

_NEEDS_HOST = ("nonzero", "equal", "masked_select", "unique")
_MORE = ("qwen3", "gemma", "phi3", "mistral")
_STEPS = 40
_REFUSED = "operation not permitted when stream is capturing"


class Host(TorchFunctionMode):
    """Refuses to give the host a number, as CUDA does while it captures."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__"):
            raise RuntimeError(f"{func}: {_REFUSED}")
        return func(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Notes the calls of a step with their tensors. As CUDA, it refuses those for which the host must wait."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in _NEEDS_HOST):
            raise RuntimeError(f"{func}: {_REFUSED}")
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output


class Recorder:
    """Records as `captured` does: the calls of a replay read and write the memory of the recorded ones."""

    def __init__(self):
        self.recorded = self.replayed = self.most_rows = 0

    def __call__(self, step):
        calls = Calls()
        with Host(), calls:
            output = step()
        self.recorded, self.most_rows = self.recorded + 1, max(self.most_rows, len(output))

        def run():
            self.replayed += 1
            for func, args, kwargs, outputs in calls.calls:
                for saved, found in zip(tree_leaves(outputs), tree_leaves(func(*args, **kwargs)), strict=True):
                    is_same = isinstance(saved, torch.Tensor) and saved.data_ptr() == found.data_ptr()
                    if isinstance(saved, torch.Tensor) and not is_same:
                        saved.copy_(found)
            return output

        return run


def model_with_rows(kind):
    source = tiny_model(kind) if kind in ("llama", "qwen3", "gemma", "phi3") else model_of(kind)
    return load_engine(source, tokenizer=tiny_tokenizer(), chunk_tokens=64, cache_bytes=20_000_000)


@pytest.mark.parametrize(
    "kind",
    ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", *(pytest.param(kind, marks=pytest.mark.slow) for kind in _MORE)],
)
def test_replayed_rows_are_plain_ones(kind):
    """Within windows and behind them, for rows that differ."""
    model, draw, record = model_with_rows(kind).engine.model, random.Random(0), Recorder()
    starts = [[draw.randrange(256) for _ in range(size)] for size in (1, 30, 64, 230)]
    both = [[KVBuffer(model.shape, 512) for _ in starts] for _ in range(2)]
    for buffers in both:
        for buffer, ids in zip(buffers, starts, strict=True):
            for layer in buffer.layers:  # As new memory may be.
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
            model.forward(ids, buffer, logits=0)
    replayed = ReplayedRows(model, both[0], record)
    for step in range(_STEPS):
        tokens = [draw.randrange(256) for _ in starts]
        found = replayed.step(both[0], [[token] for token in tokens])
        expected = [model.forward([token], buffer) for token, buffer in zip(tokens, both[1], strict=True)]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4, msg=f"step {step}")
    for one, other in zip(*both, strict=True):
        assert one.length == other.length
        torch.testing.assert_close(one.read(0, one.length).keys, other.read(0, other.length).keys, rtol=1e-4, atol=1e-4)
    assert record.recorded == 1
    assert record.replayed == _STEPS - PLAIN_PASSES


@pytest.mark.slow
def test_answers_are_the_same_alone_and_together():
    engine, record = model_with_rows("llama"), Recorder()
    model = engine.engine.model
    assert model.replays is None  # A CPU has no graphs.
    asked = [f"How many boats are in harbour {number}?" for number in range(4)]
    plain = [engine.generate(text, max_tokens=40, logprobs=True) for text in asked]
    expected = [answer.token_ids for answer in plain]
    use_replay(model, record)
    assert model.replays.record is record
    assert "batch" not in model.lacks
    for at_once in (1, 4):
        engine.clear_cache()
        record.replayed = record.most_rows = 0
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda text: engine.generate(text, max_tokens=40, logprobs=True), asked))
        assert [answer.token_ids for answer in answers] == expected
        for answer, before in zip(answers, plain, strict=True):
            found, wanted = ([token.logprob for token in each.logprobs] for each in (answer, before))
            assert found == pytest.approx(wanted, abs=1e-4)
        assert record.replayed > 0
        assert (record.most_rows > 1) == (at_once > 1)
    # Later answers get the same buffers, and then the same recorded steps. They end with the buffers.
    recorded = []
    for _ in range(12):
        engine.engine.tree.clear()
        for text in asked:
            engine.generate(text, max_tokens=40)
        recorded.append(record.recorded)
    assert recorded[-1] == recorded[-2]
    assert model.replays._together
    engine.clear_cache()
    gc.collect()
    assert not model.replays._together
    # What was decoded so is reused as any other KV.
    engine.generate(asked[0], max_tokens=40)
    again = engine.generate(asked[0], max_tokens=40)
    assert again.usage.computed_tokens == 0
    assert again.token_ids == expected[0]


def test_questions_are_replayed_for_every_request_that_gets_the_buffer(monkeypatch):
    """Of any length up to the width, behind other packs, and after the buffer held something else."""
    engine, record = model_with_rows("llama"), Recorder()
    model, asked = engine.engine.model, "How many boats are in the harbour?"
    packs = [engine.build_pack(f"{text} " * 20, compiled_for="system") for text in ("Pier 1 has 5 boats.", "It rains.")]
    requests = [(packs[number % 2], asked + " Why?" * number) for number in range(8)]

    def answers():
        return [engine.generate(text, packs=[pack], max_tokens=6, logprobs=True).logits for pack, text in requests]

    expected = answers()
    use_replay(model, record)
    engine.clear_cache()
    answers()
    engine.engine.tree.clear()  # The buffers stay in the pool.
    before, record.replayed = record.recorded, 0
    torch.testing.assert_close(answers(), expected, rtol=1e-4, atol=1e-4)
    assert record.replayed > 8 * 5
    assert record.recorded - before < 4


def test_a_model_that_cannot_be_recorded_decodes_plainly_and_says_why(monkeypatch, caplog):
    """A layer asks the host."""
    engine, record = model_with_rows("llama"), Recorder()
    layer = engine.engine.model.network.model.layers[0]
    compute = layer.forward
    monkeypatch.setattr(layer, "forward", lambda hidden, **more: compute(hidden + 0 * hidden.sum().item(), **more))
    expected = engine.generate("How many boats?", max_tokens=8).token_ids
    with caplog.at_level(logging.WARNING, logger="kp_core"):
        use_replay(engine.engine.model, record)
    assert engine.engine.model.replays is None
    assert "are not recorded: " in caplog.text
    assert engine.generate("How many boats?", max_tokens=8).token_ids == expected
    assert record.replayed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_record_that_does_not_read_its_input_again_is_not_used(dtype, caplog):
    engine = load_engine(tiny_model("llama", dtype), tokenizer=tiny_tokenizer())

    def frozen(step):
        output = step()
        return lambda: output

    with caplog.at_level(logging.WARNING, logger="kp_core"):
        use_replay(engine.engine.model, frozen)
    assert engine.engine.model.replays is None
    assert "they give other logits" in caplog.text


def test_a_step_that_stops_being_recordable_goes_on_plainly(monkeypatch, caplog):
    engine = model_with_rows("llama")
    model = engine.engine.model
    expected = engine.generate("How many boats?", max_tokens=8).token_ids
    use_replay(model, Recorder())

    def fails(step):
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    model.replays.record = fails
    with caplog.at_level(logging.WARNING, logger="kp_core"):
        assert engine.generate("How many boats?", max_tokens=8).token_ids == expected
    assert "during capture" in caplog.text


def test_no_recorded_pass_is_freed_while_another_is_recorded():
    """CUDA ends the recording. The garbage collector may free one at any line that makes objects."""
    engine, record, freed = model_with_rows("llama"), Recorder(), []

    class Graph:
        def __init__(self):
            self.itself = self
            finalize(self, freed.append, "freed")

    def recording(step):
        Graph()
        made = [[] for _ in range(200_000)]  # Makes the collector look.
        assert made
        assert not freed
        return record(step)

    use_replay(engine.engine.model, recording)
    assert record.recorded
    gc.collect()
    assert freed
    assert gc.isenabled()
