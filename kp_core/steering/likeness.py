"""A score for any steering: which side of its own pairs a text is like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kp_core.errors import SteeringError
from kp_core.steering.value import Pair, Side

__all__ = ["Embeds", "likeness"]


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
