"""Linear layers whose weights are packed once, in oneDNN's layout; some are multiplied together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

_MOST_BYTES = 2 * 2**30
"""Most bytes of packed weights, which are a second copy. Packing saves more time in smaller models."""


class PackedLinear:
    """Computes linear layers with the same input, in the order of their calls, as one product with packed weights.

    The first layer that is called multiplies for all of them: one product of 960 columns takes half as long as three of
    576, 192 and 192. With gradients, each layer computes as before. Later changes of the weights have no effect.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        first = layers[0]
        self.layers = tuple(layers)
        self.rows = 1
        """Inputs of fewer rows are padded to this number."""
        self.in_features, self.dtype = first.in_features, first.weight.dtype
        self._columns = [layer.out_features for layer in layers]
        self.out_features = sum(self._columns)
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None
        with torch.inference_mode():
            weights: list[Tensor] = [layer.weight for layer in layers]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001 - as torch's compiler does
            # The overload itself: torch would look it up again at each call.
            self._multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
            biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
            self._bias = torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)
        for at, layer in enumerate(layers):
            vars(layer)["forward"] = partial(self._output, at, partial(nn.Linear.forward, layer))

    def __call__(self, rows: Tensor) -> Tensor:
        """The outputs of all layers for `rows`, side by side: `(..., in_features)` to `(..., out_features)`."""
        if self.rows == 1 or (count := rows.numel() // self.in_features) >= self.rows:
            return self._product(rows)
        padded = rows.reshape(1, count, -1).expand(-(-self.rows // max(count, 1)), -1, -1).flatten(0, 1)[: self.rows]
        return self._product(padded)[:count].reshape(*rows.shape[:-1], self.out_features)

    def _output(self, at: int, plain: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:  # noqa: A002 - as `nn.Linear`
        """The output of layer `at`; `plain` computes this layer alone."""
        if torch.is_grad_enabled():
            return plain(input)
        if len(self.layers) == 1:
            return self(input)
        last = self._last
        if last is None or last[0] is not input:
            # Contiguous, as from separate layers: rounding may depend on where a row begins in memory.
            last = input, tuple(part.contiguous() for part in self(input).split_with_sizes(self._columns, -1))
        self._last = None if at == len(self.layers) - 1 else last
        return last[1][at]

    def _product(self, rows: Tensor) -> Tensor:
        output: Tensor = self._multiply(rows, self._weight, self._bias, "none", [], "")
        return output


def pack_weights(model: nn.Module, one_pass: Callable[[], object] | None = None) -> list[PackedLinear]:
    """Make the linear layers of `model` multiply with packed weights; returns the products.

    This applies to bfloat16 and float32 on a CPU that oneDNN supports, up to 2 GiB of weights. A plain linear layer in
    bfloat16 converts its weights into oneDNN's layout at each call, which takes as long as 20 to 40 tokens. `one_pass`
    of the model shows which layers have the same input. Only layers of attention are multiplied together: the outputs
    of other layers are so large that splitting them takes as long as it saves.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        vars(layer).pop("forward", None)
    # Quantised weights are of other types, whatever dtype they report.
    layers = [linear for linear in layers if type(linear.weight) is nn.Parameter and _is_known(linear.weight)]
    if sum(linear.weight.nbytes for linear in layers) > _MOST_BYTES:
        return []
    attention = {id(child) for module in model.modules() if hasattr(module, "layer_idx") for child in module.children()}
    attention_layers, other_layers = (
        [linear for linear in layers if (id(linear) in attention) is is_attention] for is_attention in (True, False)
    )
    return [
        PackedLinear(group)
        for group in (*_sharing_input(attention_layers, one_pass), *([linear] for linear in other_layers))
    ]


def _sharing_input(layers: Sequence[nn.Linear], one_pass: Callable[[], object] | None) -> list[list[nn.Linear]]:
    """The layers in groups that are called once in a pass, with the same input tensor."""
    calls: list[tuple[nn.Linear, Tensor]] = []
    hooks = [layer.register_forward_pre_hook(lambda called, args: calls.append((called, args[0]))) for layer in layers]
    try:
        with suppress(TypeError, ValueError, AttributeError, LookupError, RuntimeError), torch.inference_mode():
            if one_pass is not None:  # `measured_shape` refuses a model that does not run.
                one_pass()
    finally:
        for hook in hooks:
            hook.remove()
    call_counts = Counter(id(layer) for layer, _ in calls)
    groups: dict[object, list[nn.Linear]] = {}
    for layer, tensor in calls:
        kind = (id(tensor), layer.weight.dtype, layer.bias is None)
        if call_counts[id(layer)] == 1:
            groups.setdefault(kind, []).append(layer)
    grouped = {id(layer) for group in groups.values() for layer in group}
    return [*groups.values(), *([layer] for layer in layers if id(layer) not in grouped)]


def _is_known(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight on this machine."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    except (AttributeError, RuntimeError):  # A torch without oneDNN.
        return False
