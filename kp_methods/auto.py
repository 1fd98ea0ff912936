"""Leaves the choice of a composer to what was measured of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kp_core.errors import OptionError
from kp_core.packs.view import PackRef
from kp_core.plan.composer import Arrangement, Composer, Host
from kp_core.prompt.conversation import Turn
from kp_methods.calibration import KEPT, LOW, calibrations_of
from kp_methods.select import runs


@dataclass(frozen=True)
class AutoComposer(Composer):
    """The fastest composer that answers as well as the text, by the model's calibration; exact without one.

    `kept` is the least number of right answers, as a share of the text's; `low` the least lower end of its 95 %
    interval. Raises `OptionError` for shares that are not from 0 on, and for `low` above `kept`.
    """

    kept: float = KEPT
    low: float = LOW

    exact = True

    def __post_init__(self) -> None:
        for share in (self.kept, self.low):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < float("inf"):
                raise OptionError(f"Got kept={self.kept!r}, low={self.low!r}; expected shares, such as 0.95 and 0.9.")
        if self.low > self.kept:
            raise OptionError(f"Got low={self.low!r} above kept={self.kept!r}; expected the lower end below the share.")

    @property
    def key(self) -> str:
        """Method and shares."""
        return f"auto:kept={self.kept:g},low={self.low:g}"

    def arrange(self, turns: Sequence[Turn], host: Host) -> Arrangement:
        """What the chosen composer makes of the turns, and why it was chosen."""
        groups = [
            [len(part.pack.token_ids) for part in turn.segments[start:stop] if isinstance(part, PackRef)]
            for turn in turns
            for start, stop in runs(turn.segments)
        ]
        composer, reason = calibrations_of(host).choice(groups, host.view, self.kept, self.low)
        arranged_turns = composer.arrange(turns, host)
        reasons = filter(None, (f"{composer.key}, because {reason}", arranged_turns.choice))
        return replace(arranged_turns, choice="; ".join(reasons))
