"""Fast paths against their slow oracles, on questions about texts and the real model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kp_core import PackStore, bundled_model
from tests.conftest import bundled_dtypes

TOKENS = 8
SETS = {
    # Of the demo's world, which is always there, a question of one fact, and one of eight.
    "two": ("orrelay", slice(0, 5, 4)),
    "three": ("hotpot", slice(3)),
    "orrelay": ("orrelay", slice(1, 4)),
    "hotpot": ("hotpot", slice(3, 8)),
}
MARKS = {"two": (), "three": pytest.mark.slow}


@pytest.fixture(params=[pytest.param(each, marks=MARKS.get(each, pytest.mark.nightly)) for each in SETS])
def rows(request):
    name, part = SETS[request.param]
    return request.getfixturevalue(name)[part]


def conversations(engine, store, rows):
    for row in rows:
        text = "\n".join(f"{fact['title']}: {fact['text']}" for fact in row["gold_facts"])
        handle = store.put(engine.build_pack(text, namespace="parity"))
        yield f"{handle}\n\nAnswer in a few words. {row['question']}", text


@pytest.mark.parametrize("smol_of", bundled_dtypes(pytest.mark.slow), indirect=True)
def test_pack_equals_text_on_this_engine(smol_of, rows, tmp_path):
    engine, store = smol_of, PackStore(tmp_path)
    view = store.view("parity")
    for question, _ in conversations(engine, store, rows):
        engine.clear_cache()
        cold = engine.prefill(question, view=view, reuse=False)
        warm = engine.prefill(question, view=view)
        assert torch.equal(cold.logits, warm.logits)
        assert warm.usage.reused_tokens >= warm.usage.pack_tokens
        pack = engine.generate(question, view=view, max_tokens=TOKENS)
        text = engine.generate(question, view=view, max_tokens=TOKENS, reuse=False)
        assert pack.token_ids == text.token_ids


@pytest.mark.slow
def test_pack_equals_plain_text_and_plain_generate(smol, rows, tmp_path):
    store = PackStore(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    for question, text in conversations(smol, store, rows):
        answer = smol.generate(question, view=store.view("parity"), max_tokens=TOKENS)
        handle = question.split("\n")[0]
        assert answer.token_ids == smol.generate(question.replace(handle, text), max_tokens=TOKENS).token_ids
        ids = smol.tokenizer.apply_chat_template(
            [{"role": "user", "content": question.replace(handle, text)}],
            add_generation_prompt=True,
            return_dict=False,
            return_tensors="pt",
        )
        assert tuple(ids[0].tolist()) == answer.prompt.token_ids
        expected = plain.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
        assert answer.token_ids == tuple(expected.tolist())


def test_a_batch_of_packs_equals_packs_alone(smol_here, rows):
    texts = list(dict.fromkeys(fact["text"] for row in rows for fact in row["gold_facts"]))[:40]
    together = list(smol_here.build_packs(texts, progress=False))
    for text, pack in list(zip(texts, together, strict=True))[::7]:
        assert pack.kv.equal(smol_here.build_pack(text).kv)
