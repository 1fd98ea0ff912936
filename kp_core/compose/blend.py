"""Spliced packs of which some tokens are computed again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from kp_core.compose.base import Forward, Region
from kp_core.compose.splice import laid, movable
from kp_core.errors import OptionError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["BlendComposer", "Rule"]

Rule: TypeAlias = Literal["first", "deviation", "attention"]

_QUESTION = 32
"""Tokens of the prompt's end whose attention counts."""


@dataclass(frozen=True)
class BlendComposer:
    """Splices packs, then computes a share `r` of each pack's tokens anew behind all that stands before them.

    `rule` chooses the tokens: `first`, the first of each pack (EPIC, arXiv 2410.15332); `deviation`, those whose values
    in the second layer differ most from the pack's (CacheBlend, arXiv 2405.16444, section 4.3); `attention`, those that
    the question looks at most (ProphetKV), which is never kept, as it depends on the question. With `r=1` nothing is
    composed and all is exact. Approximate: measure with `compare_composers` before you answer with it.

    Raises `OptionError` for `r` outside [0, 1] or an unknown rule.
    """

    r: float = 0.15
    rule: Rule = "first"

    def __post_init__(self) -> None:
        if not (isinstance(self.r, int | float) and 0 <= self.r <= 1):
            raise OptionError(f"Got r={self.r!r}; expected a share of the tokens to compute anew, from 0 to 1.")
        if self.rule not in get_args(Rule):
            raise OptionError(f"Got rule={self.rule!r}; expected one of {', '.join(get_args(Rule))}.")

    @property
    def exact(self) -> bool:
        """Only where all tokens are computed."""
        return self.r == 1

    @property
    def key(self) -> str:
        """Method, share and rule."""
        return f"blend:r={self.r:g},rule={self.rule}"

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs, or none where all tokens are to be computed: in such a loop they would round otherwise.

        Raises as `movable`.
        """
        return () if self.exact else movable(prompt)

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """The packs' KV, moved, with the chosen tokens computed anew, in the pass that computes what is between."""
        kv = laid(region, packs, forward)
        chosen = {*region.between}
        if self.r > 0:
            scores = _RULES[self.rule](region, kv, forward)
            for span in region.spans:
                start = span.start - region.start
                best = scores[start : start + len(span)].topk(math.ceil(self.r * len(span))).indices
                chosen.update(start + int(at) for at in best)
        return forward.anew(kv, sorted(chosen))


def _first(region: Region, kv: KVTensors, forward: Forward) -> Tensor:  # noqa: ARG001
    """The earlier in its pack, the higher."""
    return -torch.arange(len(region), device=kv.device)


def _deviation(region: Region, kv: KVTensors, forward: Forward) -> Tensor:
    """How far the values of the second layer are from those of the text behind what stands before it."""
    layer = min(1, kv.layers - 1)
    positions = range(region.start, region.stop)
    fresh = forward(region.token_ids, positions, forward.before, layers=layer + 1)
    apart = fresh.values[layer].float() - kv.values[layer].float()
    score: Tensor = torch.linalg.vector_norm(apart, dim=-1).sum(dim=0)
    return score


def _attention(region: Region, kv: KVTensors, forward: Forward) -> Tensor:
    """How much the end of the prompt looks at each token."""
    return forward.attention(_QUESTION, kv, region.between)


_RULES: Mapping[Rule, Callable[[Region, KVTensors, Forward], Tensor]] = {
    "first": _first,
    "deviation": _deviation,
    "attention": _attention,
}
