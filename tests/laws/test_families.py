"""The law of `test_one_arithmetic` for families beyond the three models: one or two of each kind of cache and layer."""

import uuid

import pytest
import torch
from hypothesis import given

from kp_core import load_engine
from kp_core.testing import tiny_tokenizer
from tests.laws.test_one_arithmetic import ALONG, LONG, check, quick, talks, ways
from tests.parity.families import model_of

FAMILIES = ()

matrix = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def engine(request):
    engine = load_engine(model_of(request.param, torch.bfloat16), tokenizer=tiny_tokenizer(merges=7), chunk_tokens=16)
    if "bitwise" not in engine.engine.supports:
        pytest.skip(f"not bitwise: {engine.engine.lacks['bitwise']}")
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
@pytest.mark.parametrize("way", ALONG, ids=lambda way: way.source)
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
