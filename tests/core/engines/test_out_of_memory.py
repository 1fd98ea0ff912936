"""A device that runs out of memory in the middle of a pass: once, always, or for some requests alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kp_core import KVTensors, PackStore, load_engine
from kp_core.engines.local.buffer import KVBuffer
from kp_core.errors import ModelError
from tests.composers import Firsts
from tests.kits import tiny_model, tiny_tokenizer
from tests.parity.families import model_of

TEXT = "Pier 7 has 12 boats, and pier 8 has 3. " * 3
ASKED = f"{TEXT}\nHow many boats?"


class Device:
    """Makes passes of a model fail in its last layer, after the first one has written its keys."""

    def __init__(self, engine, monkeypatch):
        layer = engine.engine.model.network.model.layers[-1]
        compute = layer.forward
        self.fails, self.passes, self.error = lambda *_: False, 0, torch.OutOfMemoryError("CUDA out of memory.")

        def forward(hidden, *args, **kwargs):
            self.passes += 1
            if self.fails(hidden, kwargs.get("position_ids")):
                raise self.error
            return compute(hidden, *args, **kwargs)

        monkeypatch.setattr(layer, "forward", forward)

    def fail_at(self, *numbers):
        start = self.passes
        self.fails = lambda *_: self.passes - start in numbers


@pytest.fixture
def engine():
    return load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=64, cache_bytes=20_000_000)


@pytest.fixture
def device(engine, monkeypatch):
    return Device(engine, monkeypatch)


PACKS = [f"Quay {number} has {number} cranes.\n" for number in range(1, 4)]
WAYS = {
    "answer": lambda engine: engine.generate(ASKED, max_tokens=4).token_ids,
    "packs": lambda engine: [pack.kv.values[-1].sum().item() for pack in engine.build_packs(PACKS, progress=False)],
    "steering": lambda engine: engine.make_steering([("I am glad.", "I am sad.")], progress=False).id,
    **{
        name: lambda engine, composer=composer: (
            engine.generate(
                ASKED,
                packs=[engine.build_pack(text, compiled_for="system") for text in PACKS],
                composer=composer,
                max_tokens=2,
            ).token_ids
        )
        for name, composer in {"splice": "splice", "firsts": Firsts(), "select": "select:packs=2"}.items()
    },
}
"""Everything that runs the model for a request."""


@pytest.mark.parametrize("way", WAYS)
def test_whichever_pass_fails_the_result_is_the_same(way, engine, device):
    compute = WAYS[way]
    expected, passes = compute(engine), device.passes
    engine.clear_cache()
    assert compute(engine) == expected
    passes = device.passes - passes
    for at in range(1, passes + 1):
        engine.clear_cache()
        device.fail_at(at)
        assert compute(engine) == expected, at
    assert device.passes > passes * passes
    device.fail_at(*range(10**6))
    with pytest.raises(ModelError, match="too little memory"):
        engine.clear_cache() or compute(engine)


@pytest.mark.parametrize(
    "said", ["MPS backend out of memory (MPS allocated: 9 GB)", "CUBLAS_STATUS_ALLOC_FAILED", None]
)
def test_other_libraries_say_it_in_other_words(said, engine, device):
    device.error = RuntimeError(said or "The sizes do not match.")
    device.fail_at(1)
    if said:
        assert engine.generate("Hi", max_tokens=2).usage.completion_tokens > 0
    else:
        with pytest.raises(RuntimeError, match="do not match"):
            engine.generate("Hi", max_tokens=2)


def assert_tree_is_right(engine, ids):
    """What the tree has of these tokens is their KV."""
    path = engine.tree.match(ids, logits=False)
    path.release()
    buffer = KVBuffer(engine.model.shape, len(ids))
    engine.model.forward(ids, buffer)
    if path.held:
        torch.testing.assert_close(KVTensors.concat(kv for _, kv in path.held).keys, buffer.read(0, path.tokens).keys)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 9])
def test_a_pass_that_fails_once_is_tried_again_with_more_memory(engine, device, at):
    """In the first or last pass over the prompt, and in the middle of the answer."""
    expected = engine.generate(ASKED, max_tokens=8, reuse=False)
    other = "Something else, which nobody reads any more."
    assert [engine.prefill(other).usage.computed_tokens > 0 for _ in range(2)] == [True, False]
    device.fail_at(at)
    answer = engine.generate(ASKED, max_tokens=8)
    assert answer.token_ids == expected.token_ids
    assert torch.equal(answer.logits, expected.logits)
    device.fail_at()
    assert engine.prefill(other).usage.computed_tokens > 0  # It was freed.
    assert engine.generate(ASKED, max_tokens=8).token_ids == expected.token_ids


@pytest.mark.parametrize("first", [1, 5])
def test_a_request_that_cannot_be_computed_fails_alone(engine, device, first):
    """Before the first token, and after some: nothing of the failed pass is found later."""
    expected = engine.generate(ASKED, max_tokens=8, reuse=False)
    device.fail_at(*range(first, 100))
    with pytest.raises(ModelError, match="too little memory"):
        engine.generate(ASKED, max_tokens=8)
    device.fail_at()
    assert_tree_is_right(engine.engine, expected.prompt.token_ids + expected.token_ids)
    assert engine.generate(ASKED, max_tokens=8).token_ids == expected.token_ids
    assert engine.engine.pool.used == 0


def test_of_answers_decoded_together_only_the_one_without_room_fails(engine, device):
    """A step of several that fails is computed one by one; the one that fails again gets the error."""
    requests = {number: f"{number}? " * (1 + 30 * (number == 2)) for number in range(1, 5)}
    alone = {number: engine.generate(asked, max_tokens=24).token_ids for number, asked in requests.items()}

    def together():
        """The answers or errors by number, and the numbers of rows of the steps that failed."""
        device.fail_at()
        engine.clear_cache()
        streams = {number: engine.stream(asked, max_tokens=24) for number, asked in requests.items()}
        deltas = {number: stream.deltas() for number, stream in streams.items()}
        for pieces in deltas.values():
            next(pieces)
        failed_rows = []

        def fails(hidden, positions):
            is_step_of_long = hidden.shape[1] <= len(requests) and int(positions.max()) > 64
            failed_rows.extend([hidden.shape[1]] * is_step_of_long)
            return is_step_of_long

        device.fails = fails
        with ThreadPoolExecutor(len(deltas)) as pool:
            jobs = {number: pool.submit(list, pieces) for number, pieces in deltas.items()}
        errors = [number for number, job in jobs.items() if isinstance(job.exception(), ModelError)]
        return streams, errors, failed_rows

    for _ in range(20):  # On a busy machine, the long one may come alone.
        streams, errors, failed_rows = together()
        assert errors == [2]
        if max(failed_rows) > 1:
            break
    assert max(failed_rows) > 1
    assert failed_rows.count(1) == 1
    for number in (1, 3, 4):
        assert streams[number].result().token_ids == alone[number]
    device.fail_at()
    assert engine.generate(requests[2], max_tokens=24).token_ids == alone[2]


def test_packs_that_do_not_fit_into_one_pass_are_built_alone(engine, device):
    texts = [f"Pier {number} has {number * 3} boats.\n" for number in range(4)]
    expected = [engine.build_pack(text).kv for text in texts]
    engine.clear_cache()
    device.fails = lambda hidden, _: hidden.shape[1] > 64
    packs = list(engine.build_packs(texts, progress=False))
    assert all(pack.kv.equal(kv) for pack, kv in zip(packs, expected, strict=True))


def test_states_that_a_failed_pass_wrote_over_are_not_gone_on_from(monkeypatch, tmp_path):
    """A prompt is computed anew; an answer under way fails, and what is left of it is right."""
    engine = load_engine(model_of("qwen3_next"), tokenizer=tiny_tokenizer(), chunk_tokens=64, cache_bytes=20_000_000)
    device, store = Device(engine, monkeypatch), PackStore(tmp_path)
    handle = store.put(engine.build_pack(TEXT))
    options = {"view": store.view("default"), "max_tokens": 6}
    expected = engine.generate(ASKED, max_tokens=6, reuse=False).token_ids
    asked = f"{handle}\nHow many boats?"
    device.fail_at(1)
    assert engine.generate(asked, **options).token_ids == expected
    engine.clear_cache()
    device.fail_at(*range(4, 100))
    with pytest.raises(ModelError, match="too little memory"):
        engine.generate(asked, **options)
    device.fail_at()
    assert engine.generate(asked, **options).token_ids == expected
