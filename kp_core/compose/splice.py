"""Moves packs to their positions in the prompt. The packs do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kp_core.errors import PackError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.plan.composer import Move, Region, placed
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["SpliceComposer", "movable"]


@dataclass(frozen=True)
class SpliceComposer:
    """Copies each pack's KV, with keys rotated by RoPE to their new positions (Prompt Cache, arXiv 2311.04934, moved).

    Packs were compiled behind the template's prefix, which is not copied: the prompt keeps one attention sink, its own
    beginning. Packs do not see each other; the question sees them all. The cost is a copy of the tokens. Tokens between
    packs are computed in the pass of the tokens behind them. Approximate: measure with `kp calibrate` first.
    """

    exact = False
    key = "splice"

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs; raises as `movable`."""
        return movable(prompt)

    def fill(self, region: Region, packs: Sequence[KnowledgePack], room: KVTensors, move: Move) -> Sequence[int]:
        """Moves the packs' KV."""
        for kv, by, place in placed(region, packs, room):
            move(kv, by, place)
        return ()


def movable(prompt: Prompt) -> tuple[Span, ...]:
    """The packs of a prompt.

    Raises `PackError` if two packs that must be moved were compiled behind different prefixes, as their tokens then saw
    different context.
    """
    by_prefix = {}
    for span in prompt.spans:
        pack, prefix = span.pack, span.pack.prefix
        is_home = len(prefix) == span.start and prompt.token_ids[: span.start] == prefix
        fits = pack.token_ids == prompt.token_ids[span.start : span.stop] and (pack.kv is not None or pack.stored_bytes)
        if fits and not is_home and not span.recognised:
            by_prefix[prefix] = span
    if len(by_prefix) > 1:
        first, second, *_ = by_prefix.values()
        raise PackError(
            f"Got {first.handle} compiled behind {len(first.pack.prefix)} tokens and {second.handle} behind "
            f"{len(second.pack.prefix)}, or others; a composer that moves packs expects one prefix. Build both with "
            "the same `compiled_for`, or use composer='exact'."
        )
    return prompt.spans
