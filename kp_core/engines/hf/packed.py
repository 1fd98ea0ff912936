"""The engine's own view of a model, with weights in the layout that the processor multiplies in."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["own_view", "pack_weights", "rows_agree", "rows_needed"]

_MOST_BYTES = 2 * 2**30
"""Of packed weights, which are a second copy: what they spare is the more the smaller the model is."""
_LEAST_ROWS = (1, 2, 4, 8, 16, 32)
"""To how many rows products may have to be padded, so that a row's bits do not depend on the other rows."""
_ROWS, _COUNTS = 320, (1, 2, 3, 5, 8, 15, 17, 32, 33, 64, 100, 256)
"""Of the batch, and of the parts of it that are tried."""
_TRIES = 64
"""Rows that are tried of each number, in parts of so many: what goes wrong does so for some rows alone."""
_SPREAD = 1.5


def pack_weights(model: nn.Module) -> list[nn.Linear]:
    """Let the linear layers of `model` multiply with packed weights; gives those that do.

    For bfloat16 and float32 on a CPU that oneDNN knows. There a plain linear layer in bfloat16 brings its weights into
    oneDNN's own layout anew at each call, which takes as long as 20 to 40 tokens do; and a row of a product has the
    same bits whatever rows are beside it, which in float32 the plain one does not give. Weights that change later are
    not followed until this is called again, which leaves what `rows_needed` found: an engine refuses a model that
    changed. With gradients the layers compute as before.
    """
    layers = [each for each in model.modules() if type(each) is nn.Linear]
    # Quantised weights are of other types, whatever dtype they say they have.
    layers = [each for each in layers if type(each.weight) is nn.Parameter and _is_known(each.weight)]
    if sum(each.weight.nbytes for each in layers) > _MOST_BYTES:
        return []
    for layer in layers:
        known = vars(layer).get("forward")
        vars(layer)["forward"] = _packed(layer, known.keywords["least"] if isinstance(known, partial) else 1)
    return layers


@torch.inference_mode()
def rows_needed(layers: Sequence[nn.Linear], packed: Sequence[nn.Linear]) -> int | None:
    """The fewest rows to which products of `packed` layers are padded so that each row has the same bits in any batch.

    `None` where no number does, or one of `layers` that are not packed needs more than one row. Tried on one layer of
    each shape, with parts of many lengths out of one batch; where that shape needs it, layers pad by themselves.
    """
    padding = {id(layer) for layer in packed}
    shapes: dict[object, list[nn.Linear]] = {}
    for layer in layers:
        shapes.setdefault((layer.in_features, layer.out_features, id(layer) in padding), []).append(layer)
    most = 1
    for alike in shapes.values():
        for least in _LEAST_ROWS if id(alike[0]) in padding else _LEAST_ROWS[:1]:
            for layer in alike if id(alike[0]) in padding else ():
                vars(layer)["forward"].keywords["least"] = least
            if rows_agree(_product_of(alike[-1]), alike[-1].in_features, alike[-1].weight.dtype):
                most = max(most, least)
                break
        else:
            return None
    return most


def _product_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """What a layer multiplies, whatever else a kind of layer of its own does."""
    is_plain = type(layer).forward is nn.Linear.forward
    return layer if is_plain else partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)


@torch.inference_mode()
def rows_agree(
    multiply: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, *, rows: int = _ROWS, tries: int = _TRIES
) -> bool:
    """Whether a product of rows of so many elements gives each row the same bits, whatever rows are beside it.

    The elements are very unlike in size: where a few large ones are added to many small ones, the order of a sum shows.
    """
    chance = torch.Generator().manual_seed(0)
    plain = torch.randn(1, rows, width, generator=chance)
    batch = (plain * torch.exp(_SPREAD * torch.randn(plain.shape, generator=chance))).to(dtype)
    whole = multiply(batch)
    for count in _COUNTS:
        # A single row is what a kernel of its own is most often for.
        several = torch.randint(rows - count + 1, (max(tries // count, 2),), generator=chance).tolist()
        for start in range(rows) if count == 1 else several:
            if not torch.equal(multiply(batch[:, start : start + count]), whole[:, start : start + count]):
                return False
    return True


def own_view(model: PreTrainedModel) -> PreTrainedModel:
    """A structural copy that shares its tensors: the caller's model keeps its own attention setting.

    Frequencies of RoPE it has for itself, as `longrope` writes them at every pass.
    """
    shared = (buffer for name, buffer in model.named_buffers() if not name.endswith("inv_freq"))
    tensors = itertools.chain(model.parameters(), shared)
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _packed(layer: nn.Linear, least: int) -> Callable[[Tensor], Tensor]:
    with torch.inference_mode():
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, None)  # noqa: SLF001 - as torch's compiler does
    return partial(_multiplied, layer, partial(nn.Linear.forward, layer), weight, least=least)


def _multiplied(
    layer: nn.Linear,
    plain: Callable[[Tensor], Tensor],
    weight: Tensor,
    input: Tensor,  # noqa: A002 - as `nn.Linear` calls it
    *,
    least: int,
) -> Tensor:
    """The product of `input` with packed weights, of at least so many rows."""
    if torch.is_grad_enabled():
        return plain(input)
    rows = input.numel() // layer.in_features
    if rows >= least:
        return _product(input, weight, layer.bias)
    padded = input.reshape(rows, -1).repeat(-(-least // max(rows, 1)), 1)[:least]
    return _product(padded, weight, layer.bias)[:rows].reshape(*input.shape[:-1], layer.out_features)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001
    return made


def _is_known(weight: Tensor) -> bool:
    """Whether oneDNN packs weights like these here."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    except (AttributeError, RuntimeError):  # A torch without oneDNN.
        return False
