"""A wrong composer, as a baseline for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.plan.composer import Composer, Host, Move
from kp_core.plan.plan import Region
from kp_core.prompt.prompt import Prompt, Span


@dataclass(frozen=True)
class NaiveComposer(Composer):
    """Concatenates KV unchanged: packs do not see each other, and keys keep the positions they were compiled at."""

    key: str = "naive"

    def layout(self, prompt: Prompt, moved: Sequence[Span], host: Host) -> tuple[Prompt, Sequence[Span]]:
        """All packs."""
        return prompt, moved

    def fill(self, region: Region, packs: Sequence[KnowledgePack], room: KVTensors, move: Move) -> Sequence[int]:
        """Copies the packs' KV."""

        def copy(kv: KVTensors, _: int, place: KVTensors) -> None:
            for tensor, target in zip((*kv.keys, *kv.values), (*place.keys, *place.values), strict=True):
                target.copy_(tensor)

        return super().fill(region, packs, room, copy)
