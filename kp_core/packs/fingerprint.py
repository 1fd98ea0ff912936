"""Which model computed a KV cache, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b

from kp_core.errors import PackCorruptError

__all__ = ["CUT_RULE", "NUMERICS", "ModelFingerprint"]

CUT_RULE = "1"
"""Version of the rule by which a canonical prefill is cut (see `Prompt.chunks`)."""

NUMERICS = ("dtype", "chunk_tokens", "cuts", "engine")
"""The fields that decide rounding alone; all others are the identity."""

_SINCE_2 = {"adapters", "cuts", "engine"}  # Fields that files of version 1 lack.


@dataclass(frozen=True)
class ModelFingerprint:
    """Identity of the model, and numerics: everything else that decides the bits of a KV cache.

    Each field is a short readable string or a hexadecimal BLAKE2b digest. Engines with equal fingerprints compute the
    same keys and values for the same token ids, up to the rounding of their device; engines of equal identity and other
    numerics compute approximately the same.
    """

    weights: str
    """Digest of every weight as the checkpoint stores it: name, shape, dtype and bytes."""
    adapters: str
    """Digest of adapters: their weights, and which of them act, how strongly; `none` without any."""
    config: str
    """Digest of the architecture's configuration."""
    tokenizer: str
    """Digest of vocabulary, merges, normalisation and added tokens."""
    chat_template: str
    """Digest of the chat template's source."""
    rope: str
    """RoPE type and parameters, as JSON."""
    dtype: str
    """Data type of the cache, e.g. `bfloat16`."""
    chunk_tokens: str
    """Longest canonical prefill chunk, which decides the shapes, and so the rounding."""
    cuts: str
    """Version of the rule that cuts the prefill: `CUT_RULE`."""
    engine: str
    """Kind of engine, e.g. `local`."""

    @property
    def id(self) -> str:
        """One digest of all fields, for use as a key."""
        return _digest(self.to_dict().values())

    @property
    def identity(self) -> str:
        """One digest of the fields that say which model it is."""
        return _digest(value for name, value in self.to_dict().items() if name not in NUMERICS)

    @property
    def numerics(self) -> str:
        """One digest of the fields that decide the rounding."""
        return _digest(getattr(self, name) for name in NUMERICS)

    @property
    def is_legacy(self) -> bool:
        """Whether it comes from a file of version 1, whose digests compare with those of no model today."""
        return not self.adapters

    def same_model(self, other: ModelFingerprint) -> bool:
        """Whether both are of one model, whatever their numerics."""
        return self.diff(other).keys() <= set(NUMERICS)

    def diff(self, other: ModelFingerprint) -> dict[str, tuple[str, str]]:
        """Each field that differs, as `(mine, other's)`; empty when equal."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    @classmethod
    def unknown(cls) -> ModelFingerprint:
        """The fingerprint of nothing: differs from that of every model, in every field."""
        return cls(**{field.name: "unknown" for field in fields(cls)})

    def to_dict(self, version: str = "2") -> dict[str, str]:
        """The fields by name, as files of that version have them."""
        return {name: value for name, value in vars(self).items() if version != "1" or name not in _SINCE_2}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ModelFingerprint:
        """The inverse of `to_dict`; raises `PackCorruptError` when fields are missing, unknown or not strings."""
        names = {field.name for field in fields(cls)}
        if set(data) not in (names, names - _SINCE_2) or not all(isinstance(value, str) for value in data.values()):
            raise PackCorruptError(f"Got the fingerprint fields {sorted(data)}; expected strings for {sorted(names)}.")
        if set(data.values()) == {"unknown"}:
            return cls.unknown()
        return cls(**{name: str(data.get(name, "")) for name in names})


def _digest(values: Iterable[str]) -> str:
    return blake2b("\0".join(values).encode(), digest_size=16).hexdigest()
