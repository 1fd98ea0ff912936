"""Which layers of a model are steered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kp_core.errors import SteeringError

__all__ = ["LayerRange", "resolve_layers"]

LayerRange: TypeAlias = tuple[float, float] | range | Sequence[int]
"""Layers as fractions of the depth `(1/3, 2/3)`, as a `range`, or as indices `[10, 11, 12]`."""


def resolve_layers(layers: LayerRange | None, count: int) -> tuple[int, ...]:
    """The layers of a model of `count` that a range names: by default the middle third (arXiv 2604.03270, section 4.5).

    A pair of floats is read as fractions of the depth; everything else as indices. Raises `SteeringError` for what
    names no layer of the model.
    """
    advice = f"expected two fractions like (1/3, 2/3), or indices from 0 to {count - 1} like range(10, 20)."
    if not isinstance(layers, Sequence | None):
        raise SteeringError(f"Got the layers {layers!r}; {advice}")
    chosen: Sequence[float] = (1 / 3, 2 / 3) if layers is None else tuple(layers)
    if len(chosen) == 2 and any(isinstance(bound, float) for bound in chosen):
        start, stop = chosen
        if not 0 <= start < stop <= 1:
            raise SteeringError(f"Got the layers {layers!r}; {advice}")
        first = min(round(start * count), count - 1)
        return tuple(range(first, max(round(stop * count), first + 1)))
    indices = {index for index in chosen if type(index) is int and 0 <= index < count}
    if not chosen or len(indices) != len(chosen):
        raise SteeringError(f"Got the layers {layers!r} of a model of {count} layers; {advice}")
    return tuple(sorted(indices))
