"""Contrastive pairs that come with the package, written for it; and which side of its pairs a text is like."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import SteeringError
from kp_core.steering.value import Pair, Side

__all__ = ["Embeds", "likeness", "preset", "preset_about", "preset_names"]


@cache
def preset_names() -> tuple[str, ...]:
    """The presets there are, sorted."""
    found = (files("kp_core") / "presets").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in found if entry.name.endswith(".json")))


def preset_about(name: str) -> str:
    """What a preset steers towards, and away from, in a few words; raises as `preset`."""
    return str(_read(name)["about"])


def preset(name: str) -> tuple[tuple[str, str], ...]:
    """The (positive, negative) pairs of a preset, for `engine.make_steering`; at least 24.

    The first side is what the preset is named after. Raises `SteeringError` for a name that does not exist.
    """
    return tuple((positive, negative) for positive, negative in _read(name)["pairs"])


class Embeds(Protocol):
    """What is asked of an embedder."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One row per text, as `kp_core.facts.embed.Embedder.embed`."""


def likeness(pairs: Sequence[Pair], embedder: Embeds) -> Callable[[str], float]:
    """A score for `calibrate`: 1 for a text as the positive sides of `pairs` are on average, -1 as the negative ones.

    The embedding of the text is projected on the line between the means of the two sides. Of conversations only what
    was said last counts. Raises `SteeringError` for pairs whose sides mean the same to the embedder.
    """
    if not pairs:
        raise SteeringError("Got no pairs; expected the pairs that the steering was made from.")
    positive, negative = (embedder.embed([_said(pair[at]) for pair in pairs]).mean(axis=0) for at in (0, 1))
    half, middle = (positive - negative) / 2, (positive + negative) / 2
    length = float(half @ half)
    if not length:
        raise SteeringError("Both sides of the pairs mean the same to the embedder; give a score of your own.")
    return lambda text: float((embedder.embed([text])[0] - middle) @ half) / length


def _said(side: Side) -> str:
    return side if isinstance(side, str) else str(side[-1]["content"])


def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise SteeringError(f"Got the preset {name!r}; expected one of {', '.join(preset_names())}.")
    found: dict[str, Any] = json.loads((files("kp_core") / "presets" / f"{name}.json").read_text(encoding="utf-8"))
    return found
