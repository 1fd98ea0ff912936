"""Packs between soft tokens, against the model's own passes over embeddings."""

import logging
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from kp_core import Handle, PackStore
from kp_core.errors import ContextOverflowError, OptionError, PackError
from kp_core.packs import blobs
from kp_core.packs.entry import Entry
from kp_core.packs.pack import common_length
from kp_core.plan.composer import composer_of
from kp_core.steering import Steering
from kp_methods import PacketComposer, SpliceComposer
from kp_methods.packet.composer import SHIPPED
from tests.conftest import tiny_engine, until
from tests.methods.test_approximate import kv_of

TEXTS = ["The first island is green and flat.", "The second island is blue.", "The third one is as red as rust."]
SOFT = 3


def wrapper_for(engine, seed=0, scale=0.5):
    draw = torch.Generator().manual_seed(seed)
    soft = torch.randn(2 * SOFT, engine.engine.model.config.hidden_size, generator=draw) * scale
    return PacketComposer(soft[:SOFT], soft[SOFT:], engine.fingerprint, {"steps": 0})


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def isles(request, tmp_path):
    """An engine with nothing in memory, a store, a question about three packs, and a composer."""
    engine, store = tiny_engine("llama", request.param), PackStore(tmp_path)
    engine.clear_cache()
    handles = [str(store.put(engine.build_pack(text, namespace="isles"))) for text in TEXTS]
    options = {"view": store.view("isles"), "composer": wrapper_for(engine)}
    return engine, store, options, "\n\n".join(handles) + "\n\nWhich?"


def wrapped(store):
    """The files of entries that their packs were not put with."""
    keys = {Entry.of_pack(at, pack.fingerprint, pack.prefix).key for at in store for pack in store.entries(at)}
    return [path for path in store.path.rglob("*.safetensors") if str(path.relative_to(store.path)) not in keys]


def plain(options):
    return {"view": options["view"]}


def test_a_wrapped_pack_is_what_the_model_computes_of_its_embeddings(isles):
    engine, _, options, question = isles
    prompt, found = kv_of(engine, question, **options)
    exact, _ = kv_of(engine, question, **plain(options))
    model, wrapper = engine.engine.model.network, options["composer"]
    assert len(prompt) == len(exact) + 2 * 2 * SOFT
    for span in prompt.spans[1:]:
        ids = span.soft.between(span.pack.token_ids)
        before = torch.tensor(span.pack.prefix)
        with torch.no_grad():
            embed = model.get_input_embeddings()
            like = embed.weight.dtype
            soft = wrapper.header.to(like), wrapper.trailer.to(like)
            inputs = torch.cat([embed(before), soft[0], embed(torch.tensor(ids)), soft[1]])
            cache = DynamicCache(config=model.config)
            model.base_model(inputs_embeds=inputs[None], past_key_values=cache)
        mine, tolerance = found.slice(span.start, span.stop), 1e-5 if like == torch.float32 else 0.05
        for layer, theirs in enumerate(cache.layers):
            moved = engine.engine.model.rope.turned(theirs.keys[0, :, len(before) :], span.start - len(before))
            assert torch.allclose(mine.keys[layer].float(), moved.float(), atol=tolerance)
            values = theirs.values[0, :, len(before) :]
            assert torch.allclose(mine.values[layer].float(), values.float(), atol=tolerance)


def test_all_of_a_packs_text_is_in_it_and_nothing_is_left_to_compute(isles):
    engine, _, options, question = isles
    found = engine.prefill(question, **options)
    rest = found.prompt.spans[1:]
    text = engine.tokenizer.decode([at for span in rest for at in span.soft.between(span.pack.token_ids)])
    assert text == "\n\n".join(TEXTS[1:]) + "\n\n"
    assert rest[0].stop == rest[1].start
    assert found.usage.approximate_tokens == sum(map(len, rest))
    again = engine.prefill(question.replace("Which", "Where"), **options)
    # The question alone, from its first other letter on: all before it is in memory.
    same = common_length(found.prompt.token_ids, again.prompt.token_ids)
    assert again.usage.computed_tokens == len(again.prompt) - same < len(again.prompt) - rest[-1].stop


def test_a_wrapped_pack_is_compiled_once_and_kept_in_the_store(isles):
    engine, store, options, question = isles
    engine.clear_cache()
    cold = engine.prefill(question, **options)
    until(lambda: len(wrapped(store)) == 2)
    assert {path.name[:21] for path in wrapped(store)} == {span.handle[-21:] for span in cold.prompt.spans[1:]}
    engine.clear_cache()
    warm = engine.prefill(question, **options)
    assert torch.equal(warm.logits, cold.logits)
    packets = sum(map(len, cold.prompt.spans[1:]))
    assert cold.usage.computed_tokens - warm.usage.computed_tokens == packets
    # In another order, the others are copied: one of them stood at home before.
    engine.clear_cache()
    handles = question.split("\n\n")
    other = engine.prefill("\n\n".join((*handles[1::-1], *handles[2:])), **options)
    assert other.usage.computed_tokens < packets
    until(lambda: len(wrapped(store)) == 3)
    # Of another wrapper there is nothing, and it goes with its pack.
    engine.clear_cache()
    second = engine.prefill(question, **plain(options), composer=wrapper_for(engine, seed=1))
    assert second.usage.computed_tokens == cold.usage.computed_tokens
    until(lambda: len(wrapped(store)) == 5)
    store.remove(Handle.parse(handles[1]))
    assert all(handles[1][-21:] not in path.name for path in wrapped(store))


