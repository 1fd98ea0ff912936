"""One store for two models and two positions: nobody's KV is displaced, and everybody's is read."""

import pytest
import torch

from kp_core import Fact, load_engine
from kp_core.banks.compiling import compile_facts
from kp_core.packs.store import PackStore
from tests.conftest import tiny_engine
from tests.kits import tiny_model, tiny_tokenizer

TEXT = "The lamp of Veyl burns kelp oil, and its keeper counts the ships that pass by night."
PLACES = ("user", "system")


def asked(engine, store, handle, place, **options):
    """A question behind the pack, on a cold tree."""
    if place == "system":
        options |= {"packs": [str(handle)], "placement": "system"}
    message = "Who counts?" if place == "system" else f"{handle}\n\nWho counts?"
    engine.clear_cache()
    return engine.prefill(message, view=store.view("veyl"), **options)


@pytest.mark.parametrize("order", [PLACES, PLACES[::-1]])
def test_two_placements_share_a_store(tmp_path, order):
    engine, store = tiny_engine(dtype=torch.bfloat16), PackStore(tmp_path)
    packs = {place: engine.build_pack(TEXT, namespace="veyl", compiled_for=place) for place in order}
    (handle,) = {store.put(pack) for pack in packs.values()}
    for place, pack in packs.items():
        found = asked(engine, store, handle, place)
        assert found.usage.reused_tokens == len(pack.token_ids) == found.usage.pack_tokens
        oracle = asked(engine, store, handle, place, reuse=False)
        assert oracle.usage.computed_tokens == len(oracle.prompt)
        assert torch.equal(found.logits, oracle.logits)


@pytest.mark.slow
def test_a_place_where_the_text_shares_a_token_with_blanks_before_it(smol, tmp_path):
    store, text = PackStore(tmp_path), "The ferry to Sorrel Island leaves Veyl at dawn. Its captain is Mara Quill."
    said = "Context:\n  {pack}\n  Answer from it."
    place = [{"role": "system", "content": said}, {"role": "user", "content": "?"}]
    for compiled_for in ("user", place):
        handle = store.put(smol.build_pack(text, namespace="isles", compiled_for=compiled_for))
    smol.clear_cache()
    asked = [
        {"role": "system", "content": said.format(pack=handle)},
        {"role": "user", "content": "Who is the captain?"},
    ]
    answer = smol.generate(asked, view=store.view("isles"), max_tokens=1, keep="never")
    [span] = answer.prompt.spans
    assert answer.usage.reused_tokens == len(span.pack.token_ids) == span.stop - span.start


def test_two_models_share_a_store(tmp_path):
    other = load_engine(tiny_model("llama", seed=1), tokenizer=tiny_tokenizer(merges=7), chunk_tokens=16)
    engines, store = (tiny_engine(), other), PackStore(tmp_path)
    (handle,) = {store.put(engine.build_pack(TEXT, namespace="veyl")) for engine in engines}
    assert len(list(store.entries(handle))) == 2
    for engine in engines:
        found = asked(engine, store, handle, "user")
        assert found.usage.reused_tokens == found.usage.pack_tokens > 0
        assert torch.equal(found.logits, asked(engine, store, handle, "user", reuse=False).logits)


def test_an_entry_that_comes_later_is_read(tmp_path):
    """A pack that is second in its message is cut as it was, also when the store learns of its position later."""
    engine, store = tiny_engine(dtype=torch.bfloat16), PackStore(tmp_path)
    first, second = (store.put(engine.build_pack(text, namespace="veyl")) for text in ("One.\n", TEXT))
    message = f"{first} and {second}\n\nWho counts?"
    before = engine.prefill(message, view=store.view("veyl"))
    template = [{"role": "user", "content": "One.\n and {pack}"}]
    store.put(engine.build_pack(TEXT, namespace="veyl", compiled_for=template))
    after = engine.prefill(message, view=store.view("veyl"))
    assert after.usage.computed_tokens == 0
    assert torch.equal(before.logits, after.logits)


def test_facts_compiled_for_two_positions_are_built_once_for_each(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    facts = [Fact(TEXT, namespace="veyl"), Fact("The bell of Tarn was cast in 1811.", namespace="veyl")]
    for place in PLACES:
        compile_facts(facts, engine, store, compiled_for=place, compress="lossless", progress=False)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "packs").rglob("*.safetensors")}
    assert len(files) == 4
    for place in PLACES:
        handles = compile_facts(facts, engine, store, compiled_for=place, progress=False)
    assert {path: path.stat().st_mtime_ns for path in files} == files, "nothing is made again"
    for handle, fact in zip(handles, facts, strict=True):
        for place in PLACES:
            built = engine.build_pack(fact.text, namespace="veyl", compiled_for=place)
            found = store.get(handle, built.key)
            assert (found.key, found.compression) == (built.key, "lossless")
            assert found.kv.equal(built.kv)
