"""A composer that only tests use: it holds the seam to what it promises to composers that recompute tokens."""

import math
from dataclasses import dataclass

from kp_core.compose.splice import SpliceComposer, movable


@dataclass(frozen=True)
class Firsts:
    """Moves packs, and recomputes the first `share` of each; with a share of 1, all their tokens."""

    share: float = 0.5

    @property
    def exact(self):
        return self.share == 1

    @property
    def key(self):
        return f"firsts:{self.share:g}"

    def regions(self, prompt):
        return movable(prompt)

    def fill(self, region, packs, room, move):
        places = [*SpliceComposer().fill(region, packs, room, move)]
        for span in region.spans:
            start = span.start - region.start
            places += range(start, start + math.ceil(self.share * len(span)))
        return places
