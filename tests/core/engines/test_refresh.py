"""Weights that are changed in place: noticed where that is cheap, and taken by `refresh` in any case."""

import pytest
import torch

from kp_core import PackStore, load_engine
from kp_core.errors import BusyError, FingerprintMismatchError, ModelChangedError
from kp_core.testing import tiny_model, tiny_tokenizer

TEXT = "The gate of the harbour is green and old, and nobody knows who painted it."


def engine_of(model):
    return load_engine(model, tokenizer=tiny_tokenizer(), chunk_tokens=16, cache_bytes=10**7)


def change(model, *, silently):
    weight = model.model.layers[0].self_attn.k_proj.weight
    if silently:
        # Behind the bytes that are looked at, through `.data`.
        weight.data[0, :4] += 1
    else:
        with torch.no_grad():
            weight[0, :4] += 1


# In bfloat16 weights stand in another layout, beside the model's own.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silently", [False, True])
def test_after_a_refresh_everything_is_of_the_model_as_it_is(silently, dtype, tmp_path):
    model = tiny_model("llama", dtype)
    engine, store = engine_of(model), PackStore(tmp_path)
    handle = store.put(engine.build_pack(TEXT, namespace="a"))
    asked, before = f"{handle}\n\nWho?", engine.fingerprint
    engine.generate(asked, view=store.view("a"), max_tokens=4)
    change(model, silently=silently)
    if not silently:
        with pytest.raises(ModelChangedError, match=r"session\.refresh\(\)"):
            engine.generate(asked, view=store.view("a"), max_tokens=4)
    engine.refresh()
    assert set(before.diff(engine.fingerprint)) == {"weights"}
    with pytest.raises(FingerprintMismatchError):
        engine.generate(asked, view=store.view("a"), max_tokens=4)
    store.put(engine.build_pack(TEXT, namespace="a"))
    fresh = engine_of(model)
    assert fresh.fingerprint == engine.fingerprint
    answers = [each.generate(asked, view=store.view("a"), max_tokens=9) for each in (engine, fresh)]
    assert torch.equal(*(answer.logits for answer in answers))
    assert answers[0].token_ids == answers[1].token_ids
    # It is watched from there on.
    change(model, silently=False)
    with pytest.raises(ModelChangedError):
        engine.generate("Hi", max_tokens=1)


def test_a_model_of_a_folder_is_refreshed_to_what_it_is_in_memory(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = load_engine(str(tmp_path), dtype="float32", device="cpu")
    before = engine.fingerprint
    engine.refresh()
    assert engine.fingerprint == before


def test_nothing_is_refreshed_while_it_is_used():
    engine = engine_of(tiny_model("llama"))
    stream = engine.stream("Hi there", max_tokens=9)
    next(iter(stream))
    with pytest.raises(BusyError, match="under way"):
        engine.refresh()
    stream.close()
    engine.refresh()
    pinned = engine.pin(engine.build_pack(TEXT))
    with pytest.raises(BusyError, match="unpin"):
        engine.refresh()
    engine.unpin(pinned)
    engine.refresh()
