"""The law of `test_one_arithmetic` for families beyond the three models: one or two of each kind of cache and layer."""

import uuid

import pytest
import torch
from hypothesis import given

from kp_core import load_engine
from tests.kits import tiny_tokenizer
from tests.laws.test_one_arithmetic import ALONG, LONG, check, quick, talks, ways
from tests.parity.families import model_of

FAMILIES = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "minicpm3",
    "ministral",
    "mistral",
    "olmo2",
    "olmo3",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2 with a window",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
WIDTH = 64
"""Of their layers: activation functions of a width that is no multiple of it round by how many numbers a pass has."""


@pytest.fixture(scope="module")
def engine(request):
    model = model_of(request.param, torch.bfloat16, intermediate_size=WIDTH)
    engine = load_engine(model, tokenizer=tiny_tokenizer(merges=7), chunk_tokens=16)
    if "bitwise" not in engine.engine.supports:
        pytest.skip(f"not bitwise: {engine.engine.lacks['bitwise']}")
    return engine


# Each family in one of the ways, in turn; in all of them nightly.
WAYS = [
    pytest.param(name, way, id=f"{name}-{way.source}", marks=() if at % len(ALONG) == number else pytest.mark.nightly)
    for at, name in enumerate(FAMILIES)
    for number, way in enumerate(ALONG)
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "way"), WAYS, indirect=["engine"])
def test_a_long_prompt_has_the_same_bits_however_it_was_reached(engine, way, tmp_path):
    engine.clear_cache()
    check(engine, LONG, way, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
@quick
@given(talk=talks, way=ways)
def test_a_prompt_has_the_same_bits_however_it_was_reached(engine, talk, way, tmp_path):
    engine.clear_cache()
    check(engine, talk, way, tmp_path / uuid.uuid4().hex)
