"""Naive composition: the oracle of what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack, Prefix

__all__ = ["NaiveComposer"]


@dataclass(frozen=True)
class NaiveComposer:
    """Concatenates caches as they are: packs do not see one another, and their keys keep the positions of their build.

    Fast and wrong. It is here to measure other composers against, never to answer with.
    """

    name: str = "naive"

    def wants(self, pack: KnowledgePack, prefix: Prefix) -> bool:  # noqa: ARG002 - ignoring the prefix is the point
        """Always."""
        return True

    def place(self, pack: KnowledgePack, prefix: Prefix) -> KVTensors:  # noqa: ARG002 - it is the right one, or ignored
        """The pack's KV as it is."""
        if pack.kv is None:
            raise KVShapeError("Got a lazy pack; expected one that brings its KV.")
        return pack.kv
