"""What cannot be composed is refused by name, and packs and store are as they were."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from kp_core import PackStore, load_engine
from kp_core.errors import (
    ContextOverflowError,
    OptionError,
    PackError,
    UnsupportedRequestError,
)
from tests.conftest import tiny_engine
from tests.kits import tiny_tokenizer

TEXTS = ["The first island is green and flat.", "The second island is blue."]


@pytest.fixture
def store(tmp_path):
    """A store whose files are the same after the test as before its question."""
    return PackStore(tmp_path)


def put(store, engine, text, **options):
    return str(store.put(engine.build_pack(text, namespace="isles", **options)))


def refused(engine, store, handles, kind, says, **options):
    """The question is refused, nothing is written, and the exact answer is what it was."""
    question, view = "\n\n".join((*handles, "Which?")), store.view("isles")
    files = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    with pytest.raises(kind, match=says):
        engine.generate(question, view=view, max_tokens=2, **options)
    assert {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == files
    oracle = {"view": view, "mismatch": "rebuild"}
    exact = engine.prefill(question, **oracle)
    assert exact.usage.approximate_tokens == 0
    assert torch.equal(exact.logits, engine.prefill(question, **oracle, reuse=False).logits)


def test_a_pack_of_another_model(store):
    engine = tiny_engine()
    handles = [put(store, engine, TEXTS[0]), put(store, tiny_engine("qwen3"), TEXTS[1])]
    refused(engine, store, handles, PackError, "config: pack has", composer="splice")


def test_packs_compiled_for_different_places(store):
    engine = tiny_engine()
    home, user = (put(store, engine, text) for text in TEXTS)
    place = [{"role": "user", "content": "Look at this:\n{pack}"}]
    away = put(store, engine, "The third one is as red as rust.", compiled_for=place)
    says = "compiled behind .* expects one prefix. Build both with the same `compiled_for`"
    refused(engine, store, [home, user, away], PackError, says, composer="splice")
    # At home a pack is exact and moves nowhere, so one that does move is in nobody's way.
    question = f"{home}\n\n{away}\n\nWhich?"
    assert engine.prefill(question, view=store.view("isles"), composer="splice").usage.approximate_tokens > 0


def test_more_than_the_model_has_positions_for(store):
    engine = tiny_engine()
    text = "The harbour of the island has many boats, and each of them is of another colour. " * 12
    handles = [put(store, engine, f"Note {number}. {text}", lazy=True) for number in range(3)]
    with pytest.raises(ContextOverflowError, match="has 2048 positions"):
        engine.generate("\n\n".join((*handles, "?")), view=store.view("isles"), composer="splice")


def test_keys_that_cannot_be_moved(store):
    """Of a model with learned positions; `tests/core/test_rope.py` has those whose RoPE changes with the length."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=268, n_embd=32, n_layer=2, n_head=4, n_positions=2048, eos_token_id=258)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    engine = load_engine(model, tokenizer=tiny_tokenizer(merges=7), chunk_tokens=64)
    handles = [put(store, engine, text) for text in TEXTS]
    refused(engine, store, handles, UnsupportedRequestError, "it has no rotary embedding", composer="splice")


@pytest.mark.parametrize("name", ["glue", "blend:r=0.15", "splice:r=0.5", "select:share=1", "select:packs=0", ""])
def test_a_name_that_is_none(store, name):
    engine = tiny_engine()
    handles = [put(store, engine, text) for text in TEXTS]
    refused(engine, store, handles, OptionError, "expected|gone in 0.3", composer=name)
