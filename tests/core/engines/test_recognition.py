"""Texts that were sent in full, and packs that were recognised in them."""

import threading

import pytest
import torch

from kp_core import PackStore
from tests.conftest import tiny_engine, until

TEXT = "The harbour of Veyl had seven boats in spring, two of them red; the others were painted blue every year."
ASK = "\n\nHow many boats?"


@pytest.fixture
def veyl(tmp_path):
    """An engine with nothing in memory, and a store with one pack of `TEXT`."""
    engine, store = tiny_engine(), PackStore(tmp_path)
    handle = store.put(engine.build_pack(TEXT, namespace="veyl"))
    engine.clear_cache()
    return engine, store, handle


def test_the_exact_text_of_a_pack_is_read_from_its_kv(veyl):
    engine, store, handle = veyl
    view = store.view("veyl")
    found = engine.prefill(TEXT + ASK, view=view)
    [span] = found.prompt.spans
    assert span.recognised
    assert (found.usage.recognised_tokens, found.usage.pack_tokens) == (len(span), 0)
    assert found.usage.prompt_tokens == len(found.prompt), "all of it was sent"
    assert found.usage.reused_tokens >= len(span)
    engine.clear_cache()
    by_handle = engine.prefill(f"{handle}{ASK}", view=view)
    assert by_handle.prompt.token_ids == found.prompt.token_ids
    assert torch.equal(by_handle.logits, found.logits)
    oracle = engine.prefill(TEXT + ASK, reuse=False)
    assert torch.allclose(oracle.logits, found.logits, atol=1e-4)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (TEXT + ASK, {"recognise": False}),
        (TEXT.replace("seven", "eight") + ASK, {}),
        (TEXT[:60] + ASK, {}),
        ([{"role": "assistant", "content": TEXT}, {"role": "user", "content": ASK}], {}),
    ],
    ids=["switched off", "changed", "a part", "a role that is not trusted"],
)
def test_what_is_not_recognised(veyl, message, options):
    engine, store, _ = veyl
    found = engine.prefill(message, view=store.view("veyl"), **options)
    assert (found.prompt.spans, found.usage.recognised_tokens) == ((), 0)


def test_only_in_namespaces_that_the_view_may_read(veyl):
    engine, store, _ = veyl
    assert not engine.prefill(TEXT + ASK, view=store.view("other")).prompt.spans
    assert engine.prefill(TEXT + ASK, view=store.view("other", "veyl")).prompt.spans


def test_short_steered_and_lazy_packs_are_left_as_text(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    store.put(engine.build_pack("A short one.", namespace="veyl"))
    store.put(engine.build_pack(TEXT, namespace="veyl", lazy=True))
    engine.clear_cache()
    for message in ("A short one." + ASK, TEXT + ASK):
        found = engine.prefill(message, view=store.view("veyl"))
        assert found.usage.recognised_tokens == 0


def test_handles_in_recognised_text_are_inert(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    secret = store.put(engine.build_pack("The lamp burns kelp.", namespace="veyl"))
    text = f"{TEXT} And see {secret} for the lamp."
    store.put(engine.build_pack(text, namespace="veyl"))
    found = engine.prefill(text + ASK, view=store.view("veyl"))
    assert "kelp" not in engine.template.text(found.prompt)


def test_at_the_second_time_behind_another_prefix_a_pack_is_compiled_for_it(veyl):
    engine, store, handle = veyl
    view, message = store.view("veyl"), f"Read this first. {TEXT}{ASK}"
    oracle = engine.prefill(message, reuse=False)
    first = engine.prefill(message, view=view)
    assert first.usage.recognised_tokens == 0, "it may never come again"
    for _ in range(2):
        assert "pack" not in engine.explain(message, view=view).counts
    second = engine.prefill(message + " Now.", view=view)
    assert second.usage.recognised_tokens == len(second.prompt.spans[0])
    until(lambda: len(list(store.path.rglob(f"{handle.id}.*.safetensors"))) == 2)
    engine.clear_cache()
    third = engine.prefill(message, view=view)
    assert third.usage.reused_tokens >= len(third.prompt.spans[0]) == third.usage.recognised_tokens
    assert torch.allclose(oracle.logits, third.logits, atol=1e-4)
    engine.clear_cache()
    assert torch.equal(third.logits, engine.prefill(message, view=view, reuse=False).logits)


@pytest.mark.parametrize("gone", ["the pack", "the pack, elsewhere", "nothing"])
def test_a_pack_removed_while_it_waits_to_be_compiled_for_a_prefix_stays_removed(veyl, gone):
    engine, store, handle = veyl
    view, message, go_on = store.view("veyl"), f"Read this first. {TEXT}{ASK}", threading.Event()
    engine.prefill(message, view=view)
    engine.when_idle(lambda: go_on.wait(60) and None)
    engine.prefill(message + " Now.", view=view)
    if gone != "nothing":
        (store if gone == "the pack" else PackStore(store.path)).remove(handle)
    go_on.set()
    engine.when_idle(lambda: None).result(60)
    assert len(list(store.path.rglob(f"{handle.id}.*.safetensors"))) == (2 if gone == "nothing" else 0)
    if gone != "nothing":
        assert [file for file in store.path.rglob("*") if file.is_file() and handle.id in file.name] == []
