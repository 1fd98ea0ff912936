"""Token counts of one generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Usage"]


@dataclass(frozen=True)
class Usage:
    """Token counts of one generation, and its time to first token in seconds.

    `prompt_tokens + pack_tokens == reused_tokens + computed_tokens`: both sides count the same prompt, once by who sent
    it and once by how its KV was obtained.
    """

    prompt_tokens: int
    """Tokens of the canonical prompt outside packs, which the caller sent."""
    pack_tokens: int
    """Tokens of the canonical prompt that packs delivered."""
    reused_tokens: int
    """Tokens whose KV was already in memory or in the store."""
    computed_tokens: int
    """Tokens prefilled by this generation."""
    completion_tokens: int
    """Generated tokens, including the end-of-turn token."""
    ttft_s: float
    """Seconds from the call to the first token."""
    recognised_tokens: int = 0
    """Tokens of `prompt_tokens` in which packs were recognised by their text."""
    approximate_tokens: int = 0
    """Tokens whose KV an approximate composer made; 0 unless one was asked for."""
    reordered_packs: int = 0
    """Packs whose order among their neighbours changed (`order="free"`)."""
    errata_tokens: int = 0
    """Tokens of `pack_tokens` that belong to errata (see `kp_core.edit`)."""
    state_bytes: int = 0
    """Bytes of the kept states of recurrent layers for the prompt, beside its KV; 0 for models without them."""

    def to_dict(self) -> dict[str, int | float]:
        """The fields by name."""
        return asdict(self)