def test_nothing_is_kept_where_nothing_is_to_be(isles):
    engine, store, options, question = isles
    engine.prefill(question, **options, keep="never")
    engine.when_idle(lambda: None).result(60)
    assert not wrapped(store)


def test_without_packs_to_compose_or_reuse_all_is_exact(isles):
    engine, _, options, question = isles
    exact = engine.prefill(question, **plain(options))
    slow = engine.prefill(question, **options, reuse=False)
    assert (slow.usage.approximate_tokens, len(slow.prompt)) == (0, len(exact.prompt))
    one = question.split("\n\n")[0] + "\n\nWhich?"
    alone = engine.prefill(one, **options)
    assert torch.equal(alone.logits, engine.prefill(one, **plain(options)).logits)
    assert torch.equal(engine.prefill(question, **plain(options)).logits, exact.logits)


def test_steered_packs_are_computed(isles):
    engine, _, options, question = isles
    steering = engine.make_steering([("I should be obliged.", "write back"), ("It is regrettable.", "that sucks")])
    assert isinstance(steering, Steering)
    found = engine.prefill(question, **options, steering=steering)
    exact = engine.prefill(question, **plain(options), steering=steering)
    assert found.usage.approximate_tokens == 0
    assert torch.equal(found.logits, exact.logits)


def test_explain_and_the_limit_count_soft_tokens(isles):
    engine, _, options, question = isles
    told = engine.explain(question, **options, max_tokens=1)
    composed = [row for row in told.rows if row.source == "composed"]
    assert composed
    assert composed[0].method == options["composer"].key
    size = len(engine.prefill(question, **plain(options)).prompt)
    with pytest.raises(ContextOverflowError):
        engine.generate(question, **options, max_tokens=engine.max_positions - size)


def test_without_soft_tokens_it_is_a_splice(isles):
    engine, _, options, question = isles
    wrapper = wrapper_for(engine)
    bare = replace(wrapper, header=wrapper.header[:0], trailer=wrapper.trailer[:0])
    found = engine.prefill(question, **plain(options), composer=bare).logits.float()
    spliced = engine.prefill(question, **plain(options), composer=SpliceComposer()).logits.float()
    exact = engine.prefill(question, **plain(options)).logits.float()
    assert (found - spliced).norm() < (spliced - exact).norm()


def test_a_wrapper_of_another_model_is_refused(isles):
    engine, _, options, question = isles
    other = wrapper_for(tiny_engine("qwen3"))
    with pytest.raises(PackError, match=r"The wrapper \w+ was not made by this model .*kp packet train"):
        engine.prefill(question, **plain(options), composer=other)


def test_files(tmp_path, monkeypatch):
    wrapper = wrapper_for(tiny_engine())
    path = wrapper.save(tmp_path / "new" / "some.wrapper")
    found = PacketComposer.load(path)
    assert found == wrapper
    assert found.training == {"steps": 0}
    assert composer_of(f"packet:wrapper={path}") == wrapper
    assert wrapper.key != wrapper_for(tiny_engine(), seed=1).key
    before = path.read_bytes()
    for at in (4, 100, len(before) // 2, len(before) - 1):
        path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        with pytest.raises(OptionError, match="cannot be used"):
            PacketComposer.load(path)
    for wrong in (b"", before[:-1], b"no safetensors at all"):
        path.write_bytes(wrong)
        with pytest.raises(OptionError, match="cannot be used"):
            PacketComposer.load(path)
    path.write_bytes(before)
    with pytest.raises(OptionError, match="There is no"):
        PacketComposer.load(tmp_path / "none")
    with pytest.raises(OptionError, match="shape"):
        PacketComposer(wrapper.header, wrapper.trailer[:, :3], wrapper.fingerprint)
    with pytest.raises(OptionError):
        composer_of("packet:r=1")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blobs, "_stage", full)
    with pytest.raises(OptionError, match="No space left on device"):
        wrapper_for(tiny_engine(), seed=1).save(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_shipped_wrapper_is_small_and_says_how_it_was_made(caplog):
    caplog.set_level(logging.WARNING)
    wrapper = PacketComposer.load()
    assert SHIPPED.stat().st_size < 1_000_000
    assert wrapper.training["about"].startswith("kp packet train")
    assert wrapper.training["best"]["held_kl"] < wrapper.training["without_soft_tokens_kl"]
    assert composer_of("packet") == wrapper
