"""A composer that only tests use: it holds the seam to what it promises to composers that recompute tokens."""

import math
from dataclasses import dataclass

from kp_methods import SpliceComposer


@dataclass(frozen=True)
class Firsts(SpliceComposer):
    """Moves packs, and recomputes the first `share` of each; with a share of 1, all their tokens."""

    share: float = 0.5

    @property
    def exact(self):
        return self.share == 1

    @property
    def key(self):
        return f"firsts:{self.share:g}"

    def fill(self, region, packs, room, move):
        places = [*super().fill(region, packs, room, move)]
        for span in region.spans:
            start = span.start - region.start
            places += range(start, start + math.ceil(self.share * len(span)))
        return places
