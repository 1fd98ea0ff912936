"""What one generation cost, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Usage"]


@dataclass(frozen=True)
class Usage:
    """Counts of one generation, in tokens, and its time to first token, in seconds.

    `prompt_tokens + pack_tokens == reused_tokens + computed_tokens`: the same prompt, counted by who sent it and by
    what became of it.
    """

    prompt_tokens: int
    """Tokens of the canonical prompt outside packs: what the caller sent."""
    pack_tokens: int
    """Tokens of the canonical prompt that packs delivered."""
    reused_tokens: int
    """Tokens whose KV was at hand, in memory or in the store."""
    computed_tokens: int
    """Tokens prefilled by this generation."""
    completion_tokens: int
    """Tokens generated, the end-of-turn token included."""
    ttft_s: float
    """Seconds from the call to the first token."""
    recognised_tokens: int = 0
    """Those of `prompt_tokens` in which packs were recognised by their text."""
    approximate_tokens: int = 0
    """Tokens whose KV an approximate composer made; 0 unless one was asked for."""
    reordered_packs: int = 0
    """Packs that were sent at another place among their neighbours than they were named at (`order="free"`)."""
    errata_tokens: int = 0
    """Those of `pack_tokens` that errata have (see `kp_core.edit`)."""
    state_bytes: int = 0
    """Bytes of the states of recurrent layers that are kept for the prompt, beside its KV; 0 for models without."""

    def to_dict(self) -> dict[str, int | float]:
        """The fields by name."""
        return asdict(self)
