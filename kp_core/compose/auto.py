"""Leaves the choice of a composer to what was measured of the model."""

from __future__ import annotations

from dataclasses import dataclass

from kp_core.errors import OptionError
from kp_core.plan.composer import ExactComposer

__all__ = ["AutoComposer"]


@dataclass(frozen=True)
class AutoComposer(ExactComposer):
    """The fastest composer that answers as well as the text, by the model's calibration; exact without one.

    `kept` is the least number of right answers, as a share of the text's; `low` the least lower end of its 95 %
    interval. The planner puts the chosen composer in place of this one (`kp_core.engines.calibration`); where nothing
    chooses, it composes exactly. Raises `OptionError` for shares that are not from 0 on, and for `low` above `kept`.
    """

    kept: float = 0.95
    low: float = 0.9

    def __post_init__(self) -> None:
        for share in (self.kept, self.low):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < float("inf"):
                raise OptionError(f"Got kept={self.kept!r}, low={self.low!r}; expected shares, such as 0.95 and 0.9.")
        if self.low > self.kept:
            raise OptionError(f"Got low={self.low!r} above kept={self.kept!r}; expected the lower end below the share.")

    @property
    def key(self) -> str:  # type: ignore[override]
        """Method and shares."""
        return f"auto:kept={self.kept:g},low={self.low:g}"
