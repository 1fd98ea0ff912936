"""Splice and blend against recomputing, token for token."""

import pytest
import torch

from kp_core import BlendComposer, Handle, PackStore, SpliceComposer
from kp_core.compose import composer_of
from kp_core.compose.blend import _RULES
from kp_core.engines.request import Request
from kp_core.errors import OptionError
from tests.conftest import tiny_engine

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
    plan, _ = engine._plan(question, Request.of(options))
    run = engine.engine._filler.start(plan, len(plan.prompt))
    try:
        return plan.prompt, run.buffer.read(0, len(plan.prompt))
    finally:
        engine.engine._filler.finish(run)


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


@pytest.mark.parametrize("rule", _RULES)
def test_a_share_of_nothing_is_a_splice_and_of_all_is_exact(rule, isles):
    engine, request, question = isles
    spliced = engine.prefill(question, **request, composer="splice")
    none = engine.prefill(question, **request, composer=BlendComposer(0, rule))
    assert torch.equal(none.logits, spliced.logits)
    assert none.usage.approximate_tokens > 0
    exact = engine.prefill(question, **request)
    every = engine.prefill(question, **request, composer=BlendComposer(1, rule))
    assert torch.equal(every.logits, exact.logits)
    assert every.usage.approximate_tokens == 0


@pytest.mark.parametrize("rule", _RULES)
def test_nearly_all_recomputed_is_nearly_exact(rule, isles):
    engine, request, question = isles
    exact = engine.prefill(question, **request).logits.float()
    spliced = engine.prefill(question, **request, composer="splice").logits.float()
    blended = engine.prefill(question, **request, composer=BlendComposer(0.999, rule)).logits.float()
    tolerance = 1e-4 if engine.fingerprint.dtype == "float32" else 0.05
    assert (blended - exact).norm() <= tolerance * exact.norm()
    assert (spliced - exact).norm() > 1e-3 * exact.norm()


def test_blending_computes_the_share_that_it_says(isles):
    engine, request, question = isles
    engine.clear_cache()
    half = engine.prefill(question, **request, composer=BlendComposer(0.5, "first"))
    first, *rest = half.prompt.spans
    recomputed = sum(-(-len(span) // 2) for span in rest)
    outside = len(half.prompt) - len(first) - sum(map(len, rest))
    assert half.usage.computed_tokens == outside + recomputed
    assert half.usage.approximate_tokens == sum(map(len, rest))


def test_what_depends_on_the_question_is_not_kept(isles):
    engine, request, question = isles
    one = engine.prefill(question, **request, composer=BlendComposer(0.3, "attention"))
    again = engine.prefill(question, **request, composer=BlendComposer(0.3, "attention"))
    assert torch.equal(one.logits, again.logits)
    assert again.usage.computed_tokens > len(again.prompt) - again.prompt.spans[-1].stop
    kept = engine.prefill(question, **request, composer=BlendComposer(0.3, "first"))
    assert engine.prefill(question, **request, composer=BlendComposer(0.3, "first")).usage.computed_tokens == 0
    assert not torch.equal(kept.logits, one.logits)
    exact = engine.prefill(question, **request)
    assert torch.equal(exact.logits, engine.prefill(question, **request, reuse=False).logits)


def test_packs_are_left_as_they_are(isles):
    engine, request, question = isles
    store = request["view"].source
    before = [store.get(span) for span in map(Handle.parse, question.split("\n\n")[:3])]
    copies = [pack.kv.clone() for pack in before]
    engine.prefill(question, **request, composer=BlendComposer(0.5, "deviation"))
    assert all(pack.kv.equal(copy) for pack, copy in zip(before, copies, strict=True))


def test_names():
    assert composer_of("splice") == SpliceComposer()
    assert composer_of("blend:r=0.3,rule=deviation") == BlendComposer(0.3, "deviation")
    for composer in (SpliceComposer(), BlendComposer(), BlendComposer(0.05, "attention")):
        assert composer_of(composer.key) == composer
    for wrong in ("blend:k=3", "splice:r=1", "", "blend:r=2", "blend:rule=last", "blend:r=many"):
        with pytest.raises(OptionError):
            composer_of(wrong)
