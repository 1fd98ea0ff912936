"""Tests whether, with this model on this machine, the bits of a token's KV depend on the tokens before it alone.

They do if (1) a row of a product has the same bits whatever rows are multiplied with it, which oneDNN's products with
packed weights guarantee from a few rows on (`packed.pad_rows`), (2) the position decides the order in which
attention adds (`attention`), and (3) everything else looks at each token alone. All of it is tested: products with each
shape of layer, attention with the model's heads, and whole passes that are split in several ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kp_core.engines.hf.attention import attend, grouped_rows, keys_to_read, tile_of_each
from kp_core.engines.hf.packed import PackedLinear, pad_rows, rows_agree
from kp_core.engines.local.buffer import TILE, KVBuffer
from kp_core.kv import KVTensors

if TYPE_CHECKING:
    from kp_core.engines.hf.model import CausalModel

__all__ = ["why_not_bitwise"]

_CUTS = ((1,), (7, 8, 9, 10), (3, 20))
_TOKENS = 24
_UNPACKED_ROWS = 2048
"""Rows tried in products with matrices that are not packed, where as few as one row in 500 differs."""
_FEWEST_ROWS, _DIVIDED = 321, 2**18
"""Fewest rows and elements for a test of activations, enough for several threads. The number of rows is odd, so that
the boundary between two threads falls within a row."""
_STRIDE = 31
"""Tokens between the fillings of a tile that are tried."""
_LONG = 2 * TILE + 70
_LONG_CUTS = ((TILE,), (100, 2 * TILE - 3), (2 * TILE + 1, 2 * TILE + 2), (_LONG - 1,), (_LONG - 9, _LONG - 4))


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
            halves = partial(_of_half, module, width)
            if is_half and not rows_agree(halves, 2 * width, model.shape.dtype, rows=rows):
                return False
    return True


def _of_half(module: nn.Module, width: int, rows: Tensor) -> Tensor:
    """The output of `module` for the first half of each row."""
    output: Tensor = module(rows[..., :width])
    return output


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
        if dim == value_dim and not _short_tiles_agree(query[:, :, :1], key[:, :, :TILE], value[:, :, :TILE]):
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
    ids = torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    logits, kv = _computed(model, ids, ())
    for cuts in _CUTS:
        logits_in_parts, kv_in_parts = _computed(model, ids, cuts)
        if not (torch.equal(logits_in_parts, logits) and kv_in_parts.equal(kv)):
            return False
    return not model.batches or all(_together(model, ids[0].tolist(), logits, kv))


def _computed(model: CausalModel, ids: Tensor, cuts: Sequence[int]) -> tuple[Tensor, KVTensors]:
    """Logits and KV of all tokens, computed in passes between the `cuts`."""
    buffer = KVBuffer(model.shape, _TOKENS)
    parts = [model.forward_all(ids[:, start:stop], buffer) for start, stop in pairwise((0, *cuts, _TOKENS))]
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
