"""Answers from the packs that a question looks at, and leaves the others out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kp_core.compose.exact import ExactComposer
from kp_core.errors import OptionError

__all__ = ["SelectComposer"]


@dataclass(frozen=True)
class SelectComposer(ExactComposer):
    """Selects packs by the model's attention, and composes these exactly.

    Some attention heads of a model look up what a question names (*retrieval heads*, arXiv 2404.15574). One pass of the
    question over the stored KV of all packs gives the largest weight of these heads on each pack. Of packs that stand
    side by side, the one with the largest weight is sent, and others with at least the share `least` of its weight,
    `most` in all. The best one stands last, beside the question. The answer is that of the text of these packs, token
    for token; nothing of the others is in it, so questions about all packs (how many, summarise) need `exact`.

    Raises `OptionError` for a share outside [0, 1], and for `most` below 1.
    """

    least: float = 0.5
    most: int = 3

    exact = False

    def __post_init__(self) -> None:
        if not (isinstance(self.least, int | float) and 0 <= self.least <= 1):
            raise OptionError(f"Got least={self.least!r}; expected a share of the best pack's weight, from 0 to 1.")
        if not (isinstance(self.most, int | float) and self.most >= 1 and int(self.most) == self.most):
            raise OptionError(f"Got most={self.most!r}; expected a number of packs, from 1 on.")
        object.__setattr__(self, "most", int(self.most))

    @property
    def key(self) -> str:  # type: ignore[override]
        """Method, share and number."""
        return f"select:least={self.least:g},most={self.most}"

    def chosen(self, weights: Sequence[float]) -> list[int]:
        """The places of the packs to send, the best one last, by the weight of each."""
        best_first = sorted(range(len(weights)), key=lambda at: -weights[at])[: self.most]
        return [at for at in reversed(best_first) if weights[at] >= self.least * weights[best_first[0]]]
