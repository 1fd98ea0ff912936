"""Forward passes with tokens at any positions, over keys in any order; and how to move the keys of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kp_core.engines.hf.kinds import LayersDone, cache_of, placed_cache_of
from kp_core.engines.local.buffer import CacheShape, KVBuffer
from kp_core.errors import UnsupportedRequestError
from kp_core.kv import KVTensors
from kp_core.rope import Rope

__all__ = ["forward_among", "forward_at", "forward_soft", "rope_of"]

Attention: TypeAlias = Callable[[Sequence[int], KVBuffer], dict[str, Any]]
"""Returns keyword arguments of a pass that say how tokens at ascending positions attend over a buffer."""

_GROWING = ("dynamic", "longrope")
_TOLERANCE = {torch.float32: 1e-3}
_APART = 37
"""Distance of the two positions at which a key is computed to find its rotation."""


@torch.inference_mode()
def forward_at(  # noqa: PLR0913
    base: Any,  # noqa: ANN401 - a transformers model without its head
    shape: CacheShape,
    ids: Sequence[int],
    positions: Sequence[int],
    past: KVTensors | None,
    past_positions: Sequence[int],
    attention: Attention,
    *,
    layers: int | None = None,
) -> KVTensors:
    """KV of `ids` at `positions`; each token sees the tokens of `past` and of `ids` up to its own position.

    If `layers` is given, only the first `layers` layers are run.
    """
    count = 0 if past is None else past.tokens
    buffer = KVBuffer(replace(shape, layers=shape.layers[:layers]), count + len(ids))
    if past is not None:
        buffer.append(KVTensors(past.keys[:layers], past.values[:layers]))
    places = range(count, count + len(ids))
    forward_among(base, buffer, ids, positions, places, attention, held=past_positions)
    return buffer.read(count, count + len(ids))


@torch.inference_mode()
def forward_among(  # noqa: PLR0913
    model: Any,  # noqa: ANN401 - a transformers model, without its head if no logits are wanted
    buffer: KVBuffer,
    ids: Sequence[int],
    positions: Sequence[int],
    places: Sequence[int],
    attention: Attention,
    *,
    held: Sequence[int] | None = None,
    unseen: Sequence[int] = (),
    weights: list[Tensor] | None = None,
    goes_on: bool = False,
    **options: int,
) -> Any:  # noqa: ANN401 - as transformers
    """Write the KV of `ids`, at `positions`, to the `places` of `buffer`; see `CausalModel.forward_among`.

    `held` are the positions of the tokens in the buffer, by default their places. The buffer may have the first layers
    alone. If every token stands at its position, tokens attend as `attention` says. The pass stops at the keys of the
    last layer and the result is `None`, unless it `goes_on` or collects `weights`: then the result is the model's
    output. Raises `UnsupportedRequestError` if the model's attention does not report weights.
    """
    device, dtype, output = model.device, buffer.shape.dtype, None
    query_positions, targets = (torch.tensor(list(indices), device=device) for indices in (positions, places))
    stop = max(buffer.length, max(places) + 1)
    key_positions = torch.arange(stop, device=device)
    if held is not None:
        key_positions[: len(held)] = torch.tensor(list(held), device=device)
    if unseen:
        hidden = torch.tensor(list(unseen), device=device)
        key_positions[hidden] = torch.iinfo(key_positions.dtype).max
        for layer in buffer.layers:  # A weight of zero times NaN would be NaN.
            layer.keys[:, :, hidden] = 0
            layer.values[:, :, hidden] = 0
    key_positions[targets] = query_positions
    mask, options_of_pass = None, dict[str, Any]()
    ascends = all(place < next_place for place, next_place in pairwise(places))
    if weights is None and ascends and torch.equal(key_positions, torch.arange(stop, device=device)):
        options_of_pass = attention(list(places), buffer)
    # Tokens in order behind all others need no mask, which is faster, and more so for longer passes.
    elif (
        weights is not None
        or not torch.equal(query_positions, key_positions[buffer.length :])
        or not torch.equal(key_positions, key_positions.sort().values)
    ):
        mask = torch.zeros(1, 1, len(ids), stop, dtype=dtype, device=device)
        mask.masked_fill_(key_positions[None] > query_positions[:, None], torch.finfo(dtype).min)
        options_of_pass = {} if weights is None else {"kp_weights": weights}
    with suppress(LayersDone):
        output = model(
            input_ids=torch.tensor([list(ids)], device=device),
            position_ids=query_positions[None],
            attention_mask=mask,
            past_key_values=placed_cache_of(
                buffer,
                targets,
                stop,
                goes_on=goes_on or weights is not None,
                in_tiles="kp_attend" in options_of_pass,
            ),
            use_cache=True,
            **options_of_pass,
            **options,
        )
    if weights is not None and not weights:
        raise UnsupportedRequestError(
            "This model's attention does not tell what it looks at; use another rule than 'attention'."
        )
    return output


@torch.inference_mode()
def forward_soft(  # noqa: PLR0913
    base: Any,  # noqa: ANN401 - a transformers model without its head
    shape: CacheShape,
    before: Sequence[int],
    header: Tensor,
    ids: Sequence[int],
    trailer: Tensor,
    attention: Attention,
) -> KVTensors:
    """KV of `header`, `ids` and `trailer` behind the prefix `before`; see `kp_core.compose.Forward.soft`."""
    embed = base.get_input_embeddings()
    tokens = embed(torch.tensor([*before, *ids], device=base.device))
    soft = (part.to(tokens.device, tokens.dtype) for part in (header, trailer))
    parts = [tokens[: len(before)], next(soft), tokens[len(before) :], next(soft)]
    inputs = torch.cat(parts)
    buffer = KVBuffer(shape, len(inputs))
    arguments = attention(range(len(inputs)), buffer)
    base(
        inputs_embeds=inputs[None],
        past_key_values=cache_of(buffer, in_tiles=bool(arguments)),
        use_cache=True,
        **arguments,
    )
    return buffer.read(len(before), buffer.length)


def rope_of(
    base: Any,  # noqa: ANN401
    shape: CacheShape,
    parameters: Mapping[str, Any],
    attention: Attention = lambda *_: {},
) -> Rope:
    """The RoPE of this model, verified by computing some keys at two positions.

    A single token sees nothing but itself, so in every layer its keys at two positions differ by the rotation alone.
    Raises `UnsupportedRequestError` for frequencies that change with the length, for a model without RoPE, and for keys
    whose rotation does not match.
    """
    kind = parameters.get("rope_type", "default")
    if kind in _GROWING:
        raise UnsupportedRequestError(
            f"The keys of this model cannot be moved: the frequencies of its RoPE ({kind}) change with the length. Use "
            "composer='exact'."
        )
    rotary = getattr(base, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    if frequencies is None:
        raise UnsupportedRequestError("The keys of this model cannot be moved: it has no rotary embedding.")
    near, far = (_alone(base, shape, at, attention) for at in (1, 1 + _APART))
    none = tuple(False for _ in near.keys)
    rotated: list[bool] = []
    for interleaved in (False, True):
        rope = Rope(frequencies.detach().float().cpu(), none, interleaved)
        rotated = []
        for key, expected in zip(near.keys, far.keys, strict=True):
            turns = _close(rope.turned(key, _APART), expected)
            if not turns and not _close(key, expected):
                break
            rotated.append(turns)
        if len(rotated) == near.layers and any(rotated):
            return Rope(rope.frequencies, tuple(rotated), interleaved)
    raise UnsupportedRequestError(
        f"The keys of this model cannot be moved: those of layer {len(rotated)} do not turn as its RoPE ({kind}) says. "
        "Use composer='exact'."
    )


def _alone(base: Any, shape: CacheShape, position: int, attention: Attention) -> KVTensors:  # noqa: ANN401
    """KV of four random tokens, each computed alone at `position`."""
    vocabulary = base.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (4,), generator=generator).tolist()
    return KVTensors.concat(forward_at(base, shape, [token], [position], None, (), attention) for token in ids)


def _close(found: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE.get(expected.dtype, 0.02)
    return bool((found.float() - expected.float()).norm() <= tolerance * expected.float().norm())
