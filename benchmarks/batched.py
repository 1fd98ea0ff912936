"""Many steered answers at a time, by plain transformers: what the engine does one by one, for runs of hundreds.

The deltas are added by hand to the values in its cache, at the positions that a scope names, behind a prefill that knew
nothing of them; `tests/core/test_steering.py` compares this way with the engine's. In bfloat16 the two round otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks import common
from kp_core import Prompt, Steering

__all__ = ["answers"]


@torch.inference_mode()
def answers(
    twin: common.Twin,
    prompts: Sequence[Prompt],
    scope: str,
    steerings: Mapping[str, Steering | None],
    tokens: int,
) -> dict[str, list[str]]:
    """Greedy answers to `prompts` under each of `steerings`; they share the prefill of what is steered.

    `scope` is `"pack"`, for prompts of one pack, `"system"`, or `"last_token"`.
    """
    bounds = [_bounds(prompt, scope) for prompt in prompts]
    heads = [prompt.token_ids[:stop] for prompt, (_, stop) in zip(prompts, bounds, strict=True)]
    tails = [prompt.token_ids[stop:] for prompt, (_, stop) in zip(prompts, bounds, strict=True)]
    plain = DynamicCache()
    ids, mask = _padded(heads)
    twin.model(input_ids=ids, attention_mask=mask, position_ids=_positions(mask), past_key_values=plain)
    steered = torch.zeros_like(mask)
    for row, (start, stop) in enumerate(bounds):
        steered[row, mask.shape[1] - stop + start :] = 1
    found = {}
    for name, steering in steerings.items():
        cache = copy.deepcopy(plain)
        for layer in steering.layers if steering else ():
            held = cache.layers[layer]
            held.values = _shifted(held.values, steering.values.get(layer), steered)
            held.keys = _shifted(held.keys, steering.keys.get(layer), steered)
        found[name] = _decode(twin, cache, mask, tails, tokens)
    return found


def _shifted(cached: Tensor, delta: Tensor | None, where: Tensor) -> Tensor:
    """Added in float32 and rounded once, as the engine does."""
    if delta is None:
        return cached
    return (cached.float() + where[:, None, :, None] * delta[None, :, None]).to(cached.dtype)


def _decode(
    twin: common.Twin, cache: DynamicCache, mask: Tensor, tails: Sequence[Sequence[int]], tokens: int
) -> list[str]:
    ids, more = _padded(tails)
    said: list[list[int]] = [[] for _ in tails]
    left = set(range(len(tails)))
    for _ in range(tokens):
        mask = torch.cat([mask, more], dim=1)
        positions = _positions(mask)[:, -ids.shape[1] :]
        logits = twin.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        ids, more = logits.argmax(dim=-1, keepdim=True), torch.ones(len(tails), 1, dtype=mask.dtype)
        for row, token in enumerate(ids[:, 0].tolist()):
            said[row].append(token)
            if token in twin.end_tokens:
                left.discard(row)
        if not left:
            break
    return [twin.tokenizer.decode(twin.without_end(row), skip_special_tokens=True) for row in said]


def _bounds(prompt: Prompt, scope: str) -> tuple[int, int]:
    if scope == "last_token":
        return len(prompt) - 2, len(prompt) - 1
    return (0, prompt.breaks[0]) if scope == "system" else (prompt.spans[0].start, prompt.spans[0].stop)


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids padded on the left, and the mask of what is none."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=1) - 1).clamp(min=0)
