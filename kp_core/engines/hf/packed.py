"""The engine's own view of a model, with weights in the layout that the processor multiplies in."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["PackedLinear", "own_view", "pack_weights", "rows_agree", "rows_needed"]

_MOST_BYTES = 2 * 2**30
"""Of packed weights, which are a second copy: what they spare is the more the smaller the model is."""
_LEAST_ROWS = (1, 2, 4, 8, 16, 32)
"""To how many rows products may have to be padded, so that a row's bits do not depend on the other rows."""
_ROWS, _COUNTS = 320, (1, 2, 3, 5, 8, 15, 17, 32, 33, 64, 100, 256)
"""Of the batch, and of the parts of it that are tried."""
_TRIES = 64
"""Rows that are tried of each number, in parts of so many: what goes wrong does so for some rows alone."""
_SPREAD = 1.5


class PackedLinear:
    """Linear layers that are given the same input, as one product with packed weights.

    The first layer that is called multiplies for all of them, and keeps the result until the last one has its part: one
    product of 960 columns takes half as long as three of 576, 192 and 192. `layers` are in the order of their calls.
    With gradients each layer computes as before. Weights that change later are not followed.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        first = layers[0]
        self.layers = tuple(layers)
        self.rows = 1
        """The fewest rows that are multiplied; fewer are padded."""
        self.in_features, self.dtype = first.in_features, first.weight.dtype
        self._columns = [layer.out_features for layer in layers]
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None
        with torch.inference_mode():
            weights: list[Tensor] = [layer.weight for layer in layers]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001 - as torch's compiler does
            biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
            self._bias = torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)
        for at, layer in enumerate(layers):
            vars(layer)["forward"] = partial(self._output, at, partial(nn.Linear.forward, layer))

    @property
    def out_features(self) -> int:
        """Columns of the product."""
        return sum(self._columns)

    def __call__(self, rows: Tensor) -> Tensor:
        """What all layers give of `rows`, side by side: `(..., in_features)` to `(..., out_features)`."""
        count = rows.numel() // self.in_features
        if count >= self.rows:
            return self._product(rows)
        padded = rows.reshape(1, count, -1).expand(-(-self.rows // max(count, 1)), -1, -1).flatten(0, 1)[: self.rows]
        return self._product(padded)[:count].reshape(*rows.shape[:-1], self.out_features)

    def _output(self, at: int, plain: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:  # noqa: A002 - as `nn.Linear`
        """What layer `at` gives; `plain` computes it by itself."""
        if torch.is_grad_enabled():
            return plain(input)
        if len(self.layers) == 1:
            return self(input)
        last = self._last
        if last is None or last[0] is not input:
            # As each would give it: what follows may round by where a row begins in memory.
            last = input, tuple(part.contiguous() for part in self(input).split_with_sizes(self._columns, -1))
        self._last = None if at == len(self.layers) - 1 else last
        return last[1][at]

    def _product(self, rows: Tensor) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")  # noqa: SLF001
        return made


def pack_weights(model: nn.Module, one_pass: Callable[[], object] | None = None) -> list[PackedLinear]:
    """Let the linear layers of `model` multiply with packed weights; gives the products.

    For bfloat16 and float32 on a CPU that oneDNN knows. There a plain linear layer in bfloat16 brings its weights into
    oneDNN's own layout anew at each call, which takes as long as 20 to 40 tokens do; and a row of a product has the
    same bits whatever rows are beside it, which in float32 the plain one does not give. Which layers are given the same
    input is seen in `one_pass` of the model. Only those of attention multiply together: what other layers give is so
    large that to bring it apart takes as long as it spares.
    """
    layers = [each for each in model.modules() if type(each) is nn.Linear]
    for layer in layers:
        vars(layer).pop("forward", None)
    # Quantised weights are of other types, whatever dtype they say they have.
    layers = [each for each in layers if type(each.weight) is nn.Parameter and _is_known(each.weight)]
    if sum(each.weight.nbytes for each in layers) > _MOST_BYTES:
        return []
    attention = {id(child) for module in model.modules() if hasattr(module, "layer_idx") for child in module.children()}
    asked, others = ([each for each in layers if (id(each) in attention) is wanted] for wanted in (True, False))
    return [PackedLinear(together) for together in (*_sharing_input(asked, one_pass), *([each] for each in others))]


def _sharing_input(layers: Sequence[nn.Linear], one_pass: Callable[[], object] | None) -> list[list[nn.Linear]]:
    """The layers, together where each is called once in a pass, with the same tensor."""
    calls: list[tuple[nn.Linear, Tensor]] = []
    hooks = [layer.register_forward_pre_hook(lambda called, args: calls.append((called, args[0]))) for layer in layers]
    try:
        with suppress(TypeError, ValueError, AttributeError, LookupError, RuntimeError), torch.inference_mode():
            if one_pass is not None:  # A model that does not run is refused where its cache is looked at.
                one_pass()
    finally:
        for hook in hooks:
            hook.remove()
    once = Counter(id(layer) for layer, _ in calls)
    groups: dict[object, list[nn.Linear]] = {}
    for layer, given in calls:
        kind = (id(given), layer.weight.dtype, layer.bias is None)
        if once[id(layer)] == 1:
            groups.setdefault(kind, []).append(layer)
    grouped = {id(layer) for group in groups.values() for layer in group}
    return [*groups.values(), *([layer] for layer in layers if id(layer) not in grouped)]


@torch.inference_mode()
def rows_needed(layers: Sequence[nn.Linear], packed: Sequence[PackedLinear]) -> int | None:
    """The fewest rows to which `packed` products are padded so that each row has the same bits in any batch.

    `None` where no number does, or one of `layers` that are not packed needs more than one row. Tried on one product of
    each shape, with parts of many lengths out of one batch; where that shape needs it, products pad by themselves.
    """
    shapes: dict[tuple[int, int], list[PackedLinear]] = {}
    for product in packed:
        shapes.setdefault((product.in_features, product.out_features), []).append(product)
    most = 1
    for alike in shapes.values():
        for least in _LEAST_ROWS:
            for product in alike:
                product.rows = least
            if rows_agree(alike[-1], alike[-1].in_features, alike[-1].dtype):
                most = max(most, least)
                break
        else:
            return None
    known = {id(layer) for product in packed for layer in product.layers}
    others = {(each.in_features, each.out_features): each for each in layers if id(each) not in known}
    agree = (rows_agree(_product_of(each), each.in_features, each.weight.dtype) for each in others.values())
    return most if all(agree) else None


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


def _is_known(weight: Tensor) -> bool:
    """Whether oneDNN packs weights like these here."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    except (AttributeError, RuntimeError):  # A torch without oneDNN.
        return False
