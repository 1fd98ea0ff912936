"""KV as it is, at a position it was not compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kp_core.compose.base import Forward, Region, join
from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["NaiveComposer"]


@dataclass(frozen=True)
class NaiveComposer:
    """Concatenates caches as they are: packs do not see one another, and their keys keep the positions of their build.

    Fast and wrong. It is here to measure other composers against, never to answer with.
    """

    key: str = "naive"
    exact = False

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs."""
        return prompt.spans

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """The packs' KV as it is."""
        parts = [pack.kv for pack in packs if pack.kv is not None]
        if len(parts) < len(packs):
            raise KVShapeError(f"Got a lazy pack for the region {region.start}:{region.stop}; expected its KV.")
        return join(region, parts, forward)
