"""Answers from the packs that a question looks at, and leaves the others out."""

from __future__ import annotations

from dataclasses import dataclass

from kp_core.compose.base import ExactComposer
from kp_core.errors import OptionError

__all__ = ["SelectComposer"]


@dataclass(frozen=True)
class SelectComposer(ExactComposer):
    """Selects packs by the model's attention, and composes these exactly.

    Some attention heads of a model look up what a question names (*retrieval heads*, arXiv 2404.15574). One pass of the
    question over the stored KV of all packs shows how much these heads attend to each. Of packs that stand side by
    side, the one with most attention is sent, and at most `packs` in all:

    - The sentence that was found may have words that the question does not have. If the heads find these in another
      pack, it is sent behind the first, and so on: such a chain ends beside the question.
    - Packs with at least half as much attention as the first are sent before it, as the question may name them, too.

    The answer is that of the text of these packs, token for token; nothing of the others is in it, so questions about
    all packs (how many, summarise) need `exact`.

    Raises `OptionError` for `packs` below 1.
    """

    packs: int = 2

    exact = False

    def __post_init__(self) -> None:
        if not (isinstance(self.packs, int | float) and self.packs >= 1 and float(self.packs).is_integer()):
            raise OptionError(f"Got packs={self.packs!r}; expected the most packs to read, from 1 on.")
        object.__setattr__(self, "packs", int(self.packs))

    @property
    def key(self) -> str:  # type: ignore[override]
        """Method and number."""
        return f"select:packs={self.packs}"
