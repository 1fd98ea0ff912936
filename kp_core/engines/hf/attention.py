"""Tiled attention: the result for a token does not depend on how the prompt is split into forward passes.

Positions are divided into tiles of `TILE`. A token attends to each tile up to its own separately. The results are
joined by their log-sum-exp in the order of positions. So the position of the token alone decides which numbers are
multiplied and in which order they are added. Missing keys of a tile are masked, never cut off. Query rows are padded to
a multiple of `_ROWS`, because the kernel computes the last one to three rows of a block differently. `hf.probe` tests
this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kp_core.engines.local.buffer import TILE

NAME = "kp_tiles"

_ROWS = 4
_FEW = 64
"""Up to this many new tokens, one masked call attends to all tiles. For more, most tiles are read without a mask."""
_LANES = 16  # Least length of the softmax over tiles: a shorter sum is added in another order.
_TOGETHER = 16  # The results of tiles are added in groups of this many.
_SMALL = 1 << 16
"""Up to this many elements of a result, one call adds all tiles. A larger sum would not fit the processor's cache."""

_HALF, _STEP = TILE // 2, 32
"""Of a tile of which a row sees at most `_HALF` keys, only these are read, in steps of `_STEP` (`keys_to_read`)."""

_ALIGNED = 16  # Elements.
_SMALL_MASK = 1 << 20  # Elements of a mask of which many are kept.
_KEPT = 1 << 22  # Elements of the largest mask that is kept after its layer.
_GIVES_FLOAT32 = hasattr(torch.ops.aten.bmm, "dtype")  # Newer versions of torch give sums unrounded, on CUDA.

_SDPAParams, _can_use_flash = torch.backends.cuda.SDPAParams, torch.backends.cuda.can_use_flash_attention
_sdpa = nn.functional.scaled_dot_product_attention
# No public function returns the log-sum-exps.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default  # noqa: SLF001
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention.default  # noqa: SLF001


