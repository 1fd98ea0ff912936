"""The seam for composing packs."""

from __future__ import annotations

from typing import Protocol

from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack, Prefix

__all__ = ["Composer"]


class Composer(Protocol):
    """Decides what KV stands in the cache for a pack of the same model and the same tokens, at its place in a prompt.

    `name` keeps the caches of different composers apart in the prefix tree.
    """

    @property
    def name(self) -> str:
        """Short name of the method."""

    def wants(self, pack: KnowledgePack, prefix: Prefix) -> bool:
        """Whether the KV of `pack`, which may not be loaded yet, can stand behind `prefix`; if not, it is prefilled."""

    def place(self, pack: KnowledgePack, prefix: Prefix) -> KVTensors:
        """KV for the tokens of `pack` behind `prefix`: per layer `(kv_heads, tokens, head_dim)`.

        `pack` brings its KV and is not to be changed; what comes back is written to the cache as it is.
        """
