import asyncio
import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kp_core import PackStore, Sampling, bundled_model, load_engine
from kp_core.engines.hf.loading import name_of
from kp_core.errors import (
    ContextOverflowError,
    ModelError,
    OptionError,
    PackError,
    PackNotFoundError,
    UnsupportedRequestError,
)
from kp_core.session.reading import VisibleText
from tests.conftest import bundled_dtypes, tiny_engine, until
from tests.kits import tiny_model, tiny_tokenizer

FACT = "The lighthouse of Veyl burns blue oil. Its keeper is Orla Venn."
ASK = "\n\nWho keeps the lighthouse of Veyl? Answer with the name."


@pytest.fixture(params=["thin", pytest.param("smol", marks=pytest.mark.nightly)])
def engine(request):
    """With every change a model that answers at once; what must be real `tests/parity` asks of the bundled one."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def store(tmp_path):
    return PackStore(tmp_path)


@pytest.fixture
def asked(engine, store):
    """A question over a pack, and what it takes to resolve it."""
    handle = store.put(engine.build_pack(FACT, namespace="veyl"))
    return f"{handle}{ASK}", store.view("veyl")


def test_a_handle_gives_the_answer_of_the_text(engine, asked):
    question, view = asked
    engine.clear_cache()
    pack = engine.generate(question, view=view, max_tokens=24)
    text = engine.generate(FACT + ASK, max_tokens=24)
    assert pack.token_ids == text.token_ids
    assert pack.text == text.text
    assert pack.prompt.token_ids == text.prompt.token_ids
    assert pack.usage.pack_tokens + pack.usage.prompt_tokens == text.usage.prompt_tokens
    assert pack.usage.reused_tokens >= pack.usage.pack_tokens > 10


def test_the_same_as_plain_generate(thin, thin_model, store):
    view = store.view("veyl")
    plain = AutoModelForCausalLM.from_pretrained(thin_model, dtype=torch.float32)
    answer = thin.generate(f"{store.put(thin.build_pack(FACT, namespace='veyl'))}{ASK}", view=view, max_tokens=16)
    ids = torch.tensor([answer.prompt.token_ids])
    expected = plain.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert answer.token_ids == tuple(expected.tolist())


def test_nothing_is_computed_twice(engine, asked):
    question, view = asked
    engine.clear_cache()
    first = engine.generate(question, view=view, max_tokens=8)
    again = engine.generate(question, view=view, max_tokens=8)
    assert first.usage.computed_tokens > 0
    assert again.usage.computed_tokens == 0
    assert again.token_ids == first.token_ids
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Are you sure?"},
    ]
    second = engine.generate(turns, view=view, max_tokens=8)
    known = len(first.prompt) + len(first.token_ids) - 1
    assert second.usage.reused_tokens == known
    assert second.usage.computed_tokens == len(second.prompt) - known


def test_usage_adds_up(engine, asked):
    question, view = asked
    for request in ({}, {"reuse": False}, {"placement": "system"}, {"max_tokens": 1}):
        usage = engine.generate(question, view=view, **{"max_tokens": 4, **request}).usage
        assert usage.prompt_tokens + usage.pack_tokens == usage.reused_tokens + usage.computed_tokens
        assert 1 <= usage.completion_tokens <= 4
    assert engine.generate(question, view=view, reuse=False, max_tokens=1).usage.reused_tokens == 0


def test_prompt_tokens_stay_constant_as_memory_grows(engine):
    packs = [engine.build_pack(f"Island {n} lies {n} miles from Veyl.", compiled_for="system") for n in range(1, 11)]
    engine.clear_cache()
    sent, computed = [], []
    for count in (1, 2, 5, 10):
        usage = engine.generate("Which island is far?", packs=packs[:count], max_tokens=2).usage
        sent.append(usage.prompt_tokens)
        computed.append(usage.computed_tokens)
    assert len(set(sent)) == 1
    # The first pack comes with its KV; every later one is computed once, and the question behind it each time.
    lengths = [len(pack.token_ids) for pack in packs]
    assert sum(computed) <= 4 * sent[0] + sum(lengths[1:])


def test_streaming_joins_to_the_answer(engine, asked):
    question, view = asked
    stream = engine.stream(question, view=view, max_tokens=24)
    pieces = list(stream)
    assert "".join(pieces) == stream.generation.text
    assert len(pieces) > 3
    assert stream.generation.token_ids == engine.generate(question, view=view, max_tokens=24).token_ids


@pytest.mark.parametrize("length", [1, 3, 5])
def test_stop_strings_span_tokens(engine, asked, length):
    question, view = asked
    whole = engine.generate(question, view=view, max_tokens=24).text
    stop = whole[7 : 7 + length]
    answer = engine.generate(question, view=view, max_tokens=24, stop=[stop, "never said"])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    assert "".join(engine.stream(question, view=view, max_tokens=24, stop=[stop])) == answer.text


def test_sampling_repeats_with_its_seed(engine):
    how = {"temperature": 1.2, "top_p": 0.95, "top_k": 80, "repetition_penalty": 1.1, "max_tokens": 12}
    answers = {engine.generate("Name a colour.", seed=seed, **how).token_ids for seed in (1, 1, 2, 3)}
    assert len(answers) == 3
    assert engine.generate("Name a colour.", temperature=0.01, seed=5, max_tokens=6).token_ids == (
        engine.generate("Name a colour.", max_tokens=6).token_ids
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("stop", [""]),
    ],
)
def test_sampling_out_of_range_is_named(name, value):
    with pytest.raises(OptionError, match=name):
        Sampling(**{name: value})


def test_overflow_is_named_before_any_compute():
    engine = tiny_engine()
    with pytest.raises(ContextOverflowError, match="has 2048 positions") as caught:
        engine.stream("x" * 2000, max_tokens=100)
    assert caught.value.limit == 2048
    assert caught.value.prompt_tokens > 2000
    with pytest.raises(ContextOverflowError):
        engine.generate("x" * 2100)


def test_cancelling_stops_and_frees(smol):
    cancel = threading.Event()
    stream = smol.stream("Count to a thousand.", cancel=cancel, max_tokens=200)
    next(stream)
    cancel.set()
    assert stream.result().finish_reason == "cancelled"
    assert len(stream.generation.token_ids) < 20
    cancelled = smol.generate("Something new to prefill.", cancel=cancel, max_tokens=5)
    assert cancelled.finish_reason == "cancelled"
    assert cancelled.token_ids == ()
    stream = smol.stream("Count to a thousand.", max_tokens=200)
    next(stream)
    stream.close()
    assert all(node.users == 0 for node in smol.engine.tree._age)


@pytest.mark.slow
async def test_async_does_not_block_the_loop(smol):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    answer = await smol.agenerate("Say something long.", max_tokens=24)
    stream = smol.astream("Say something long.", max_tokens=24)
    pieces = [piece async for piece in stream]
    ticking.cancel()
    assert ticks > 10
    assert "".join(pieces) == answer.text == stream.generation.text


async def test_cancelling_the_task_stops_the_generation(smol):
    cancel = threading.Event()
    smol.clear_cache()
    task = asyncio.create_task(smol.agenerate("Count to a thousand.", max_tokens=400, cancel=cancel))
    await asyncio.to_thread(until, lambda: smol.cached_bytes)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancel.is_set()
    stream = smol.astream("Count to a thousand.", max_tokens=400)
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(until, lambda: all(node.users == 0 for node in list(smol.engine.tree._age)))


def test_threads_get_the_answers_of_one(engine, store):
    facts = [f"The bell of tower {n} weighs {n * 7} stones." for n in range(4)]
    handles = [store.put(engine.build_pack(fact, namespace="veyl")) for fact in facts]
    questions = [f"{handle}\n\nHow heavy is the bell?" for handle in handles]
    view = store.view("veyl")
    alone = [engine.generate(question, view=view, max_tokens=8, reuse=False).token_ids for question in questions]
    found = {}

    def ask(index):
        found[index] = engine.generate(questions[index % 4], view=view, max_tokens=8).token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: alone[index % 4] for index in range(8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_change_no_bit(dtype, monkeypatch):
    engine = tiny_engine(dtype=dtype)
    texts = [f"Fact {n:02d} of {40 + n}." for n in range(36)] + ["A longer text about nothing at all, over chunks."]
    passes, ragged = [], engine.engine.model.ragged
    monkeypatch.setattr(engine.engine.model, "ragged", lambda *each: passes.append(len(each[0])) or ragged(*each))
    together = list(engine.build_packs(texts, progress=False))
    assert max(passes) > 1
    engine.clear_cache()
    for text, pack in zip(texts, together, strict=True):
        alone = engine.build_pack(text)
        assert pack.text == alone.text == text
        assert pack.token_ids == alone.token_ids
        assert pack.kv.equal(alone.kv)


def test_texts_that_a_prompt_already_began_with_are_built_together():
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    long, short = "The quay has boats. " * 16, "The quay has boats. " * 8
    engine.clear_cache()
    expected = [engine.build_pack(text).kv for text in (long, short)]
    engine.generate(long, max_tokens=1)
    engine.engine.pool.clear()  # A buffer for the prefix alone is shorter than what is in memory behind it.
    packs = engine.build_packs([long, short], progress=False)
    assert all(pack.kv.equal(kv) for pack, kv in zip(packs, expected, strict=True))


@pytest.mark.parametrize("smol_of", bundled_dtypes(pytest.mark.nightly), indirect=True)
def test_batches_of_the_real_model_change_no_bit(smol_of):
    texts = [f"Bell number {n} weighs {n + 3} stones and rings." for n in range(10, 34)]
    together = list(smol_of.build_packs(texts, progress=False))
    assert len({len(pack.token_ids) for pack in together}) == 1, "one length, so that batches form"
    for text, pack in list(zip(texts, together, strict=True))[8::5]:
        assert pack.kv.equal(smol_of.build_pack(text).kv)


def test_lazy_packs_are_computed_on_first_use(engine, store):
    lazy = engine.build_pack(FACT, namespace="lazy", lazy=True)
    full = engine.build_pack(FACT, namespace="lazy")
    assert lazy.is_lazy
    assert lazy.nbytes == 0
    assert (lazy.token_ids, lazy.prefix) == (full.token_ids, full.prefix)
    engine.clear_cache()
    handle = store.put(lazy)
    answer = engine.generate(f"{handle}{ASK}", view=store.view("lazy"), max_tokens=6)
    assert answer.token_ids == engine.generate(FACT + ASK, max_tokens=6, reuse=False).token_ids


def test_packs_of_another_model_are_refused_or_rebuilt(engine, store, caplog):
    foreign = tiny_engine().build_pack(FACT, namespace="veyl")
    handle = store.put(foreign)
    question, view = f"{handle}{ASK}", store.view("veyl")
    with pytest.raises(PackError, match="weights: pack has") as caught:
        engine.generate(question, view=view)
    assert all(f"{name}: pack has" in str(caught.value) for name in ("weights", "config", "tokenizer", "chat_template"))
    with pytest.raises(PackError):
        engine.generate("Who?", packs=[foreign])
    rebuilt = engine.generate(question, view=view, mismatch="rebuild", max_tokens=8)
    assert "another model" in caplog.text
    assert rebuilt.token_ids == engine.generate(FACT + ASK, reuse=False, max_tokens=8).token_ids


def test_dtypes_do_not_mix():
    engine, rounded = tiny_engine(), tiny_engine(dtype=torch.bfloat16)
    differences = rounded.build_pack(FACT).fingerprint.diff(engine.fingerprint)
    assert differences["dtype"] == ("bfloat16", "float32")
    with pytest.raises(PackError, match="dtype: pack has bfloat16, model has float32"):
        engine.generate("Who?", packs=[rounded.build_pack(FACT)])


def test_explicit_handles_must_resolve(engine, store):
    with pytest.raises(PackNotFoundError, match="does not resolve"):
        engine.generate("Who?", packs=[f"kp:veyl/{'a' * 21}"], view=store.view("veyl"))


def test_pinning_is_refused_by_name(engine):
    with pytest.raises(UnsupportedRequestError, match=r"no `Session.pin`. It is gone in 0.3; .* cache_bytes"):
        engine.pin(engine.build_pack(FACT))


def test_the_tree_stays_within_its_budget():
    room = 200_000 + 256 * 512  # Of the tree, and a buffer.
    engine = load_engine(tiny_model("qwen3"), tokenizer=tiny_tokenizer(), chunk_tokens=16, cache_bytes=room)
    for n in range(30):
        engine.generate(f"{n} " * 40, max_tokens=3)
        assert engine.cached_bytes <= 200_000
    assert engine.cached_bytes > 100_000


def test_a_request_takes_one_buffer():
    engine = tiny_engine("mistral")
    engine.clear_cache()
    engine.generate("Hello.", max_tokens=10)
    assert engine.engine.pool.nbytes == 256 * engine.bytes_per_token


def test_a_model_object_is_left_as_it_was():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    engine = load_engine(model, tokenizer=tiny_tokenizer())
    assert model.config._attn_implementation == before
    assert engine.engine.model.network.lm_head.weight is model.lm_head.weight
    with pytest.raises(ModelError, match="without its tokenizer"):
        load_engine(model)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("minimax", {}, "recurrent states in a place of its own"),
        ("deepseek_v32", {}, "an index"),
        ("bert", {}, "an encoder"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "an encoder"),
        ("t5", {}, "encoder-decoder"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "RoPE"),
    ],
)
def test_other_caches_are_refused_with_the_reason(kind, changes, reason, tmp_path):
    AutoConfig.for_model(kind, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load_engine(tmp_path)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="there is no such file or folder"):
        load_engine(tmp_path / "nothing")
    with pytest.raises(ModelError, match="expected float32"):
        load_engine(dtype="int7")


def test_loads_a_folder_and_an_object_alike(tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
    folder, given = load_engine(tmp_path, dtype="float32", device="cpu"), load_engine(model, tokenizer=tokenizer)
    assert folder.fingerprint.diff(given.fingerprint) == {}
    other = load_engine(tiny_model("llama", seed=1), tokenizer=tokenizer)
    assert set(other.fingerprint.diff(given.fingerprint)) == {"weights"}


def test_what_the_model_says_holds_no_handles(engine):
    said = f"See kp:veyl/{'a' * 21} and kp:x, kept."
    text = VisibleText()
    pieces = [text.push(engine.tokenizer.decode(token)) for token in engine.tokenizer(said)["input_ids"]]
    pieces.append(text.flush())
    assert "".join(pieces) == "See  and kp:x, kept."


def test_an_engine_has_a_name(smol):
    assert smol.name == "SmolLM2-135M-Instruct"
    assert name_of("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert name_of(bundled_model()) == bundled_model().name
