"""What a session offers because its engine does."""

from __future__ import annotations

from typing import cast

from kp_core.engines.base import CachingEngine, Engine, refusal

__all__ = ["OfEngine"]


class OfEngine:
    """An engine under a name, and its cache; what it does not support is refused in that name."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name

    def unpin(self, pinned: object) -> None:
        """Let the prefix tree evict a pinned pack again."""
        self._cache("unpin").unpin(pinned)

    @property
    def cached_bytes(self) -> int:
        """Bytes of KV in the prefix tree, which its budget bounds."""
        return self._cache("cached_bytes").cached_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token."""
        return self._cache("bytes_per_token").bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes of what recurrent layers keep for each end of a pack or a message; 0 where there are none."""
        return self._cache("state_bytes").state_bytes

    def clear_cache(self) -> None:
        """Drop all KV that is neither pinned nor in use."""
        self._cache("clear_cache").clear_cache()

    def _need(self, capability: str, what: str, *, needed: bool = True) -> None:
        if needed and capability not in self.engine.supports:
            raise refusal(self.engine, self.name, capability, what)

    def _cache(self, what: str) -> CachingEngine:
        self._need("cache", what)
        return cast("CachingEngine", self.engine)
