"""Attention of new tokens over a long past, without a mask and without repeating keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

__all__ = ["NAME", "WINDOWS", "causal_attention"]

NAME = "kp_split"
WINDOWS = "kp_split_windows"
"""The same for models with windows: what lies outside a window is in the mask, which transformers makes."""

_FEW_TOKENS = 64
"""Up to which it is worth a larger mask that keys are not repeated."""


def split_attention(  # noqa: PLR0913 - the signature is that of transformers' AttentionInterface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """Causal attention of the last `query` tokens of a sequence over all of it.

    `query` is `(batch, heads, new, head_dim)`, `key` and `value` are `(batch, kv_heads, tokens, head_dim)`; returns
    `(batch, new, heads, head_dim)`. Sequences here carry no padding, so causality is all the mask there is, unless
    `attention_mask`, `(batch, 1, new, tokens)`, is added: tokens then stand at any positions, or see a window (then it
    says yes or no). With it, a list `kp_weights` takes how much the queries look at each key, `(tokens,)`, summed over
    queries and heads. Rows may be sequences of their own: then `kp_rows` (see `Rows`) attends. With `kp_parts`, numbers
    of tokens, the new tokens are that many passes in one: each part attends as it would in a pass of its own.

    Raises `ValueError` when a model asks for what this does not do (softcap, sinks, windows, position bias).
    """
    asked = [name for name in ("softcap", "s_aux", "sliding_window", "position_bias") if extra.get(name) is not None]
    if asked:
        raise ValueError(f"Split attention does not do {', '.join(asked)}.")
    if callable(rows := extra.get("kp_rows")):
        output = rows(module.layer_idx, query, key, value, scaling)
    elif attention_mask is not None and attention_mask.ndim == 4:
        output = _placed(query, key, value, attention_mask, scaling, extra.get("kp_weights"))
    elif isinstance(parts := extra.get("kp_parts"), Sequence):
        stops = list(accumulate(parts, initial=key.shape[2] - query.shape[2]))[1:]
        passes = zip(query.split_with_sizes(list(parts), 2), stops, strict=True)
        found = [causal_attention(each, key[:, :, :stop], value[:, :, :stop], scaling) for each, stop in passes]
        output = torch.cat(found, dim=2)
    else:
        output = causal_attention(query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of the last tokens of a sequence over all of it; shapes as in `split_attention`, but heads first."""
    new, tokens = query.shape[2], key.shape[2]
    if 1 < new < tokens:
        splits = query.device.type == "cpu" and key.shape[3] == value.shape[3]
        attend = _past_and_present if splits else _masked
        return attend(query, key, value, scale)
    if new == 1 and query.device.type == "cpu":
        return _of_one(query, key, value, scale)
    return _attention(query, key, value, is_causal=new > 1, scale=scale, enable_gqa=True)


def windowed_attention(*states: Any, **extra: Any) -> tuple[Tensor, None]:  # noqa: ANN401
    """`split_attention` of a model whose masks say what its windows hide."""
    extra.pop("sliding_window", None)
    return split_attention(*states, **extra)


def _mask_of_windows(
    kv_length: int,
    kv_offset: int = 0,
    local_size: int | None = None,
    *,
    allow_is_causal_skip: bool = True,
    **about: Any,  # noqa: ANN401
) -> Tensor | None:
    """The mask of a pass of which some tokens are outside a window of `local_size`; others need none."""
    if allow_is_causal_skip and (local_size is None or kv_offset + kv_length <= local_size):
        return None
    mask: Tensor | None = sdpa_mask(
        kv_length=kv_length,
        kv_offset=kv_offset,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **about,
    )
    return mask


_attention = nn.functional.scaled_dot_product_attention


def _of_one(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Of one token: query heads that share a key head are rows of one matrix, and keys are neither repeated nor reread.

    With 1,800 keys in bfloat16 the library's own takes four times as long on processors without matrix units.
    """
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    found = _attention(grouped, key, value, attn_mask=mask, scale=scale)
    return found.reshape(rows, heads, 1, value.shape[3])


def _past_and_present(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """All of the past without a mask, the new tokens causally, joined by the log-sum-exp of each.

    A mask costs the kernel a third of its speed, and most of it would say yes.
    """
    batch, heads, new, dim = query.shape
    kv_heads, past = key.shape[1], key.shape[2] - new
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the one that gives log-sum-exp
    # Query heads that share a key head are rows of one matrix.
    rows = query.reshape(batch, kv_heads, heads // kv_heads * new, dim)
    before, weight_before = flash(rows, key[:, :, :past], value[:, :, :past], 0.0, False, scale=scale)  # noqa: FBT003
    fresh_key, fresh_value = (
        tensor[:, :, past:].repeat_interleave(heads // kv_heads, dim=1) for tensor in (key, value)
    )
    among, weight_among = flash(query, fresh_key, fresh_value, 0.0, True, scale=scale)  # noqa: FBT003
    share = torch.sigmoid(weight_before.reshape(batch, heads, new) - weight_among.reshape(batch, heads, new))
    precise = torch.promote_types(query.dtype, torch.float32)
    before = before.reshape(batch, heads, new, dim)
    joined: Tensor = torch.lerp(among.to(precise), before.to(precise), share[..., None].to(precise))
    return joined.to(query.dtype)


def _masked(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """The same with a mask; on accelerators a mask together with `enable_gqa` falls back to the slow kernel."""
    heads, new, tokens = query.shape[1], query.shape[2], key.shape[2]
    key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
    mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)
    return _attention(query, key, value, attn_mask=mask, scale=scale)


def _placed(  # noqa: PLR0913
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, weights: object
) -> Tensor:
    """As the mask says; `weights` is a list to add to, or nothing."""
    rows, heads, new, dim = query.shape
    if new == mask.shape[1] == 1 and mask.dtype == torch.bool:
        return _of_one(query, key, value, scale, mask)
    if isinstance(weights, list):
        factor = dim**-0.5 if scale is None else scale
        grouped = query.reshape(rows, key.shape[1], -1, dim).float()
        scores = (grouped @ key.float().mT * factor).reshape(rows, key.shape[1], -1, new, key.shape[2])
        share = scores.add_(mask[:, :, None]).softmax(dim=-1)
        weights.append(share.sum(dim=(0, 1, 2, 3)))
        found = share.to(value.dtype).flatten(2, 3) @ value
        return found.reshape(rows, heads, new, value.shape[3])
    if query.device.type == "cpu" and mask.dtype != torch.bool and new <= _FEW_TOKENS and mask.shape[1] == 1:
        grouped = query.reshape(rows, key.shape[1], -1, dim)
        spread = mask.repeat(1, 1, heads // key.shape[1], 1)
        found = _attention(grouped, key, value, attn_mask=spread, scale=scale)
        return found.reshape(rows, heads, new, value.shape[3])
    if query.device.type != "cpu":  # See `_masked`.
        key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
    return _attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=heads != key.shape[1])


AttentionInterface.register(NAME, split_attention)
AttentionInterface.register(WINDOWS, windowed_attention)
AttentionMaskInterface.register(WINDOWS, _mask_of_windows)
