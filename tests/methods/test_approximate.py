"""Approximate composition against recomputing, token for token."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from kp_core import Handle, KVTensors, PackStore
from kp_core.engines.local import run as local_run
from kp_core.packs.pack import common_length
from kp_core.plan.composer import composer_of
from kp_core.plan.plan import Plan, Region
from kp_core.plan.request import Request
from kp_methods import SelectComposer, SpliceComposer
from tests.composers import Firsts
from tests.conftest import alike, tiny_engine
from tests.kits import NaiveComposer, tiny_model

TEXTS = ["The first island is green and flat.", "The second island is blue.", "The third one is as red as rust."]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def isles(request, tmp_path):
    """An engine with nothing in memory, its options, and a question about three packs."""
    engine, store = tiny_engine("llama", request.param), PackStore(tmp_path)
    engine.clear_cache()
    handles = [str(store.put(engine.build_pack(text, namespace="isles"))) for text in TEXTS]
    return engine, {"view": store.view("isles")}, "\n\n".join(handles) + "\n\nWhich?"


def kv_of(engine, question, **options):
    """The KV of a whole prompt, as a request has it in its buffer."""
    plan = engine._plan(question, Request.of(options))
    run = engine.engine.prefill(plan, len(plan.prompt))
    try:
        return plan.prompt, run.buffer.read(0, len(plan.prompt))
    finally:
        run.close()


def taken(kv, tokens):
    """These tokens of `kv`, in this order."""
    return KVTensors(tuple(key[:, tokens] for key in kv.keys), tuple(value[:, tokens] for value in kv.values))


@torch.no_grad()
def put_together(engine, prompt, view, share):
    """The same KV, slowly: packs moved one by one, and everything else from transformers, masked by position."""
    model = tiny_model("llama", engine.engine.model.shape.dtype)
    model.set_attn_implementation("eager")
    moved, old = [], []
    for at, span in enumerate(prompt.spans):
        kept = math.ceil(share * len(span)) if at else 0  # The first pack stands where it was compiled.
        pack = view.get(Handle.parse(span.handle))
        kv = engine.engine.model.rope.move(pack.kv, span.start - len(pack.prefix))
        moved.append(kv.slice(kept, len(span)))
        old += range(span.start + kept, span.stop)
    kept, new = KVTensors.concat(moved), [at for at in range(len(prompt)) if at not in old]
    cache = DynamicCache(config=model.config)
    for layer, (key, value) in enumerate(zip(kept.keys, kept.values, strict=True)):
        cache.update(key[None], value[None], layer)
    positions, ids = torch.tensor(new), torch.tensor([[prompt.token_ids[at] for at in new]])
    hidden = torch.tensor([*old, *new]) > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, torch.finfo(model.dtype).min)
    model(ids, position_ids=positions[None], attention_mask=mask[None, None], past_key_values=cache)
    found = KVTensors(tuple(layer.keys[0] for layer in cache.layers), tuple(layer.values[0] for layer in cache.layers))
    return taken(found, [[*old, *new].index(at) for at in range(len(prompt))])


@pytest.mark.parametrize("share", [0, 0.4])
def test_what_is_written_in_place_is_what_is_put_together(share, isles):
    engine, request, question = isles
    prompt, found = kv_of(engine, question, **request, composer=Firsts(share) if share else "splice")
    slow = put_together(engine, prompt, request["view"], share)
    tolerance = 1e-5 if slow.dtype == torch.float32 else 0.05
    pairs = zip((*found.keys, *found.values), (*slow.keys, *slow.values), strict=True)
    assert all((mine.float() - theirs.float()).norm() <= tolerance * theirs.float().norm() for mine, theirs in pairs)
    for at, span in enumerate(prompt.spans):
        start = span.start + (math.ceil(share * len(span)) if at else 0)
        assert found.slice(start, span.stop).equal(slow.slice(start, span.stop))


def test_the_next_prompt_in_the_buffer_leaves_the_tree_as_it_was(isles):
    engine, request, question = isles
    spliced = kv_of(engine, question, **request, composer="splice")[1]
    one, two, three, asked = question.split("\n\n")
    engine.prefill(f"{one}\n\n{three}\n\n{two}\n\n{asked}", **request, composer="splice")
    engine.prefill("Another question, long enough to be written over all that stood there. " * 3)
    again = engine.prefill(question, **request, composer="splice")
    assert again.usage.computed_tokens == 0
    assert kv_of(engine, question, **request, composer="splice")[1].equal(spliced)


def test_attention_is_that_of_the_plain_model(isles):
    """The weights that `select` chooses by, over a pack where it was compiled, against those of transformers."""
    engine, request, question = isles
    one, asked = question.split("\n\n")[0], "Which?"
    prompt = engine._plan(f"{one}\n\n{asked}", Request.of(request)).prompt
    (span,) = prompt.spans
    region = Region(span.start, span.stop, "composed", (span,), SpliceComposer())
    plan = Plan(prompt, (Region(0, span.start, "computed"), region), packs=request["view"])
    found = engine.engine.attention(plan)
    assert torch.equal(engine.engine.attention(plan, 1), found[:1])
    model = tiny_model("llama", engine.engine.model.shape.dtype)
    model.set_attn_implementation("eager")
    output = model(torch.tensor([prompt.token_ids]), output_attentions=True)
    expected = torch.stack(
        [layer[0, :, span.stop :, span.start : span.stop].amax(dim=1) for layer in output.attentions]
    )
    assert torch.allclose(found, expected.float(), atol=1e-5 if model.dtype == torch.float32 else 0.01)


def test_attention_passes_over_tokens_between_packs(isles):
    engine, request, question = isles
    plan = engine._plan(question, Request.of(request | {"composer": "splice"}))
    region = plan.regions[-2]
    plan = replace(plan, regions=plan.regions[:-1])
    weights = engine.engine.attention(plan)
    between = [*region.between]
    packs = [at for at in range(len(region)) if at not in between]
    assert between
    assert (weights[..., between] == 0).all()
    assert (weights[..., packs] > 0).all()


@pytest.mark.parametrize("composer", ["splice", NaiveComposer(), Firsts(0.4)], ids=str)
def test_one_pass_with_the_question_is_two(composer, isles, monkeypatch):
    """What stands between packs, and then the question: bit for bit what one pass over both gives."""
    engine, request, question = isles
    request |= {"composer": composer}
    passes = joint_passes(engine, question, request, monkeypatch)
    with monkeypatch.context() as apart:
        apart.setattr(local_run, "_may_wait", lambda *_: False)
        _, slow = kv_of(engine, question, **request)
        engine.clear_cache()
        two = engine.generate(question, **request, max_tokens=8)
    assert not passes
    engine.clear_cache()
    _, found = kv_of(engine, question, **request)
    assert len(passes) == 1
    engine.clear_cache()
    one = engine.generate(question, **request, max_tokens=8)
    assert len(passes) == 2
    assert alike(engine, found, slow)
    assert alike(engine, one.logits, two.logits)
    assert one.token_ids == two.token_ids
    assert one.usage.approximate_tokens == two.usage.approximate_tokens > 0
    # Another question finds the region in memory, and what follows it up to the first other token.
    asked = engine.prefill(question.replace("Which?", "Why?"), **request)
    assert asked.usage.computed_tokens == len(asked.prompt) - common_length(
        asked.prompt.token_ids, one.prompt.token_ids
    )
    assert len(passes) == 2


def joint_passes(engine, question, request, monkeypatch):
    """A list of the passes, from now on, that have tokens before the end of the last pack and behind it."""
    model, passes = engine.engine.model, []
    forward, stop = model.forward_among, engine._plan(question, Request.of(request)).prompt.spans[-1].stop

    def noted(ids, buffer, places, **options):
        if min(places) < stop <= max(places):
            passes.append(ids)
        return forward(ids, buffer, places, **options)

    monkeypatch.setattr(model, "forward_among", noted)
    return passes


def test_a_long_question_has_a_pass_of_its_own(isles, monkeypatch):
    engine, request, question = isles
    passes = joint_passes(engine, question, request, monkeypatch)
    monkeypatch.setattr("kp_core.engines.local.run._TOGETHER_TOKENS", 15)
    engine.prefill(f"{question} And why is that so?", **request, composer="splice")
    assert not passes


def test_spliced_keys_of_the_first_layer_are_those_of_the_text(isles):
    engine, request, question = isles
    prompt, exact = kv_of(engine, question, **request)
    _, found = kv_of(engine, question, **request, composer="splice")
    tolerance = 1e-5 if exact.dtype == torch.float32 else 0.05
    for span in prompt.spans:
        mine, theirs = found.slice(span.start, span.stop), exact.slice(span.start, span.stop)
        # What the first layer computes depends on the token and its position alone.
        assert torch.allclose(mine.keys[0].float(), theirs.keys[0].float(), atol=tolerance)
        assert torch.allclose(mine.values[0].float(), theirs.values[0].float(), atol=tolerance)
    assert not torch.equal(found.keys[1], exact.keys[1])
    # The first pack stands where it was compiled.
    first = prompt.spans[0].stop
    assert found.slice(0, first).equal(exact.slice(0, first))


def test_nothing_recomputed_is_a_splice_and_all_is_exact(isles):
    engine, request, question = isles
    spliced = engine.prefill(question, **request, composer="splice")
    none = engine.prefill(question, **request, composer=Firsts(0))
    assert torch.equal(none.logits, spliced.logits)
    assert none.usage.approximate_tokens > 0
    _, exact = kv_of(engine, question, **request, reuse=False)
    _, every = kv_of(engine, question, **request, composer=Firsts(1))
    assert alike(engine, every, exact)
    assert not alike(engine, kv_of(engine, question, **request, composer=Firsts(0.5))[1], exact)


def test_recomputed_tokens_are_counted_and_found_under_their_key(isles):
    engine, request, question = isles
    engine.clear_cache()
    half = engine.prefill(question, **request, composer=Firsts(0.5))
    first, *rest = half.prompt.spans
    recomputed = sum(-(-len(span) // 2) for span in rest)
    outside = len(half.prompt) - len(first) - sum(map(len, rest))
    assert half.usage.computed_tokens == outside + recomputed
    assert half.usage.approximate_tokens == sum(map(len, rest))
    other = engine.prefill(question, **request, composer=Firsts(0.3))
    assert other.usage.computed_tokens > 0
    assert not torch.equal(other.logits, half.logits)
    again = engine.prefill(question, **request, composer=Firsts(0.5))
    assert again.usage.computed_tokens == 0
    assert torch.equal(again.logits, half.logits)


def test_packs_are_left_as_they_are(isles):
    engine, request, question = isles
    store = request["view"].source
    before = [store.get(span) for span in map(Handle.parse, question.split("\n\n")[:3])]
    copies = [pack.kv.clone() for pack in before]
    engine.prefill(question, **request, composer=Firsts(0.5))
    assert all(pack.kv.equal(copy) for pack, copy in zip(before, copies, strict=True))


def test_names():
    for composer in (SpliceComposer(), SelectComposer(), SelectComposer(3)):
        assert composer_of(composer.key) == composer
