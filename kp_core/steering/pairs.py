"""Contrastive pairs that come with the package, and a score for which side of pairs a text is closer to."""

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
    """Names of all presets, sorted."""
    entries = (files("kp_core") / "presets").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def preset_about(name: str) -> str:
    """Short description of what a preset steers towards and away from; raises as `preset`."""
    return str(_read(name)["about"])


def preset(name: str) -> tuple[tuple[str, str], ...]:
    """The (positive, negative) pairs of a preset, for `engine.make_steering`; at least 24.

    The preset is named after the positive side. Raises `SteeringError` for an unknown name.
    """
    return tuple((positive, negative) for positive, negative in _read(name)["pairs"])


class Embeds(Protocol):
    """The method of an embedder that `likeness` uses."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One row per text, as `kp_core.facts.embed.Embedder.embed`."""


def likeness(pairs: Sequence[Pair], embedder: Embeds) -> Callable[[str], float]:
    """A score for `calibrate`: 1 for a text like the average positive side of `pairs`, -1 like the negative one.

    The text's embedding is projected on the line between the means of the two sides. Of a conversation, only the last
    message counts. Raises `SteeringError` for no pairs, and for pairs whose sides have the same mean embedding.
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
    content: dict[str, Any] = json.loads((files("kp_core") / "presets" / f"{name}.json").read_text(encoding="utf-8"))
    return content
