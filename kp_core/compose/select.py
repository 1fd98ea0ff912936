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
    question over the stored KV of all packs shows how much these heads attend to each. Of packs that stand side by
    side, the `packs` with most attention are sent, the best one last, beside the question. The answer is that of the
    text of these packs, token for token; nothing of the others is in it, so questions about all packs (how many,
    summarise) need `exact`.

    Raises `OptionError` for `packs` below 1.
    """

    packs: int = 2

    exact = False

    def __post_init__(self) -> None:
        if not (isinstance(self.packs, int | float) and self.packs >= 1 and float(self.packs).is_integer()):
            raise OptionError(f"Got packs={self.packs!r}; expected a number of packs, from 1 on.")
        object.__setattr__(self, "packs", int(self.packs))

    @property
    def key(self) -> str:  # type: ignore[override]
        """Method and number."""
        return f"select:packs={self.packs}"

    def chosen(self, weights: Sequence[float]) -> list[int]:
        """The places of the packs to send, the best one last, by the weight of each."""
        return sorted(range(len(weights)), key=lambda at: -weights[at])[: self.packs][::-1]
