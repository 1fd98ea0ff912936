"""Exact composition, the default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kp_core.compose.base import Forward, Region
from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["ExactComposer"]


@dataclass(frozen=True)
class ExactComposer:
    """Sequential composition (Knowledge Packs, arXiv 2604.03270): the answer equals that for the text, token for token.

    A pack's KV is used only behind the prefix it was compiled for. Elsewhere its tokens are prefilled, and the prefix
    tree keeps the result.
    """

    exact = True
    key = "exact"

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:  # noqa: ARG002 - all other packs are prefilled
        """No spans."""
        return ()

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:  # noqa: ARG002
        """Always raises `KVShapeError`, as there are no regions to fill."""
        raise KVShapeError(f"Got the region {region.start}:{region.stop} to compose; exact composition makes none.")
