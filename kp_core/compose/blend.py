"""Splices packs and recomputes some of their tokens."""

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
"""Number of last tokens of the prompt whose attention weights are summed."""


@dataclass(frozen=True)
class BlendComposer:
    """Splices packs, then recomputes a share `r` of each pack's tokens, which see all tokens before them.

    `rule` chooses the tokens. `first`: the first of each pack (EPIC, arXiv 2410.15332). `deviation`: those whose values
    in the second layer differ most from the pack's (CacheBlend, arXiv 2405.16444, section 4.3). `attention`: those with
    the greatest attention weight from the question (ProphetKV); the result depends on the question and is never cached.
    With `r=1`, all tokens are prefilled, which is exact. Otherwise approximate: measure with `compare_composers` before
    you use it.

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
        """Whether all tokens are computed (`r=1`)."""
        return self.r == 1

    @property
    def key(self) -> str:
        """Method, share and rule."""
        return f"blend:r={self.r:g},rule={self.rule}"

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs, or none for `r=1`: a plain prefill avoids the different rounding of a composed region.

        Raises as `movable`.
        """
        return () if self.exact else movable(prompt)

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """The packs' KV, moved; one pass recomputes the chosen tokens and computes the tokens between packs."""
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
    """Scores that fall with the position, so that the first tokens of a pack are chosen."""
    return -torch.arange(len(region), device=kv.device)


def _deviation(region: Region, kv: KVTensors, forward: Forward) -> Tensor:
    """Distance of each token's values in the second layer from those of a prefill behind the real prefix."""
    layer = min(1, kv.layers - 1)
    positions = range(region.start, region.stop)
    fresh = forward(region.token_ids, positions, forward.before, layers=layer + 1)
    difference = fresh.values[layer].float() - kv.values[layer].float()
    distance: Tensor = torch.linalg.vector_norm(difference, dim=-1).sum(dim=0)
    return distance


def _attention(region: Region, kv: KVTensors, forward: Forward) -> Tensor:
    """Attention weight of each token from the end of the prompt."""
    return forward.attention(_QUESTION, kv, region.between)


_RULES: Mapping[Rule, Callable[[Region, KVTensors, Forward], Tensor]] = {
    "first": _first,
    "deviation": _deviation,
    "attention": _attention,
}
