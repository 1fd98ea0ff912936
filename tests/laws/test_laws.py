"""What must stay true of every pack, on every supported architecture."""

import uuid

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kp_core import KVTensors, PackStore
from kp_core.errors import PackError
from tests.conftest import alike, tiny_engine
from tests.matrix import EXAMPLES, architectures, models

law = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

# Words, digits, line feeds, special-token strings, letters outside ASCII: what edges of packs are made of.
words = st.lists(
    st.sampled_from(["the", "an", "er", "7", "42", ".", ".\n", "\n\n", " ", "<|im_end|>", "é", "中文", "kp:", "Veyl"]),
    min_size=4,
    max_size=40,
).map("".join)
texts = words.filter(lambda text: len(text.strip()) > 8)


def bits(kv):
    return [tensor.clone() for tensor in (*kv.keys, *kv.values)]


@models
@law
@given(data=st.data())
def test_slices_join_to_the_whole(architecture, dtype, data):
    kv = tiny_engine(architecture, dtype).build_pack("The whole of it, some forty tokens long.").kv
    cuts = sorted(data.draw(st.lists(st.integers(0, kv.tokens), max_size=4)))
    before = bits(kv)
    parts = [kv.slice(a, b) for a, b in zip([0, *cuts], [*cuts, kv.tokens], strict=True)]
    whole = KVTensors.concat(parts)
    assert whole.equal(kv)
    assert sum(part.nbytes for part in parts) == whole.nbytes == kv.nbytes
    assert all(torch.equal(old, new) for old, new in zip(before, bits(kv), strict=True))


@models
@law
@given(text=texts, compiled_for=st.sampled_from(["user", "system"]))
def test_a_stored_pack_comes_back_the_same(architecture, dtype, text, compiled_for, tmp_path):
    engine, store = tiny_engine(architecture, dtype), PackStore(tmp_path)
    pack = engine.build_pack(text, namespace="law", compiled_for=compiled_for, provenance={"title": text[:9]})
    before = bits(pack.kv)
    handle = store.put(pack)
    back = PackStore(tmp_path).get(handle, pack.key)
    assert back.kv.equal(pack.kv)
    for field in ("text", "namespace", "token_ids", "prefix", "fingerprint", "provenance"):
        assert getattr(back, field) == getattr(pack, field)
    assert all(torch.equal(old, new) for old, new in zip(before, bits(pack.kv), strict=True))


@models
@law
@given(
    text=texts,
    before=st.sampled_from(["", "Facts: ", "Facts:\n"]),
    after=st.sampled_from(["", "\n\nWho?", " Who?", ".\nthe"]),
    placement=st.sampled_from(["in_place", "system"]),
    warm=st.booleans(),
)
def test_warm_is_cold_bit_for_bit(architecture, dtype, text, before, after, placement, warm, tmp_path):
    # A store of its own: where a text was first compiled for decides whether a short one is cut off.
    engine, store = tiny_engine(architecture, dtype), PackStore(tmp_path / uuid.uuid4().hex)
    compiled_for = "system" if placement == "system" else [{"role": "user", "content": before + "{pack}"}]
    engine.clear_cache()
    handle = store.put(engine.build_pack(text, namespace="law", compiled_for=compiled_for))
    request = {"view": store.view("law"), "placement": placement}
    question = f"{before}{handle}{after}"
    cold = engine.prefill(question, reuse=False, **request)
    if warm:
        engine.prefill(question + " once more", **request)
    found = engine.prefill(question, **request)
    again = engine.prefill(question, **request)
    assert alike(engine, cold.logits, found.logits)
    assert alike(engine, cold.logits, again.logits)
    if placement == "in_place":
        plain = engine.prefill(f"{before}{text}{after}", reuse=False)
        assert plain.prompt.token_ids == found.prompt.token_ids
        assert alike(engine, plain.logits, found.logits)
    assert cold.usage.reused_tokens == 0
    assert found.usage.reused_tokens >= found.usage.pack_tokens > 0
    assert again.usage.computed_tokens == 0
    engine.template.verify(found.prompt)
    answers = {engine.generate(question, max_tokens=4, reuse=reuse, **request).token_ids for reuse in (True, False)}
    assert len(answers) == 1


@models
@law
@given(turns=st.lists(st.sampled_from(["the end", "an answer.", "er\n\n7", "中"]), min_size=3, max_size=5))
def test_a_replayed_conversation_is_bit_identical(architecture, dtype, turns):
    engine = tiny_engine(architecture, dtype)
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        engine.clear_cache() if turn == "er\n\n7" else None
        answer = engine.generate(messages, max_tokens=5)
        warm, cold = (engine.prefill(messages, reuse=reuse) for reuse in (True, False))
        assert alike(engine, warm.logits, cold.logits)
        assert answer.token_ids == engine.generate(messages, max_tokens=5, reuse=False).token_ids
        messages.append({"role": "assistant", "content": answer.text})


@models
def test_a_pack_of_another_model_is_refused(architecture, dtype):
    mine = tiny_engine(architecture, dtype)
    other = tiny_engine("llama" if architecture != "llama" else "qwen2", dtype)
    pack = other.build_pack("A fact of the other model.")
    with pytest.raises(PackError) as caught:
        mine.generate("Who?", packs=[pack])
    assert "; config: pack has" in str(caught.value).replace("(config", "; config")
    assert mine.generate("Who?", packs=[pack], mismatch="rebuild", max_tokens=2).usage.pack_tokens > 0


@architectures
def test_a_pack_is_frozen(architecture):
    pack = tiny_engine(architecture).build_pack("A fact that stays as it is.")
    with pytest.raises(AttributeError):
        pack.text = "Another."
    with pytest.raises(TypeError):
        pack.provenance["title"] = "Another."
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        pack.kv.keys[0].add_(1)


def test_kv_that_does_not_fit_is_named():
    good = torch.zeros(2, 5, 4)
    for keys, values, says in [
        ((), (), "one of each a layer"),
        ((good,), (good, good), "1 tensors of keys and 2 of values"),
        ((good[0],), (good[0],), r"expected \(kv_heads, tokens, head_dim\)"),
        ((good,), (good[:, :4],), "Values of layer 0"),
        ((good, good[:, :3]), (good, good[:, :3]), "Keys of layer 1"),
        ((good,), (good.half(),), "float16"),
    ]:
        with pytest.raises(PackError, match=says):
            KVTensors(keys, values)
    kv = KVTensors((good,), (good,))
    with pytest.raises(PackError, match="slice 3:9 of 5 tokens"):
        kv.slice(3, 9)
    with pytest.raises(PackError, match="nothing to concatenate"):
        KVTensors.concat([])
    with pytest.raises(PackError, match="differ"):
        KVTensors.concat([kv, KVTensors((good.half(),), (good.half(),))])
