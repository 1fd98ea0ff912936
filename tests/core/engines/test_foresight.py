"""What is said of a model by its configuration alone; `tests/parity/test_models.py` holds it against every family."""

import json

import pytest
import torch

from kp_core.engines.hf.foresight import foresee
from kp_core.engines.local.buffer import default_cache_bytes
from kp_core.errors import ModelError, UnsupportedModelError
from tests.cli.conftest import Kp, kp
from tests.parity.families import config_of

__all__ = ["kp"]


def test_the_longest_prompt_is_what_memory_or_the_model_holds(tmp_path, monkeypatch):
    config_of("llama").save_pretrained(tmp_path)
    seen = foresee(tmp_path, "float32")
    assert seen.longest_prompt == seen.positions
    # Where much is left, a quarter of the memory is for KV.
    much = (seen.weight_bytes, 2 * seen.weight_bytes // 4 // seen.bytes_per_token)
    for left, expected in ((10 * seen.bytes_per_token, 10), (-1, 0), much):
        room = seen.weight_bytes + left
        monkeypatch.setattr("kp_core.engines.hf.foresight.memory_bytes", lambda _, room=room: room)
        assert foresee(tmp_path, "float32").longest_prompt == expected


def test_a_gpu_gives_kv_what_the_weights_leave_and_a_cpu_a_quarter():
    assert default_cache_bytes(torch.device("cuda"), 80_000, 64_000) == 48_000
    assert default_cache_bytes(torch.device("cuda"), 80_000, -1) == 0
    assert default_cache_bytes(torch.device("cpu"), 80_000, 64_000) == 20_000


def test_what_cannot_be_is_said(tmp_path):
    with pytest.raises(ModelError, match="Could not load"):
        foresee(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        foresee(tmp_path)


def test_the_doctor_tells_it_before_anything_is_loaded(kp: Kp, tmp_path):
    config_of("deepseek_v3").save_pretrained(tmp_path)
    code, out, err = kp("doctor", str(tmp_path), "--json")
    model = json.loads(out)["model"]
    assert (code, model["supported"], model["exact_reuse"], model["cache"]) == (0, True, True, "latent"), err
    assert model["steer"].startswith("no, as its cache holds latents")
    assert model["kv_bytes_per_token"] > 0
    code, out, _ = kp("doctor", str(tmp_path / "none"), "--json")
    assert (code, json.loads(out)["model"]["supported"]) == (3, False)
