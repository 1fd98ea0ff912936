"""Engines, models and data that many tests share."""

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from kp_core import load_engine
from kp_core.testing import CHATML, tiny_model, tiny_tokenizer

DATA = Path(os.environ.get("KP_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")


@cache
def tiny_engine(architecture="llama", dtype=torch.float32, chunk_tokens=16, merges=7, template=CHATML):
    """An engine over a tiny random model; shared, so tests must not count on an empty cache."""
    return load_engine(
        tiny_model(architecture, dtype),
        tokenizer=tiny_tokenizer(template, merges),
        chunk_tokens=chunk_tokens,
        cache_bytes=50_000_000,
    )


@cache
def _smol(dtype):
    return load_engine(dtype=dtype, device="cpu", cache_bytes=2_000_000_000)


@pytest.fixture(scope="session")
def smol():
    """The bundled model in float32."""
    return _smol(torch.float32)


@pytest.fixture(scope="session")
def smol_bf16():
    """The bundled model in bfloat16."""
    return _smol(torch.bfloat16)


@pytest.fixture(scope="session")
def hotpot():
    """Questions of HotpotQA with their gold facts."""
    path = DATA / "hotpotqa_gold.jsonl"
    if not path.is_file():
        pytest.skip(f"HotpotQA is not at {path}; set KP_DATA to the folder that holds it")
    with path.open() as lines:
        return [json.loads(line) for line in lines]
