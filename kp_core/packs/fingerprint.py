"""Identity of what computed a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b

from kp_core.errors import PackCorruptError

__all__ = ["ModelFingerprint"]


@dataclass(frozen=True)
class ModelFingerprint:
    """Identity of the model, and of everything else that decides the bits of a KV cache.

    Each field is a short readable string or a hexadecimal BLAKE2b digest. Two engines with equal fingerprints compute
    the same keys and values for the same token ids, up to the rounding of their device.
    """

    weights: str
    """Digest of every parameter: name, shape, dtype and bytes."""
    config: str
    """Digest of the architecture's configuration."""
    tokenizer: str
    """Digest of vocabulary, merges, normalisation and added tokens."""
    chat_template: str
    """Digest of the chat template's source."""
    dtype: str
    """Data type of the cache, e.g. `bfloat16`."""
    rope: str
    """RoPE type and parameters, as JSON."""
    chunk_tokens: str
    """Longest canonical prefill chunk, which decides the shapes, and so the rounding."""

    def same_model(self, other: ModelFingerprint) -> bool:
        """Whether both are of one model, whatever the numerics."""
        return set(self.diff(other)) <= {"dtype", "chunk_tokens"}

    @property
    def is_legacy(self) -> bool:
        """Whether an earlier release took it."""
        return False

    def diff(self, other: ModelFingerprint) -> dict[str, tuple[str, str]]:
        """Each field that differs, as `(mine, other's)`; empty when equal."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    @property
    def id(self) -> str:
        """One digest of all fields, for use as a key."""
        return blake2b("\0".join(self.to_dict().values()).encode(), digest_size=16).hexdigest()

    @classmethod
    def unknown(cls) -> ModelFingerprint:
        """The fingerprint of nothing: differs from that of every model, in every field."""
        return cls(**{field.name: "unknown" for field in fields(cls)})

    def to_dict(self) -> dict[str, str]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ModelFingerprint:
        """The inverse of `to_dict`; raises `PackCorruptError` when fields are missing, unknown or not strings."""
        names = {field.name for field in fields(cls)}
        if set(data) != names or not all(isinstance(value, str) for value in data.values()):
            raise PackCorruptError(f"Got the fingerprint fields {sorted(data)}; expected strings for {sorted(names)}.")
        return cls(**{name: str(data[name]) for name in names})
