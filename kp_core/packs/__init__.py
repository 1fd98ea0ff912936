"""Packs: what they are, how they are named, and how they are kept."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kp_core.packs.fingerprint import ModelFingerprint
    from kp_core.packs.handle import Handle, find_handles, strip_handles
    from kp_core.packs.pack import KnowledgePack, Prefix
    from kp_core.packs.store import PackStore

__all__ = ["Handle", "KnowledgePack", "ModelFingerprint", "PackStore", "Prefix", "find_handles", "strip_handles"]

_PLACES = {"ModelFingerprint": "fingerprint", "KnowledgePack": "pack", "Prefix": "pack", "PackStore": "store"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A name of `__all__`, imported when it is first asked for: handles and namespaces need no torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'handle')}"), name)
