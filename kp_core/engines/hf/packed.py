"""Weights in the layout that the processor multiplies in, made once instead of at every forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["pack_weights"]

_MOST_BYTES = 2 * 2**30
"""Of packed weights, which are a second copy: what they spare is the more the smaller the model is."""


def pack_weights(model: nn.Module, head: nn.Module | None = None) -> int:
    """Let the linear layers of `model`, all but `head`, multiply with packed weights; gives how many do.

    For bfloat16 on a CPU that oneDNN knows. There a plain linear layer brings its weights into oneDNN's own layout
    anew at each call, which takes as long as 20 to 40 tokens do. Weights that change later are not followed: an engine
    refuses a model that changed. With gradients the layers compute as before.
    """
    layers = [each for each in model.modules() if type(each) is nn.Linear and each is not head]
    # Quantised weights are of other types, whatever dtype they say they have.
    layers = [each for each in layers if type(each.weight) is nn.Parameter and each.weight.dtype == torch.bfloat16]
    layers = [each for each in layers if each.weight.device.type == "cpu"]
    if not _is_known() or sum(each.weight.nbytes for each in layers) > _MOST_BYTES:
        return 0
    for layer in layers:
        vars(layer)["forward"] = _packed(layer)
    return len(layers)


def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    plain = layer.forward
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
