"""Passes that run as one: the bits of each, for any parts of any prompt, and only where that was seen to hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kp_core import PackStore
from kp_core.engines.hf import packed
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.local.buffer import KVBuffer
from kp_core.testing import tiny_model
from tests.conftest import tiny_engine
from tests.parity.families import model_of

TOWNS = ("Avel", "Brin", "Corl", "Dace")


@pytest.fixture(scope="module")
def model():
    found = CausalModel(tiny_model("llama", torch.bfloat16))
    if not found.joins:
        pytest.skip("on this processor a product's rows depend on one another, or bfloat16 is not packed")
    return found


@settings(deadline=None, max_examples=40)
@given(parts=st.lists(st.integers(1, 90), min_size=1, max_size=8), before=st.integers(0, 60), seed=st.integers(0, 99))
def test_parts_have_the_bits_of_passes_of_their_own(model, parts, before, seed):
    ids = torch.randint(model.vocabulary, (1, before + sum(parts)), generator=torch.Generator().manual_seed(seed))
    found = []
    for passes in ([parts], [[part] for part in parts]):
        buffer = KVBuffer(model.shape, ids.shape[1])
        if before:
            model.forward(ids[:, :before], buffer, logits=False)
        for each in passes:
            logits = model.forward(ids[:, buffer.length : buffer.length + sum(each)], buffer, parts=each)
        found.append((buffer.read(0, ids.shape[1]), logits))
    (one, last), (other, expected) = found
    assert one.equal(other)
    assert torch.equal(last, expected)


@pytest.mark.parametrize(
    "made",
    [
        lambda: tiny_model("llama", torch.float32),  # Its weights are not packed.
        lambda: model_of("mixtral", torch.bfloat16),  # Experts are multiplied in their own way.
        lambda: model_of("gemma2", torch.bfloat16),  # It has windows.
    ],
)
def test_other_models_compute_pass_by_pass(made):
    assert not CausalModel(made()).joins


def test_rows_that_depend_on_one_another_are_noticed():
    class Odd(torch.nn.Linear):
        def forward(self, rows):
            # As a library that sums otherwise from 33 rows on.
            return super().forward(rows) * (1 + (rows.shape[1] > 32) / 100)

    assert not packed.rows_stand_alone([Odd(16, 8, dtype=torch.bfloat16)])


@pytest.mark.parametrize("order", ["given", "free"])
def test_several_packs_are_one_pass_with_the_question_and_the_bits_of_each(tmp_path, monkeypatch, model, order):
    engine, store = tiny_engine(dtype=torch.bfloat16, chunk_tokens=1024), PackStore(tmp_path)
    said = "In {} the bell is rung at dawn, and the market is held on the first day of each month."
    texts = [said.format(town) for town in TOWNS]
    handles = [str(store.put(pack)) for pack in engine.build_packs(texts, progress=False)]
    local, passes = engine.engine._filler.model, []
    forward = local.forward

    def counted(ids, buffer, **options):
        passes.append(ids.shape[1])
        return forward(ids, buffer, **options)

    monkeypatch.setattr(local, "forward", counted)

    def first(packs, **options):
        engine.clear_cache()
        engine.prefill("Hello.")
        for seen in options.pop("seen", ()):
            engine.prefill(seen, view=store.view("default"))
        passes.clear()
        said = "\n\n".join((*packs, "Who rings it?"))
        return engine.generate(said, view=store.view("default"), max_tokens=1, keep="never", **options)

    cold = first(handles, order=order)
    assert len(passes) == 1
    seen = "\n\n".join((handles[2], handles[3], "Why?"))
    warm = first(handles, order=order, seen=[seen])
    assert len(passes) == 1
    if order == "free":
        assert warm.packs[:2] == (handles[2], handles[3])
        assert warm.usage.computed_tokens < 0.75 * cold.usage.computed_tokens
    for found in (cold, warm):
        oracle = first(found.packs, reuse=False)
        assert torch.equal(oracle.first_logits, found.first_logits)
        monkeypatch.setattr(local, "joins", False)
        apart = first(found.packs)
        assert len(passes) == len(TOWNS)
        monkeypatch.setattr(local, "joins", True)
        assert torch.equal(apart.first_logits, found.first_logits)
    again = first(handles, order=order, seen=["\n\n".join((*handles, "Why?"))])
    assert again.usage.computed_tokens < 64


def test_short_facts_that_were_seen_together_are_not_computed_again(tmp_path, model):
    engine, store = tiny_engine(dtype=torch.bfloat16, chunk_tokens=1024), PackStore(tmp_path)
    packs = engine.build_packs(
        [f"{town} is {colour}." for town, colour in zip(TOWNS, "abcd", strict=True)], progress=False
    )
    handles, view = "\n\n".join(str(store.put(pack)) for pack in packs), store.view("default")
    cold = engine.generate(f"{handles}\n\nWhat is red?", view=view, max_tokens=1)
    assert cold.usage.reused_tokens < cold.usage.pack_tokens < 64
    warm = engine.generate(f"{handles}\n\nWhy?", view=view, max_tokens=1)
    assert warm.usage.reused_tokens >= warm.usage.pack_tokens
    alone = engine.generate(f"{handles}\n\nWhy?", view=view, max_tokens=1, reuse=False)
    assert torch.equal(warm.first_logits, alone.first_logits)
