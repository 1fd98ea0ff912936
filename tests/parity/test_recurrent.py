"""Models with recurrent layers: reuse goes to where their states are kept, and what cannot be done is refused."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import RecurrentGemmaConfig

import kp_core.engines.hf.kinds
from kp_core import PackStore, load_engine
from kp_core.engines.hf.kinds import kind_of
from kp_core.engines.hf.probe import probed
from kp_core.errors import ModelError, UnsupportedRequestError
from kp_core.steering import Steering
from kp_methods.edit import amend, overwrite
from tests.kits import NaiveComposer, tiny_tokenizer
from tests.parity.families import model_of
from tests.parity.test_models import DTYPES, PAIRS, ask, letters

CHUNK = 48
KINDS = ("falcon_h1", "lfm2", "mamba2", "qwen3_next")


def engine_of(kind, dtype=torch.float32, cache_bytes=20_000_000):
    return load_engine(model_of(kind, dtype), tokenizer=tiny_tokenizer(), chunk_tokens=CHUNK, cache_bytes=cache_bytes)


def same_cold(engine, messages, **options):
    """Usage of a warm prefill, whose logits are those of a cold one bit for bit."""
    warm = engine.prefill(messages, **options)
    assert torch.equal(warm.logits, engine.prefill(messages, **options, reuse=False).logits)
    return warm.usage


@pytest.mark.parametrize("kind", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_warm_is_cold_whatever_came_before(kind, dtype, tmp_path):
    """Conversations that share beginnings, in any order, in a cache with room for few of them."""
    engine = engine_of(kind, DTYPES[dtype], cache_bytes=150_000)
    store, draw = PackStore(tmp_path), random.Random(0)
    handles = [
        str(store.put(engine.build_pack(letters(count, count) + ".\n", namespace="n"))) for count in (30, 70, 130)
    ]
    begun = [ask(letters(draw.randrange(5, 120), at)) for at in range(3)] + [ask(f"{each}\nA?") for each in handles]
    reused = 0
    for at in range(15):
        messages = draw.choice(begun)
        if draw.random() < 0.6 and len(messages) < 6:
            answer = engine.generate(messages, view=store.view("n"), max_tokens=draw.randrange(1, 9))
            content = draw.choice([answer.text or "x", letters(12, at)])
            more = draw.choice([letters(20, at), f"{draw.choice(handles)}\nB?"])
            messages = [*messages, {"role": "assistant", "content": content}, *ask(more)]
            begun.append(messages)
        reused += same_cold(engine, messages, view=store.view("n")).reused_tokens
    assert reused > 200


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_goes_to_the_ends_of_messages_and_packs(kind, tmp_path):
    engine, store = engine_of(kind), PackStore(tmp_path)
    text = letters(4 * CHUNK)
    first = engine.prefill(ask(text))
    assert engine.cached_bytes < 2 * engine.state_bytes + len(first.prompt) * engine.bytes_per_token + 268 * 4 + 1
    # The chunks are the same, but no state is kept within a message.
    assert same_cold(engine, ask(text[:-1] + "!")).reused_tokens < CHUNK
    messages = [*ask(text), {"role": "assistant", "content": "x"}, *ask("y")]
    assert same_cold(engine, messages).reused_tokens > 4 * CHUNK
    pack = engine.build_pack(text + ".\n", namespace="n")
    assert len(pack.token_ids) > 2 * CHUNK
    assert pack.kv.state_bytes == engine.state_bytes > 0
    handle = store.put(pack)
    engine.clear_cache()
    for question in ("A?", "B?"):
        usage = same_cold(engine, ask(f"{handle}\n{question}"), view=store.view("n"))
        assert usage.reused_tokens >= usage.pack_tokens == len(pack.token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_gone_on_from_behind_its_last_token(kind):
    """Behind decoded tokens there is one state; a conversation that leaves the answer before it is computed."""
    engine = engine_of(kind)
    messages = ask(letters(60))
    answer = engine.generate(messages, max_tokens=6)
    whole = [*messages, {"role": "assistant", "content": answer.text}, *ask("B?")]
    found = engine.prefill(whole)
    cold = engine.prefill(whole, reuse=False)
    torch.testing.assert_close(found.logits, cold.logits, rtol=1e-3, atol=1e-3)
    again = engine.generate(messages, max_tokens=6)
    assert again.token_ids == answer.token_ids
    assert again.usage.computed_tokens == 0
    short = [*messages, {"role": "assistant", "content": answer.text[:2]}, *ask("B?")]
    found, cold = engine.prefill(short), engine.prefill(short, reuse=False)
    torch.testing.assert_close(found.logits, cold.logits, rtol=1e-3, atol=1e-3)


def test_a_pack_without_states_is_computed_from_its_text(tmp_path):
    engine = engine_of("qwen3_next")
    pack = engine.build_pack(letters(70) + ".\n", namespace="n")
    bare = replace(pack, kv=replace(pack.kv, states=()))
    wrong = replace(pack, kv=replace(pack.kv, states=pack.kv.states[:1]))
    for name, each in {"whole": pack, "bare": bare, "wrong": wrong}.items():
        engine.clear_cache()
        store = PackStore(tmp_path / name)
        usage = same_cold(engine, ask(f"{store.put(each)}\nA?"), view=store.view("n"))
        assert (usage.reused_tokens >= len(pack.token_ids)) == (name == "whole")


@pytest.mark.parametrize("compress", ["none", "lossless"])
def test_states_behind_other_packs_are_kept_in_the_store(tmp_path, compress):
    """A second engine reads what the first one computed, and goes on as a cold run would."""
    store = PackStore(tmp_path)
    first, second = engine_of("falcon_h1"), engine_of("falcon_h1")
    packs = [first.build_pack(letters(120, at) + ".\n", namespace="n", compress=compress) for at in (0, 5)]
    one, other = (store.put(pack) for pack in packs)
    options = {"view": store.view("n"), "keep": "always"}
    first.generate(ask(f"{one}\n\n{other}\nA?"), **options, max_tokens=2)
    assert list(store.kept())
    found = second.prefill(ask(f"{one}\n\n{other}\nB?"), **options)
    assert found.usage.reused_tokens > len(packs[0].token_ids) + CHUNK
    assert torch.equal(found.logits, second.prefill(ask(f"{one}\n\n{other}\nB?"), **options, reuse=False).logits)


def test_the_next_process_goes_on_behind_a_head_and_behind_a_conversation(tmp_path):
    first, view = engine_of("falcon_h1"), PackStore(tmp_path).view("n")
    system = {"role": "system", "content": letters(300)}
    asked = [system, *ask("A?" * 20)]
    answer = first.generate(asked, view=view, keep="always", max_tokens=2)
    head, known = answer.prompt.breaks[0], len(answer.prompt)
    said = {"role": "assistant", "content": answer.text or "x"}
    for messages, reused in [([*asked, said, *ask("B?")], known), ([system, *ask("C?" * 20)], head)]:
        assert same_cold(engine_of("falcon_h1"), messages, view=view).reused_tokens == reused


def test_what_states_cost_is_told():
    engine = engine_of("qwen3_next")
    # A recurrent state of 4 heads of 8 by 8 numbers, and 3 tokens behind the last one of 64 channels; float32.
    assert engine.state_bytes == (4 * 8 * 8 + 64 * 4) * 4


@pytest.mark.parametrize("kind", ["lfm2", "mamba2"])
def test_what_states_do_not_allow_is_refused_with_the_reason(kind, tmp_path):
    engine, store = engine_of(kind), PackStore(tmp_path)
    packs = [engine.build_pack(f"A {letters(70, at)}.\n", namespace="m") for at in (0, 3)]
    one, other = map(store.put, packs)
    assert {"compose", "steer"}.isdisjoint(engine.engine.supports)
    for composer in ("splice", NaiveComposer(), "select:packs=1"):
        with pytest.raises(UnsupportedRequestError, match="recurrent state"):
            engine.generate(f"{one}\n\n{other}\nA?", view=store.view("m"), composer=composer)
    with pytest.raises(UnsupportedRequestError, match="cannot edit packs"):
        overwrite(packs[0], "A", "The", engine)
    with pytest.raises(UnsupportedRequestError, match="stay where they were computed"):
        engine.engine.model.rope  # noqa: B018
    with pytest.raises(UnsupportedRequestError, match="recurrent state"):
        engine.make_steering(PAIRS, progress=False)
    steering = Steering({0: torch.ones(2, 8)}, engine.fingerprint)
    with pytest.raises(UnsupportedRequestError, match="no values to alter"):
        engine.generate("A?", steering=steering)


def test_an_erratum_is_computed_behind_the_state_of_its_pack(tmp_path):
    engine, store = engine_of("lfm2"), PackStore(tmp_path)
    pack = engine.build_pack("The lighthouse keeper counted nine ships in June.\n", namespace="n")
    now = amend(pack, "nine", "ten", engine, squash_above=9)
    usage = same_cold(engine, ask(f"{store.put(now)}\nHow many?"), view=store.view("n"))
    assert usage.reused_tokens >= len(now.token_ids) > len(pack.token_ids)


def test_a_model_that_does_not_go_on_from_its_states_is_found_out(monkeypatch):
    """By name before its weights are read, and else by what it answers."""
    with pytest.raises(ModelError, match="in a place of its own"):
        kind_of(RecurrentGemmaConfig())
    monkeypatch.setattr(kp_core.engines.hf.kinds, "_UNFIT", {})
    with pytest.raises(ModelError, match="does not go on from the states"):
        probed(model_of("mamba"))
