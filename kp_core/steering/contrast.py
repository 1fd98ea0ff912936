"""Makes a steering from contrastive pairs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kp_core.errors import OptionError
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import Prefix, common_length
from kp_core.progress import bar_of
from kp_core.prompt.template import ChatTemplate
from kp_core.steering.value import LayerRange, Method, Pair, Steering, check_method, resolve_layers

_Side: TypeAlias = tuple[Prefix, tuple[int, ...]]
_ADVICE = "expected pairs of (positive, negative), each a text or a list of messages."


class _Means(NamedTuple):
    """Means over the positions of one side, per layer: keys and values, `(kv_heads, head_dim)`, and norms of values."""

    keys: list[Tensor]
    values: list[Tensor]
    norms: list[float]


def make_steering(  # noqa: PLR0913 - as `Session.make_steering`
    model: ModelFingerprint,
    template: ChatTemplate,
    kv: Callable[[Sequence[_Side]], Iterable[KVTensors]],
    pairs: Sequence[Pair],
    *,
    method: Method = "mean",
    layers: LayerRange | None = None,
    c_v: float = 1.0,
    c_k: float | None = None,
    progress: bool = True,
) -> Steering:
    """A steering towards the positive sides of `pairs` and away from the negative ones.

    `"mean"` (arXiv 2604.03270, section 2.6): the mean of V over the positions of the positive side, minus that of the
    negative side; then the mean over pairs. Only positions from the first message that differs count.
    `"last_token"` (arXiv 2507.08799): the mean over pairs of the difference in K (after RoPE) and in V at the second
    last token of the prompt, the last one in the cache when the model is about to answer.

    `kv` computes the KV of tokens behind a prefix. Value deltas are multiplied by `c_v`, key deltas by `c_k` (default
    1). `layers` is by default the middle third. Raises `OptionError` for pairs that are empty, one-sided or identical
    once rendered, for layers that the model lacks, for an unknown method, and for `c_k` with `"mean"`.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not pairs:
        raise OptionError(f"Got {pairs!r} for pairs; {_ADVICE}")
    check_method(method, keys=c_k is not None)
    sides = [side for index, pair in enumerate(pairs) for side in _sides(template, pair, index, method)]
    means: list[_Means] = []
    bar = bar_of("Reading pairs", len(sides), "side", kv(sides), shown=progress)
    chosen_layers: tuple[int, ...] = ()
    for side_kv in bar:
        chosen_layers = chosen_layers or resolve_layers(layers, side_kv.layers)
        means.append(_means(side_kv, method))
    side_means = list(zip(means[::2], means[1::2], strict=True))
    deltas = {
        name: {
            layer: torch.stack(
                [getattr(positive, name)[layer] - getattr(negative, name)[layer] for positive, negative in side_means]
            ).mean(dim=0)
            for layer in chosen_layers
        }
        for name in ("keys", "values")
    }
    scales = {
        layer: sum(positive.norms[layer] + negative.norms[layer] for positive, negative in side_means)
        / (2 * len(side_means))
        for layer in chosen_layers
    }
    steering = Steering(
        deltas["values"],
        model,
        method,
        deltas["keys"] if method == "last_token" else {},
        scales,
        provenance={
            "made": f"{method} of {len(pairs)} pairs",
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
    )
    return steering.scaled(c_v=c_v, c_k=1.0 if c_k is None else c_k)


def _sides(template: ChatTemplate, pair: Pair, index: int, method: Method) -> tuple[_Side, _Side]:
    """The tokens of both sides of a pair from the first message that differs, behind those before it."""
    sides = () if isinstance(pair, str) or not isinstance(pair, Sequence) else pair
    if len(sides) != 2 or not all(isinstance(side, Sequence) for side in sides):
        raise OptionError(f"Got {pair!r} for pair {index}; {_ADVICE}")
    if any(not side or (isinstance(side, str) and not side.strip()) for side in pair):
        raise OptionError(f"Pair {index} has an empty side; {_ADVICE}")
    answering = method == "last_token"
    positive, negative = (template.render(side, add_generation_prompt=answering) for side in pair)
    if positive.token_ids == negative.token_ids:
        raise OptionError(f"Both sides of pair {index} are the same prompt once rendered; {_ADVICE}")
    shared = common_length(positive.token_ids, negative.token_ids)
    start = max((at for at in positive.breaks if at <= shared), default=0)
    prefix = positive.token_ids[:start]
    return (prefix, positive.token_ids[start:]), (prefix, negative.token_ids[start:])


def _means(kv: KVTensors, method: Method) -> _Means:
    if method == "last_token":
        at = max(kv.tokens - 2, 0)
        kv = kv.slice(at, at + 1)
    kv = kv.to("cpu")  # MPS has no float64.
    return _Means(
        [key.double().mean(dim=1) for key in kv.keys],
        [value.double().mean(dim=1) for value in kv.values],
        # The norm of a token is over the values of all its heads.
        [float(value.double().square().sum(dim=(0, 2)).sqrt().mean()) for value in kv.values],
    )
