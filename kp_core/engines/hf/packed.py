"""The engine's own view of a model, with weights in the layout that the processor multiplies in."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["own_view", "pack_weights", "rows_stand_alone"]

_MOST_BYTES = 2 * 2**30
"""Of packed weights, which are a second copy: what they spare is the more the smaller the model is."""
_MOST_ROWS, _ROWS = 1024, (1, 2, 7, 16, 18, 31, 32, 33, 48, 64, 65, 100, 128, 140, 200, 256, 300, 512, 700)
"""Of the batch, and of the parts that are tried."""


def pack_weights(model: nn.Module, head: nn.Module | None = None) -> list[nn.Linear]:
    """Let the linear layers of `model`, all but `head`, multiply with packed weights; gives those that do.

    For bfloat16 on a CPU that oneDNN knows. There a plain linear layer brings its weights into oneDNN's own layout
    anew at each call, which takes as long as 20 to 40 tokens do. Weights that change later are not followed until this
    is called again: an engine refuses a model that changed. With gradients the layers compute as before.
    """
    layers = [each for each in model.modules() if type(each) is nn.Linear and each is not head]
    # Quantised weights are of other types, whatever dtype they say they have.
    layers = [each for each in layers if type(each.weight) is nn.Parameter and each.weight.dtype == torch.bfloat16]
    layers = [each for each in layers if each.weight.device.type == "cpu"]
    if not _is_known() or sum(each.weight.nbytes for each in layers) > _MOST_BYTES:
        return []
    for layer in layers:
        vars(layer)["forward"] = _packed(layer)
    return layers


@torch.inference_mode()
def rows_stand_alone(layers: Sequence[nn.Linear]) -> bool:
    """Whether each row of a product of `layers` has the same bits, whatever rows are multiplied with it.

    Tried on one layer of each shape, with parts of many lengths out of one batch.
    """
    chance = torch.Generator().manual_seed(0)
    shapes = {(layer.in_features, layer.out_features, layer.bias is None): layer for layer in layers}
    for layer in shapes.values():
        rows = torch.randn(1, _MOST_ROWS, layer.in_features, generator=chance).to(layer.weight.dtype)
        whole = layer(rows)
        for count in _ROWS:
            start = int(torch.randint(_MOST_ROWS - count + 1, (), generator=chance))
            if not torch.equal(layer(rows[:, start : start + count]), whole[:, start : start + count]):
                return False
    return True


def own_view(model: PreTrainedModel) -> PreTrainedModel:
    """A structural copy that shares its tensors: the caller's model keeps its own attention setting.

    Frequencies of RoPE it has for itself, as `longrope` writes them at every pass.
    """
    shared = (buffer for name, buffer in model.named_buffers() if not name.endswith("inv_freq"))
    tensors = itertools.chain(model.parameters(), shared)
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    plain = partial(nn.Linear.forward, layer)
    with torch.inference_mode():
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, None)  # noqa: SLF001 - as torch's compiler does

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - as `nn.Linear` calls it
        if torch.is_grad_enabled():
            return plain(input)
        made: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, layer.bias, "none", [], "")  # noqa: SLF001
        return made

    return forward


def _is_known() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - as torch's compiler does
    except (AttributeError, RuntimeError):  # A torch without oneDNN.
        return False
