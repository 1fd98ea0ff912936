"""Grouped-query attention that never repeats keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

__all__ = ["NAME"]

NAME = "kp_grouped"


def grouped_attention(  # noqa: PLR0913 - the signature is that of transformers' AttentionInterface
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
    `(batch, new, heads, head_dim)`. `module` and `attention_mask` are part of the interface; sequences here carry no
    padding, so causality is all the mask there is. Behind a long prefix this decodes more than twice as fast as
    repeating K and V per query head, which reads them once per head.

    Raises `ValueError` when a model asks for what this does not do (softcap, sinks, windows, position bias).
    """
    del module, attention_mask
    asked = [name for name in ("softcap", "s_aux", "sliding_window", "position_bias") if extra.get(name) is not None]
    if asked:
        raise ValueError(f"Grouped attention does not do {', '.join(asked)}.")
    batch, heads, new, dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    if new == 1:
        scale = dim**-0.5 if scaling is None else scaling
        scores = torch.matmul(query.reshape(batch, kv_heads, heads // kv_heads, dim), key.transpose(2, 3)) * scale
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value).reshape(batch, 1, heads, -1), None
    # On accelerators a mask together with `enable_gqa` falls back to the slow kernel.
    grouped = query.device.type == "cpu" or new == tokens
    if not grouped:
        key, value = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (key, value))
    mask = None
    if new < tokens:
        mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
