"""Makes and tests products and passes in which the bits of a token's KV depend on the tokens before it alone.

They do if (1) a row of a product has the same bits whatever rows are multiplied with it, which oneDNN's products with
packed weights guarantee from a few rows on, (2) the position decides the order in which attention adds (`attention`),
and (3) everything else looks at each token alone. All of it is tested with the model on this machine: products with
each shape of layer, attention with the model's heads, and whole passes that are split in several ways.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kp_core.engines.hf.attention import attend, grouped_rows, keys_to_read, tile_of_each
from kp_core.engines.local.buffer import TILE, KVBuffer
from kp_core.kv import KVTensors

if TYPE_CHECKING:
    from kp_core.engines.hf.model import CausalModel

__all__ = ["PackedLinear", "own_view", "pack_weights", "pad_rows", "rows_agree", "why_not_bitwise"]

_MOST_BYTES = 2 * 2**30
"""Most bytes of packed weights, which are a second copy. Packing saves more time in smaller models."""
_LEAST_ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of rows tried for the padding of products, so that a row's bits do not depend on the other rows."""
_ROWS, _COUNTS = 320, (1, 2, 3, 5, 8, 15, 17, 32, 33, 64, 100, 256)
"""Rows of the test batch, and of the parts of it that are tried."""
_TRIES = 64  # Rows tried in total for each length of part, because a difference may show in a few rows only.
_SPREAD = 1.5
_CUTS = ((1,), (7, 8, 9, 10), (3, 20))
_TOKENS = 24
_UNPACKED_ROWS = 2048
"""Rows tried in products with matrices that are not packed, where as few as one row in 500 differs."""
_FEWEST_ROWS, _DIVIDED = 321, 2**18
"""Fewest rows and elements for a test of activations, enough for several threads. The number of rows is odd, so that
the boundary between two threads falls within a row."""
_STRIDE = 31  # Tokens between the fillings of a tile that are tried.
_LONG = 2 * TILE + 70
_LONG_CUTS = ((TILE,), (100, 2 * TILE - 3), (2 * TILE + 1, 2 * TILE + 2), (_LONG - 1,), (_LONG - 9, _LONG - 4))


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

    @property
    def out_features(self) -> int:
        """Columns of the product."""
        return sum(self._columns)

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


@torch.inference_mode()
def pad_rows(layers: Sequence[nn.Linear], packed: Sequence[PackedLinear]) -> bool:
    """Pad `packed` products to as few rows as give each row the same bits in any batch; whether that succeeds.

    One product of each shape is tested. Those of `layers` that are not packed must agree as they are.
    """
    shapes: dict[tuple[int, int], list[PackedLinear]] = {}
    for product in packed:
        shapes.setdefault((product.in_features, product.out_features), []).append(product)
    for same_shape in shapes.values():
        for least in _LEAST_ROWS:
            for product in same_shape:
                product.rows = least
            if rows_agree(same_shape[-1], same_shape[-1].in_features, same_shape[-1].dtype):
                break
        else:
            return False
    packed_ids = {id(layer) for product in packed for layer in product.layers}
    unpacked = {(layer.in_features, layer.out_features): layer for layer in layers if id(layer) not in packed_ids}
    return all(rows_agree(_product_of(layer), layer.in_features, layer.weight.dtype) for layer in unpacked.values())


