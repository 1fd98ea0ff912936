"""Packs moved to where they stand, none of them having seen another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kp_core.compose.base import Forward, Stretch
from kp_core.compose.stretch import join
from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["SpliceComposer", "spliced"]


@dataclass(frozen=True)
class SpliceComposer:
    """Copies each pack's KV, its keys turned by RoPE to their new positions (Prompt Cache, arXiv 2311.04934, moved).

    Packs were compiled behind the template's prefix, which is not copied: the prompt keeps one attention sink, its own
    beginning. Packs do not see one another, the question sees them all. Costs a copy of the tokens and one forward pass
    for what stands between packs. Approximate: measure with `compare_composers` before you answer with it.
    """

    exact = False
    key = "splice"

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs."""
        return prompt.spans

    def fill(self, region: Stretch, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """The packs' KV, moved."""
        return spliced(region, packs, forward)


def spliced(region: Stretch, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
    """The packs of a region at their positions there; raises `KVShapeError` for one without KV."""
    parts = []
    for span, pack in zip(region.spans, packs, strict=True):
        if pack.kv is None:
            raise KVShapeError(f"Got a lazy pack for the tokens {span.start}:{span.stop}; expected its KV.")
        parts.append(forward.rope.move(pack.kv, span.start - len(pack.prefix)))
    return join(region, parts, forward)
