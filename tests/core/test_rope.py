"""Moved keys against keys computed where they are moved to."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, LlamaConfig, Phi3Config, SmolLM3Config

from kp_core import KVTensors, load_engine
from kp_core.errors import PackError, UnsupportedRequestError
from kp_core.rope import Rope
from tests.kits import ARCHITECTURES, tiny_model, tiny_tokenizer
from tests.kits.models import _COMMON

GROUPED = _COMMON | {"num_key_value_heads": 2}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 1e4,
    },
}
MODELS = {
    **{name: lambda name=name, **_: tiny_model(name) for name in ARCHITECTURES},
    **{name: lambda rope=rope: made(LlamaConfig(**GROUPED, rope_parameters=rope)) for name, rope in SCALED.items()},
    "partial": lambda: made(Phi3Config(**GROUPED, sliding_window=None, partial_rotary_factor=0.5)),
    "nope": lambda: made(SmolLM3Config(**GROUPED, no_rope_layers=[1, 0], no_rope_layer_interval=2)),
    "interleaved": lambda: made(CohereConfig(**GROUPED)),
}


def made(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()


def engine_of(model):
    return load_engine(model, tokenizer=tiny_tokenizer(), chunk_tokens=64, cache_bytes=10_000_000)


@pytest.mark.parametrize("name", MODELS)
def test_moved_keys_are_those_computed_there(name):
    model = engine_of(MODELS[name]()).engine.model
    ids, by = list(range(5, 25)), 300
    here = model.forward_at(ids, 0)
    there = model.forward_at(ids, by)
    # RoPE is relative, so the same tokens by themselves have the same keys anywhere, but for their turn.
    moved = model.rope.move(here, by)
    for layer, (found, expected) in enumerate(zip(moved.keys, there.keys, strict=True)):
        assert torch.allclose(found, expected, atol=2e-5), (name, layer)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(here.values, there.values, strict=True))
    assert model.rope.layers == ((True, False) if name == "nope" else (True, True))
    assert model.rope.interleaved == (name == "interleaved")
    back = model.rope.move(there, -by)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(back.keys, here.keys, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_are_turned_in_float32_and_rounded_once(dtype):
    rope = Rope(torch.tensor([1.0, 0.1, 0.01, 0.001]), (True,))
    keys = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    moved = rope.move(KVTensors((keys,), (keys,)), 777)
    precise = rope.turned(keys.double().float(), 777)
    assert torch.equal(moved.keys[0], precise.to(dtype))
    assert torch.equal(moved.values[0], keys)


@pytest.mark.parametrize("by", [0, 300])
def test_keys_are_moved_into_memory_that_is_there(by):
    rope = Rope(torch.tensor([1.0, 0.1]), (True, False), interleaved=True)
    keys, values = (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(at)).bfloat16() for at in (0, 1))
    kv = KVTensors((keys, keys), (values, values))
    memory = KVTensors(*(tuple(torch.zeros(2, 9, 8, dtype=torch.bfloat16) for _ in range(2)) for _ in "kv"))
    out = rope.move(kv, by, memory.slice(3, 8))
    assert out.equal(rope.move(kv, by))
    assert memory.slice(3, 8).equal(out)
    assert not memory.keys[0][:, [0, 1, 2, 8]].any()
    assert kv.keys[0].equal(keys)


def test_what_grows_with_the_length_is_not_moved():
    factors = GROUPED["hidden_size"] // GROUPED["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * factors,
        "long_factor": [2.0] * factors,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 512,
    }
    config = Phi3Config(**GROUPED, sliding_window=None, rope_parameters=rope, original_max_position_embeddings=512)
    engine = engine_of(made(config))
    with pytest.raises(UnsupportedRequestError, match=r"\(longrope\) change with the length"):
        _ = engine.engine.model.rope


def test_kv_of_another_model_is_refused():
    rope = Rope(torch.ones(4), (True, True))
    keys = torch.zeros(1, 3, 8)
    with pytest.raises(PackError, match="1 layers; expected the 2"):
        rope.move(KVTensors((keys,), (keys,)), 1)
    with pytest.raises(PackError, match="4 dimensions; expected at least the 8"):
        Rope(torch.ones(4), (True,)).move(KVTensors((keys[..., :4],), (keys,)), 1)
