"""A composer of somebody else: a package with an entry point of its own, which `composer="mend"` finds."""

from dataclasses import dataclass

from kp_core import Composer
from kp_core.plan.composer import Arrangement


@dataclass(frozen=True)
class Mend(Composer):
    """Leaves all packs but the last `packs` out, moves these, and recomputes the first token of each."""

    packs: float = 2

    @property
    def key(self):
        return f"mend:packs={self.packs:g}"

    def arrange(self, turns, host):
        assert host.view.namespaces
        *before, last = turns
        handles = [number for number, part in enumerate(last.segments) if not isinstance(part, str)]
        first = handles[-int(self.packs)]
        return Arrangement((*before, last.with_segments(last.segments[first:])), self, unread=handles.index(first))

    def layout(self, prompt, moved, host):
        return prompt, moved

    def fill(self, region, packs, room, move):
        super().fill(region, packs, room, move)
        return [span.start - region.start for span in region.spans]
