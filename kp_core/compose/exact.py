"""Exact composition, the default."""

from __future__ import annotations

from dataclasses import dataclass

from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack, Prefix

__all__ = ["ExactComposer"]


@dataclass(frozen=True)
class ExactComposer:
    """Sequential composition (Knowledge Packs, arXiv 2604.03270): the answer is that of the text, token for token.

    A pack's KV is taken only behind the very prefix it was computed behind: same tokens, same cuts. Everywhere else its
    tokens are prefilled behind what stands before them, and the prefix tree keeps the result.
    """

    name: str = "exact"

    def wants(self, pack: KnowledgePack, prefix: Prefix) -> bool:
        """Only behind the prefix it was computed behind."""
        return pack.prefix == prefix

    def place(self, pack: KnowledgePack, prefix: Prefix) -> KVTensors:  # noqa: ARG002 - it is the right one, or ignored
        """The pack's KV as it is."""
        if pack.kv is None:
            raise KVShapeError("Got a lazy pack; expected one that brings its KV.")
        return pack.kv
