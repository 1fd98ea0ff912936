"""Answers from the packs that a question looks at, and leaves the others out."""

from __future__ import annotations

from dataclasses import dataclass

from kp_core.errors import OptionError
from kp_core.plan.composer import ExactComposer

__all__ = ["SelectComposer"]


@dataclass(frozen=True)
class SelectComposer(ExactComposer):
    """Selects packs by the model's attention, and composes these exactly.

    Some attention heads of a model look up what a question names (*retrieval heads*, arXiv 2404.15574). One pass of the
    question over the stored KV of all packs shows how much these heads attend to each. Of packs that stand side by
    side, the one with most attention is sent, and at most `packs` in all:

    - The sentence that was found may have words that the question does not have. If the heads find these in another
      pack, it is sent behind the first, and so on: such a chain ends beside the question.
    - Packs with at least half as much attention as the first are sent before it, as the question may name them, too;
      and whatever their attention, until `least` packs are sent.

    The answer is that of the text of these packs, token for token; nothing of the others is in it, so questions about
    all packs (how many, summarise) need `exact`.

    Raises `OptionError` for numbers below 1, and for `least` above `packs`.
    """

    packs: int = 2
    least: int = 1

    exact = False

    def __post_init__(self) -> None:
        for name, what in (("packs", "the most packs to read"), ("least", "how many packs to read at least")):
            number = getattr(self, name)
            if not (isinstance(number, int | float) and number >= 1 and float(number).is_integer()):
                raise OptionError(f"Got {name}={number!r}; expected {what}, from 1 on.")
            object.__setattr__(self, name, int(number))
        if self.least > self.packs:
            raise OptionError(f"Got least={self.least} above packs={self.packs}, the most to read; raise packs.")

    @property
    def key(self) -> str:  # type: ignore[override]
        """Method and numbers."""
        return f"select:packs={self.packs}" + (f",least={self.least}" if self.least > 1 else "")
