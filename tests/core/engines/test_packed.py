"""Weights in the processor's own layout: the same layer, in the engine's view of a model alone."""

import pytest
import torch
from torch import nn

from kp_core.engines.hf import packed, probe
from kp_core.engines.hf.packed import pack_weights
from kp_core.engines.hf.probe import pad_rows, probed, rows_agree
from tests.kits import tiny_model
from tests.parity.families import model_of

pytestmark = pytest.mark.skipif(
    not packed._is_known(torch.zeros(1, dtype=torch.bfloat16)),
    reason="oneDNN does not know bfloat16 on this processor",
)


def layers(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_a_packed_layer_is_the_plain_one(tokens):
    model, inputs = layers(), torch.randn(1, tokens, 64).to(torch.bfloat16)
    with torch.inference_mode():
        plain = model(inputs)
        assert [product.layers for product in pack_weights(model)] == [(model[0],), (model[2],)]
        found = model(inputs)
    assert (found.float() - plain.float()).abs().max() <= 0.01 * plain.float().abs().max()
    # With gradients, which the packed product does not know, the layer computes as it did.
    inputs.requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None


def test_what_would_not_gain_stays_as_it_is(monkeypatch):
    assert pack_weights(layers(torch.float64)) == []
    assert len(pack_weights(layers(torch.float32))) == 2
    monkeypatch.setattr(packed, "_MOST_BYTES", 100)
    assert pack_weights(layers()) == []


def test_the_callers_model_is_left_alone():
    model = tiny_model("llama").to(torch.bfloat16)
    own = probed(model)
    assert any("forward" in vars(layer) for layer in own.network.modules() if type(layer) is nn.Linear)
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_padded_until_they_agree(dtype):
    """A single row of more than 1,500 terms is summed in another order on some processors; two are not."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(2048, 600)).to(dtype)
    products = pack_weights(wide)
    assert pad_rows(list(wide), products)
    assert products[0].rows in probe._LEAST_ROWS
    rows = (torch.randn(64, 2048) * torch.exp(1.5 * torch.randn(64, 2048))).to(dtype)
    with torch.inference_mode():
        whole = wide(rows)
        for at in range(64):
            assert torch.equal(wide(rows[at : at + 1]), whole[at : at + 1])


class Fork(nn.Module):
    """Three layers that read one tensor, one that reads another, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer_idx = 0  # As attention has it.
        self.left, self.right, self.biased = (
            nn.Linear(64, 96, bias=False),
            nn.Linear(64, 32, bias=False),
            nn.Linear(64, 8),
        )
        self.back, self.twice = nn.Linear(96, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, rows):
        back = self.back(self.left(rows) * self.right(rows).repeat(1, 1, 3))
        return self.twice(self.twice(rows)) + back + self.biased(rows).sum()


def test_layers_that_read_one_tensor_are_one_product():
    torch.manual_seed(0)
    model, rows = Fork().to(torch.bfloat16), torch.randn(1, 40, 64).to(torch.bfloat16)
    with torch.inference_mode():
        plain = model(rows)
        found = {product.layers for product in pack_weights(model, lambda: model(rows))}
        assert found == {(model.left, model.right), (model.biased,), (model.back,), (model.twice,)}
        assert (model(rows) - plain).abs().max() <= 0.02 * plain.abs().max()
        # In any order, of any inputs.
        one, other = rows[:, :5].clone(), rows[:, 5:9].clone()
        expected = [nn.functional.linear(each, model.right.weight) for each in (one, other)]
        assert model.left(one).shape == (1, 5, 96)
        for given, right in ((other, expected[1]), (one, expected[0]), (one, expected[0])):
            assert torch.allclose(model.right(given), right, rtol=0.02, atol=0.02)
        model.left(one)
        assert torch.allclose(model.right(other), expected[1], rtol=0.02, atol=0.02)
    # Weights are taken anew, and a pass that fails is no reason not to pack.
    with torch.no_grad():
        model.left.weight.mul_(2)
    with torch.inference_mode():
        assert len(pack_weights(model, lambda: model(rows[:, :, :3]))) == 5
        assert torch.allclose(
            model.left(one), 2 * nn.functional.linear(one, model.left.weight / 2), rtol=0.02, atol=0.02
        )


def test_products_that_depend_on_the_rows_beside_them_are_noticed():
    class Odd(nn.Linear):
        def forward(self, rows):
            # As a library that sums in another order from 33 rows on.
            return super().forward(rows) * (1 + (rows.shape[1] > 32) / 100)

    odd = Odd(64, 48)
    assert not rows_agree(odd, 64, torch.float32)

    def single(rows):  # As a kernel of its own for a single row.
        return nn.functional.linear(rows, odd.weight) * (1 + (rows.shape[1] == 1) / 100)

    assert not rows_agree(single, 64, torch.float32)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "granitemoehybrid"])
def test_weights_taken_anew_are_packed_as_before(kind):
    network = model_of(kind, torch.bfloat16)
    before, after = probed(network), probed(network)
    names = [
        [[name for name, layer in model.network.named_modules() if layer in product.layers] for product in model.packed]
        for model in (before, after)
    ]
    assert names[0] == names[1] != []
    assert after.lacks == before.lacks
