"""Uses KV unchanged at positions it was not compiled for."""

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
    """Concatenates KV unchanged: packs do not see each other, and keys keep the positions they were compiled at.

    Fast and wrong. It serves as a baseline for other composers only.
    """

    key: str = "naive"
    exact = False

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs."""
        return prompt.spans

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """The packs' KV, unchanged; raises `KVShapeError` for a pack without KV."""
        parts = [pack.kv for pack in packs if pack.kv is not None]
        if len(parts) < len(packs):
            raise KVShapeError(f"Got a lazy pack for the region {region.start}:{region.stop}; expected its KV.")
        return join(region, parts, forward)
