"""What is said of a model by its configuration alone, against the model itself."""

import json

import pytest
import torch

from kp_core.engines.hf.foresight import foresee
from kp_core.engines.hf.model import CausalModel
from kp_core.errors import ModelError, UnsupportedModelError
from tests.cli.conftest import Kp, kp
from tests.parity.families import QUICK, config_of, model_of, served

__all__ = ["kp"]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in served()]
)
def test_the_configuration_tells_what_the_model_is(kind, tmp_path):
    config_of(kind).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    seen, model = foresee(tmp_path, "bfloat16"), model_of(kind, torch.bfloat16)
    loaded = CausalModel(model)
    assert seen.kind == loaded.kind
    assert (seen.bytes_per_token, seen.positions) == (loaded.shape.bytes_per_token, loaded.max_positions)
    assert seen.state_bytes in {0, loaded.shape.state_bytes}, "0 where experts let no shapes through"
    # Some keep the gates of their experts in float32, as loading them does.
    weights = sum(each.numel() * each.element_size() for each in set(model.parameters()))
    # Until it is loaded, a Mamba's `A_log` is one too: nothing beside a trained model, a thirtieth of a tiny Zamba.
    assert 0.98 * weights <= seen.weight_bytes <= (1.04 if kind == "zamba" else 1.01) * weights


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
