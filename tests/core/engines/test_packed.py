"""Weights in the processor's own layout: the same layer, in the engine's view of a model alone."""

import pytest
import torch
from torch import nn

from kp_core.engines.hf import packed
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.hf.packed import pack_weights
from kp_core.testing import tiny_model

pytestmark = pytest.mark.skipif(not packed._is_known(), reason="oneDNN does not know bfloat16 on this processor")


def layers(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_a_packed_layer_is_the_plain_one(tokens):
    model, inputs = layers(), torch.randn(1, tokens, 64).to(torch.bfloat16)
    with torch.inference_mode():
        plain = model(inputs)
        assert pack_weights(model) == [model[0], model[2]]
        found = model(inputs)
    assert (found.float() - plain.float()).abs().max() <= 0.01 * plain.float().abs().max()
    # With gradients, which the packed product does not know, the layer computes as it did.
    inputs.requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None


def test_what_would_not_gain_stays_as_it_is(monkeypatch):
    assert pack_weights(layers(torch.float32)) == []
    model = layers()
    assert pack_weights(model, head=model[2]) == [model[0]]
    monkeypatch.setattr(packed, "_MOST_BYTES", 100)
    assert pack_weights(layers()) == []


def test_the_callers_model_is_left_alone():
    model = tiny_model("llama").to(torch.bfloat16)
    own = CausalModel(model)
    assert any("forward" in vars(layer) for layer in own._model.modules() if type(layer) is nn.Linear)
    assert not any("forward" in vars(layer) for layer in model.modules())
