"""Makes a steering from contrastive pairs, and has some: the presets."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

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


def make_steering(  # noqa: PLR0913 - as `Session.make_steering`
    model: ModelFingerprint,
    template: ChatTemplate,
    kv: Callable[[Sequence[_Side]], Iterable[KVTensors]],
    pairs: Sequence[Pair],
    *,
    method: Method = "mean",
    layers: LayerRange | None = None,
    progress: bool = True,
) -> Steering:
    """A steering towards the positive sides of `pairs` and away from the negative ones.

    `"mean"` (arXiv 2604.03270, section 2.6): the mean of V over the positions of the positive side, minus that of the
    negative side; then the mean over pairs. Only positions from the first message that differs count.
    `"last_token"` (arXiv 2507.08799): the mean over pairs of the difference in K (after RoPE) and in V at the second
    last token of the prompt, the last one in the cache when the model is about to answer.

    `kv` computes the KV of tokens behind a prefix. `layers` is by default the middle third. Raises `OptionError` for
    pairs that are empty, one-sided or identical once rendered, for layers that the model lacks, and for an unknown
    method.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not pairs:
        raise OptionError(f"Got {pairs!r} for pairs; {_ADVICE}")
    check_method(method, keys=False)
    sides = [side for index, pair in enumerate(pairs) for side in _sides(template, pair, index, method)]
    means: list[list[tuple[Tensor, Tensor, float]]] = []
    for side_kv in bar_of("Reading pairs", len(sides), "side", kv(sides), shown=progress):
        chosen_layers = resolve_layers(layers, side_kv.layers)
        means.append(_means(side_kv, method))
    key_deltas, value_deltas, scales = dict[int, Tensor](), dict[int, Tensor](), dict[int, float]()
    for layer in chosen_layers:
        keys, values, norms = zip(*(side[layer] for side in means), strict=True)
        key_deltas[layer], value_deltas[layer] = (
            (torch.stack(side_means[::2]) - torch.stack(side_means[1::2])).mean(dim=0) for side_means in (keys, values)
        )
        pairs_of_norms = zip(norms[::2], norms[1::2], strict=True)
        scales[layer] = sum(positive + negative for positive, negative in pairs_of_norms) / len(norms)
    return Steering(
        value_deltas,
        model,
        method,
        key_deltas if method == "last_token" else {},
        scales,
        provenance={
            "made": f"{method} of {len(pairs)} pairs",
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
    )


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


def _means(kv: KVTensors, method: Method) -> list[tuple[Tensor, Tensor, float]]:
    """Per layer, the means over positions: of keys and of values, `(kv_heads, head_dim)`, and of the values' norms."""
    if method == "last_token":
        at = max(kv.tokens - 2, 0)
        kv = kv.slice(at, at + 1)
    means = []
    cpu_kv = kv.to("cpu")  # MPS has no float64.
    for key, value in zip(cpu_kv.keys, cpu_kv.values, strict=True):
        # The norm of a token is over the values of all its heads.
        norm = value.double().square().sum(dim=(0, 2)).sqrt().mean()
        means.append((key.double().mean(dim=1), value.double().mean(dim=1), float(norm)))
    return means


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    entries = (files("kp_core") / "presets").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def preset_about(name: str) -> str:
    """Short description of what a preset steers towards and away from; raises as `preset`."""
    return str(_read(name)["about"])


def preset(name: str) -> tuple[tuple[str, str], ...]:
    """The (positive, negative) pairs of a preset, for `engine.make_steering`; at least 24.

    The preset is named after the positive side. Raises `OptionError` for an unknown name.
    """
    return tuple((positive, negative) for positive, negative in _read(name)["pairs"])


def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise OptionError(f"Got the preset {name!r}; expected one of {', '.join(preset_names())}.")
    content: dict[str, Any] = json.loads((files("kp_core") / "presets" / f"{name}.json").read_text(encoding="utf-8"))
    return content
