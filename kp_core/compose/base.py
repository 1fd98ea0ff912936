"""The seam for composing packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["Composer", "Forward"]


class Forward(Protocol):
    """What a composer computes with."""

    def __call__(self, ids: Sequence[int], past: KVTensors | None = None) -> KVTensors:
        """KV of `ids` behind `past`: per layer `(kv_heads, len(ids), head_dim)`."""


@runtime_checkable
class Composer(Protocol):
    """Makes the KV of packs that do not stand where they were compiled.

    Packs behind the very prefix they were compiled for are exact and shared by all composers; a composer is asked about
    the others.
    """

    @property
    def exact(self) -> bool:
        """Whether the KV is what the model computes for the text at its position."""

    @property
    def key(self) -> str:
        """Method and parameters: what two composers of one key make is the same, and kept under one name."""

    def regions(self, prompt: Prompt) -> Sequence[Span]:
        """The spans of `prompt` whose KV it makes; the other ones are computed."""

    def fill(self, region: Span, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """KV for the tokens of `region`: per layer `(kv_heads, tokens, head_dim)`.

        `packs` are those of the region, with their KV, and are not to be changed; what comes back is written to the
        cache as it is. `forward` computes with the model.
        """