class Sees(NamedTuple):
    """Which earlier tokens a token of a layer sees.

    With `window` 0 it sees all of them, else the last `window` tokens including itself, or, `is_chunked`, its chunk.
    """

    window: int = 0
    is_chunked: bool = False

    def first(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def visible(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Whether tokens at the positions `rows` see those at `keys`; the two are broadcast."""
        visible = keys <= rows
        if self.window:
            visible &= keys >= (rows // self.window * self.window if self.is_chunked else rows - self.window + 1)
        return visible


def bias_of(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask of what is not `visible`."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def tiled_attention(  # noqa: PLR0913 - the signature is that of transformers' AttentionInterface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **extra: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attention of the new tokens of one or several sequences over themselves and all tokens before them.

    `query` is `(1, heads, new, head_dim)`, `key` and `value` are `(1, kv_heads, tokens, head_dim)`; returns
    `(1, new, heads, head_dim)`. An engine passes `kp_attend`, which computes it from the layer, query, key, value,
    scale and sinks; or `kp_weights`, which is called with the weights, `(heads, new, tokens)`, of tokens at any
    positions, with an additive `attention_mask`, `(1, 1, new, tokens)`. Without both, the tokens are the last of a
    sequence.

    Raises `ValueError` when a model needs softcap or a position bias, and for sinks outside of an engine's passes.
    """
    unsupported = [name for name in ("softcap", "position_bias") if extra.get(name) is not None]
    if unsupported:
        raise ValueError(f"Tiled attention does not do {', '.join(unsupported)}.")
    sinks = extra.get("s_aux")
    if callable(pass_ := extra.get("kp_attend")):
        output = pass_(module.layer_idx, query, key, value, scaling, sinks)
    elif sinks is not None:
        raise ValueError("Tiled attention does sinks only in the passes of an engine.")
    elif attention_mask is not None and callable(weights := extra.get("kp_weights")):
        output = by_products(query, key, value, attention_mask[0, 0], scaling, None, weights)
    else:
        output = _by_mask(query, key, value, range(key.shape[2] - query.shape[2], key.shape[2]), scaling, Sees(), None)
    return output.transpose(1, 2).contiguous(), None


def attend(  # noqa: PLR0913 - the inputs of attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Sequence[int],
    scale: float | None = None,
    sees: Sees = Sees(),  # noqa: B008 - frozen
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of tokens at ascending `positions`, each over the keys up to its own position.

    Shapes are as in `tiled_attention`, but the result is `(1, heads, new, head_dim)`. Keys are stored at their
    positions. Keys behind the last position may hold any finite numbers; missing ones are padded.
    """
    if query.device.type != "cpu" or torch.is_grad_enabled():
        return _by_mask(query, key, value, positions, scale, sees, sinks)
    dim, whole = value.shape[3], -(-(positions[-1] + 1) // TILE) * TILE
    missing_tokens, missing_width = max(whole - key.shape[2], 0), max(key.shape[3] - dim, 0)
    if missing_tokens or missing_width:
        key = nn.functional.pad(key[:, :, :whole], (0, 0, 0, missing_tokens))
        value = nn.functional.pad(value[:, :, :whole], (0, missing_width, 0, missing_tokens))
    is_few = query.shape[2] <= _FEW and not sees.window
    outputs, start = [], 0
    for places in [tuple(positions)] if is_few else _by_tile(tuple(positions)):
        stop = start + len(places)
        outputs.append(_of_rows(query[:, :, start:stop], key, value, places, scale, sees, sinks))
        start = stop
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))[..., :dim]


def tile_of_each(
    grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of rows `(batch, kv_heads, rows, dim)`, each batch entry over its own tile.

    Keys and values are `(batch, kv_heads, TILE, dim)`, or have fewer keys (`keys_to_read`). A mask of zeros changes no
    bit. Returns the results, shaped as the rows, and their log-sum-exps, `(batch, kv_heads, rows)`, both from the CPU
    kernel of flash attention.
    """
    output, weight = _flash(grouped, key, value, 0.0, False, attn_mask=mask, scale=scale)  # noqa: FBT003
    return output, weight


def of_tiles(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of tokens that see all of some tiles, whose keys are read once.

    `query` is `(1, heads, new, dim)`, keys and values are those of `tiles_of`. Returns the results of each tile,
    `(tiles, kv_heads, share, new, dim)` with `share` heads for each head of keys, and their log-sum-exps.
    """
    (tiles, kv_heads), (heads, new) = keys.shape[:2], query.shape[1:3]
    grouped, _ = grouped_rows(query, kv_heads)
    output, weight = tile_of_each(grouped.expand(tiles, -1, -1, -1), keys, values, None, scale)
    shape = (tiles, kv_heads, heads // kv_heads, new)
    rows = slice(heads // kv_heads * new)
    return output[:, :, rows].reshape(*shape, -1), weight[:, :, rows].reshape(shape)


def keys_to_read(visible: int) -> int:
    """How many first keys of a tile a row has to read that sees `visible` of them, to get the same bits as from all."""
    return -(-visible // _STEP) * _STEP if visible <= _HALF else TILE


def tiles_of(side: Tensor, tiles: range) -> Tensor:
    """Tiles of keys or values `(1, kv_heads, tokens, dim)`, as views: `(tiles, kv_heads, TILE, dim)`."""
    _, head, token, number = side.stride()
    shape, strides = (len(tiles), side.shape[1], TILE, side.shape[3]), (TILE * token, head, token, number)
    return side.as_strided(shape, strides, side.storage_offset() + tiles.start * strides[0])


def joined(outputs: list[Tensor], weights: list[Tensor], dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """Join the results over all tiles, in the order of positions, into one result `(..., rows, dim)`.

    `outputs` are `(tiles, ..., rows, dim)` each. `weights` are their log-sum-exps, `(tiles, ..., rows)`: minus infinity
    where a row sees nothing of a tile. Such tiles at the end change no bit. `sinks` are log-sum-exps of keys without
    values, `(..., rows)`.
    """
    count = sum(len(output) for output in outputs)
    if count == 1 and sinks is None:
        return outputs[0][0]
    precise = torch.promote_types(dtype, torch.float32)
    if sinks is not None:  # The sink comes first, so that tiles keep their places in the sum however many follow.
        weights = [sinks[None].to(weights[0].dtype), *weights]
    shares = torch.cat(weights) if len(weights) > 1 else weights[0]
    # Along the last dimension each row is summed separately; from `_LANES` numbers on, always in the same order.
    shares = nn.functional.pad(shares.movedim(0, -1), (0, max(_LANES - len(shares), 0)), value=-torch.inf)
    first = int(sinks is not None)
    shares = shares.softmax(dim=-1)[..., first : first + count].movedim(-1, 0)[..., None]
    total = _summed(outputs, shares, range(min(_TOGETHER, count)), precise)
    for start in range(_TOGETHER, count, _TOGETHER):
        total.add_(_summed(outputs, shares, range(start, min(start + _TOGETHER, count)), precise))
    return total.to(dtype)


def _summed(outputs: list[Tensor], shares: Tensor, tiles: range, precise: torch.dtype) -> Tensor:
    """Weighted sum over `tiles`, added in their order."""
    if outputs[0][0].numel() <= _SMALL:  # The same additions in the same order, in fewer calls.
        stacked = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        weighted = stacked[tiles.start : tiles.stop].to(precise) * shares[tiles.start : tiles.stop]
        return weighted.sum(dim=0)
    results = [part for output in outputs for part in output]
    total: Tensor = results[tiles.start].to(precise) * shares[tiles.start]
    for at in tiles[1:]:
        total.add_(results[at] * shares[at])
    return total


def _of_rows(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: tuple[int, ...],
    scale: float | None,
    sees: Sees,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of tokens at `positions` in one tile, or in any tiles where each token sees all before it."""
    heads, new = query.shape[1:3]
    kv_heads, own_tiles = key.shape[1], range(positions[0] // TILE, positions[-1] // TILE + 1)
    share = heads // kv_heads
    grouped, extra = grouped_rows(query, kv_heads)
    # All tokens see the whole of the tiles from `whole` to their own. They see tiles from `first` to `whole` in part.
    first = sees.first(own_tiles.start * TILE) // TILE
    whole = min(own_tiles.start, max(first, -(-sees.first(own_tiles.stop * TILE - 1) // TILE)))
    past = range(own_tiles.start, own_tiles.start) if new <= _FEW else range(whole, own_tiles.start)
    outputs, weights = list[Tensor](), list[Tensor]()
    for tiles in (
        (range(first, past.start), past, range(past.stop, own_tiles.stop)) if past else (range(first, own_tiles.stop),)
    ):
        if not tiles:
            continue
        mask_of = _small_mask if grouped.shape[2] * len(tiles) * TILE <= _SMALL_MASK else large_mask
        mask, blind = (None, None) if tiles is past else mask_of(positions, share, extra, tiles, sees, query.dtype)
        of_each_tile = grouped.expand(len(tiles), -1, -1, -1)
        keys, values = tiles_of(key, tiles), tiles_of(value, tiles)
        # Rows in the first half of one tile, as those of a short prompt, need not read the whole tile.
        if tiles == own_tiles and len(tiles) == 1 and (count := keys_to_read(positions[-1] % TILE + 1)) < TILE:
            keys, values, mask = keys[:, :, :count], values[:, :, :count], None if mask is None else mask[..., :count]
        output, weight = tile_of_each(of_each_tile, keys, values, mask, scale)
        weight = weight if blind is None else weight.masked_fill(blind, -torch.inf)
        outputs.append(output[:, :, : share * new])
        weights.append(weight[:, :, : share * new])
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, share, 1).expand(-1, -1, new).reshape(kv_heads, -1)
    return joined(outputs, weights, query.dtype, sinks).reshape(1, heads, new, value.shape[3])


def grouped_rows(query: Tensor, kv_heads: int) -> tuple[Tensor, int]:
    """Queries `(batch, heads, new, dim)` as rows for each key head, `(batch, kv_heads, rows, dim)`.

    Also returns how many rows were added at the end to make a multiple of `_ROWS`.
    """
    batch, heads, new, dim = query.shape
    rows = heads // kv_heads * new
    grouped, extra = query.reshape(batch, kv_heads, rows, dim), -rows % _ROWS
    return (nn.functional.pad(grouped, (0, 0, 0, extra)) if extra else grouped), extra


def _mask(  # noqa: PLR0913
    positions: tuple[int, ...], share: int, extra: int, tiles: range, sees: Sees, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Additive mask for the scores of `tiles`, `(tiles, 1, rows, TILE)`, and which rows see nothing of a tile.

    The second result is `(tiles, 1, rows)`, or `None` when each row sees a part of each tile. Each token has one row
    for each of `share` query heads. `extra` padding rows at the end see what the last token sees.
    """
    rows = torch.tensor(positions).repeat(share)
    rows = nn.functional.pad(rows, (0, extra), value=positions[-1])
    keys = torch.arange(tiles.start * TILE, tiles.stop * TILE).view(len(tiles), 1, TILE)
    visible = sees.visible(rows[:, None], keys)
    blind = ~visible.any(dim=-1)[:, None]
    return bias_of(visible, dtype)[:, None], blind if bool(blind.any()) else None


# All layers of a pass share its masks. One for each of its tiles is small. Those of a question are as long as all that
# stands before it, and are no part of the budget for KV: only the last two are kept.
_small_mask, large_mask = lru_cache(32)(_mask), lru_cache(2)(_mask)


@lru_cache(64)
def _by_tile(positions: tuple[int, ...]) -> list[tuple[int, ...]]:
    """`positions`, grouped by tile."""
    return [tuple(inside) for _, inside in groupby(positions, lambda at: at // TILE)]


def _by_mask(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Sequence[int],
    scale: float | None,
    sees: Sees,
    sinks: Tensor | None,
) -> Tensor:
    """`attend` in one call, on an accelerator or with gradients. Rounding depends on the pass's shapes.

    On CUDA it calls kernels by name: torch would prefer cuDNN's, which are planned anew, for half a second, for every
    number of tokens and in every thread.
    """
    stop, new = positions[-1] + 1, query.shape[2]
    key, value = key[:, :, :stop], value[:, :, :stop]
    sees_all = positions[0] + new == stop and sees.first(positions[0]) == 0 == sees.first(positions[-1])
    by_kernel = query.device.type == "cuda" and not torch.is_grad_enabled() and query.shape[3] % 8 == 0
    asked = query, key, value, None, 0.0, False, True  # No mask, no dropout, not causal; heads share keys.
    if sinks is None and sees_all and by_kernel and _can_use_flash(_SDPAParams(*asked)):
        # Here, `is_causal` lets the last token see all keys, however many tokens are new.
        flash: Tensor = _flash_cuda(query, key, value, 0.0, is_causal=True, scale=scale)[0]
        return flash
    if sinks is None and sees_all and new in (1, stop):
        return _sdpa(query, key, value, is_causal=new > 1, scale=scale, enable_gqa=True)
    at = positions if isinstance(positions, range) else tuple(positions)
    bias_over = _kept_bias if torch.is_inference_mode_enabled() and new * stop <= _KEPT else _bias
    bias = bias_over(at, sees, query.dtype, query.device)
    heads = query.shape[1]
    if sinks is not None:
        return by_products(query, key, value, bias, scale, sinks)
    # A mask together with `enable_gqa` falls back to a slow kernel.
    key, value = (side.repeat_interleave(heads // side.shape[1], dim=1) for side in (key, value))
    if not by_kernel or value.shape[3] % 8:
        return _sdpa(query, key, value, attn_mask=bias, scale=scale)
    bias = bias.expand(1, heads, new, stop)
    efficient: Tensor = _efficient_cuda(query, key, value, bias, compute_log_sumexp=False, scale=scale)[0]
    return efficient


def by_products(  # noqa: PLR0913 - the inputs of attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float | None,
    sinks: Tensor | None,
    weights: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Attention of one sequence by two products, with an additive `bias` `(new, tokens)`, in one call for any lengths.

    Shapes are as in `attend`. Keys that the bias hides must be finite. `weights` is called with the attention weights,
    `(heads, new, tokens)`.
    """
    _, heads, new, dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    grouped, factor = query.reshape(kv_heads, -1, dim), dim**-0.5 if scale is None else scale
    if query.dtype == torch.float32:
        products = grouped @ key[0].mT
    elif query.device.type == "cuda" and _GIVES_FLOAT32 and not torch.is_grad_enabled():
        products = torch.bmm(grouped, key[0].mT, out_dtype=torch.float32)
    else:
        products = grouped.float() @ key[0].mT.float()
    scores = torch.add(bias, products.view(kv_heads, -1, new, tokens), alpha=factor)
    if sinks is None:
        shares = scores.softmax(dim=-1)
    else:  # A sink is one more key, with the sink as its score and a value of zero.
        sink = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    if weights is not None:
        weights(shares.reshape(heads, new, tokens))
    output = shares.to(value.dtype).reshape(kv_heads, -1, tokens) @ value[0]
    return output.reshape(1, heads, new, value.shape[3])


def _bias(positions: range | tuple[int, ...], sees: Sees, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask of tokens at `positions` over all keys up to the last of them, `(new, tokens)`.

    Rows are aligned as CUDA's kernels want them.
    """
    stop = positions[-1] + 1
    keys, rows = torch.arange(-(-stop // _ALIGNED) * _ALIGNED, device=device), torch.tensor(positions, device=device)
    return bias_of(sees.visible(rows[:, None], keys), dtype)[:, :stop]


_kept_bias = lru_cache(2)(_bias)  # All layers of a pass share it. A model may have layers with windows and without.


AttentionInterface.register(NAME, tiled_attention)