def _product_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The matrix product of a layer alone; subclasses of `nn.Linear` may do more."""
    is_plain = type(layer).forward is nn.Linear.forward
    return layer if is_plain else partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)


@torch.inference_mode()
def rows_agree(
    multiply: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, *, rows: int = _ROWS, tries: int = _TRIES
) -> bool:
    """Whether a product of rows of `width` elements gives each row the same bits, whatever the other rows are.

    The elements differ strongly in size: when a few large ones are added to many small ones, the order changes the sum.
    """
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(1, rows, width, generator=generator)
    batch = (plain * torch.exp(_SPREAD * torch.randn(plain.shape, generator=generator))).to(dtype)
    expected = multiply(batch)
    for count in _COUNTS:
        # Libraries most often have a separate kernel for a single row.
        starts = torch.randint(rows - count + 1, (max(tries // count, 2),), generator=generator).tolist()
        for start in range(rows) if count == 1 else starts:
            if not torch.equal(multiply(batch[:, start : start + count]), expected[:, start : start + count]):
                return False
    return True


def own_view(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules that shares the tensors, so that the caller's model keeps its own attention setting.

    RoPE frequencies are copied, because `longrope` writes them in every pass.
    """
    shared = (buffer for name, buffer in model.named_buffers() if not name.endswith("inv_freq"))
    tensors = itertools.chain(model.parameters(), shared)
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _is_known(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight on this machine."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    except (AttributeError, RuntimeError):  # A torch without oneDNN.
        return False


def why_not_bitwise(  # noqa: PLR0911 - one return for each reason
    model: CausalModel, packed: Sequence[PackedLinear]
) -> str:
    """Why bits depend on how a prompt is split into passes, as a clause; blank if the tests found that they do not."""
    shape = model.shape
    if shape.device.type != "cpu" or shape.devices:
        return "products and attention of an accelerator round by the number of rows"
    if shape.states:
        return "recurrent layers round by the number of tokens in a pass"
    if not model.attends:
        return "its attention is its own"
    linear = [module for module in model.network.modules() if isinstance(module, nn.Linear)]
    if not pad_rows(linear, packed) or not _others_agree(model.network, linear):
        return "products of its layers round by the number of rows on this processor"
    if not _activations_agree(model):
        return "activations round by where threads divide them"
    if not _attention_agrees(model):
        return "attention rounds by the number of rows on this processor"
    return "" if _passes_agree(model) else "passes that are cut in other places give other bits"


def _others_agree(network: nn.Module, linear: Sequence[nn.Linear]) -> bool:
    """Whether products with matrices outside of linear layers, such as those of experts, round each row separately."""
    embeddings = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    layer_weights = {id(layer.weight) for layer in (*linear, *embeddings)}
    unpacked = {
        parameter.shape[-2:]: parameter
        for parameter in network.parameters()
        if parameter.ndim > 1 and id(parameter) not in layer_weights
    }
    for weight in unpacked.values():
        matrix = weight.detach().reshape(-1, *weight.shape[-2:])[0]
        for operand in (matrix, matrix.T):
            product = partial(nn.functional.linear, weight=operand)
            if not rows_agree(product, operand.shape[1], operand.dtype, rows=_UNPACKED_ROWS, tries=_UNPACKED_ROWS):
                return False
    return True


def _activations_agree(model: CausalModel) -> bool:
    """Whether activation functions give each row the same bits.

    torch divides the elements among threads, and computes the last few of each part differently.
    """
    width = getattr(model.network.config.get_text_config(decoder=True), "intermediate_size", None)
    if not isinstance(width, int):
        return True
    rows = max(_FEWEST_ROWS, _DIVIDED // width | 1)
    # Some models slice the gate out of a product that is twice as wide, so its rows are not contiguous.
    is_half = any(isinstance(layer, nn.Linear) and layer.out_features == 2 * width for layer in model.network.modules())
    leaves = [
        layer for layer in model.network.modules() if not [*layer.children(), *layer.parameters(), *layer.buffers()]
    ]
    for module in {type(layer): layer for layer in leaves}.values():
        with suppress(TypeError, ValueError, RuntimeError, AttributeError, LookupError):  # Not a function of rows.
            if not rows_agree(module, width, model.shape.dtype, rows=rows):
                return False
            half = partial(lambda module, part: module(part[..., :width]), module)
            if is_half and not rows_agree(half, 2 * width, model.shape.dtype, rows=rows):
                return False
    return True


@torch.inference_mode()
def _attention_agrees(model: CausalModel) -> bool:
    """Whether attention over more than two tiles gives the same bits in parts, for each shape of heads."""
    generator = torch.Generator().manual_seed(0)
    config = model.network.config.get_text_config(decoder=True)
    for kv_heads, dim, value_dim in sorted(set(model.shape.layers)):
        heads = max(kv_heads, int(getattr(config, "num_attention_heads", kv_heads)) // kv_heads * kv_heads)
        query, key, value = (
            torch.randn(1, count, _LONG, width, generator=generator).to(model.shape.dtype)
            for count, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
        )
        expected = attend(query, key, value, range(_LONG))
        for cuts in _LONG_CUTS:
            for start, stop in pairwise((0, *cuts, _LONG)):
                part = attend(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], range(start, stop))
                if not torch.equal(part, expected[:, :, start:stop]):
                    return False
        # Values are padded to the width of keys, as `attend` does.
        value = nn.functional.pad(value[:, :, :TILE], (0, max(dim - value_dim, 0)))
        if not _short_tiles_agree(query[:, :, :1], key[:, :, :TILE], value):
            return False
    return True


def _short_tiles_agree(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the first keys of a tile give the same bits as the whole tile with the other keys masked."""
    grouped, _ = grouped_rows(query, key.shape[1])
    for visible in range(1, TILE, _STRIDE):
        mask = grouped.new_zeros(1, 1, grouped.shape[2], TILE)
        mask[..., visible:] = -torch.inf
        short, whole = (
            tile_of_each(grouped, key[:, :, :keys], value[:, :, :keys], mask[..., :keys], None)
            for keys in (keys_to_read(visible), TILE)
        )
        if not all(map(torch.equal, short, whole)):
            return False
    return True


@torch.inference_mode()
def _passes_agree(model: CausalModel) -> bool:
    """Whether passes over a few tokens agree: in one pass, in parts, and over two sequences at a time."""
    vocabulary = model.network.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    logits, kv = _computed(model, ids, ())
    for cuts in _CUTS:
        logits_in_parts, kv_in_parts = _computed(model, ids, cuts)
        if not (torch.equal(logits_in_parts, logits) and kv_in_parts.equal(kv)):
            return False
    return not model.batches or all(_together(model, ids, logits, kv))


def _computed(model: CausalModel, ids: Sequence[int], cuts: Sequence[int]) -> tuple[Tensor, KVTensors]:
    """Logits and KV of all tokens, computed in passes between the `cuts`."""
    buffer = KVBuffer(model.shape, _TOKENS)
    parts = [model.forward(ids[start:stop], buffer, stop - start) for start, stop in pairwise((0, *cuts, _TOKENS))]
    return torch.cat(parts), buffer.read(0, _TOKENS)


def _together(model: CausalModel, tokens: list[int], logits: Tensor, kv: KVTensors) -> Iterator[bool]:
    """Whether two sequences with a common prefix get the expected bits, with several new tokens each and with one."""
    for counts in ((12, 9), (1, 1)):
        buffers = [KVBuffer(model.shape, _TOKENS) for _ in counts]
        for buffer in buffers:
            buffer.append(kv.slice(0, 10))
        parts = [tokens[10 : 10 + count] for count in counts]
        is_step = max(counts) == 1
        step_logits = model.rows(buffers)([part[0] for part in parts]) if is_step else model.ragged(buffers, parts)
        for row, (buffer, count) in enumerate(zip(buffers, counts, strict=True)):
            yield torch.equal(step_logits[row], logits[9 + count])
            yield buffer.read(0, 10 + count).equal(kv.slice(0, 10 + count))
