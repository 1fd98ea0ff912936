"""Which model computed a KV cache, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b

from kp_core.errors import PackCorruptError

__all__ = ["NUMERICS", "ModelFingerprint"]

NUMERICS = ("dtype", "engine", "passes")
"""The fields that decide rounding alone; all others are the identity."""

_UNTIL_4 = ("chunk_tokens", "cuts")  # What files of versions 2 to 4 have in place of `passes`.
_EARLIER = re.compile(r"cut by rule (.*) every (.*)", re.DOTALL)


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
    engine: str
    """Kind of engine, e.g. `local`."""
    passes: str
    """How forward passes are computed, as far as bits depend on it: the library's version and the instruction set
    where bits depend on nothing else, else `any`."""

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
    def is_earlier(self) -> bool:
        """Whether an earlier release computed it, whose numerics are those of no engine today."""
        return _EARLIER.fullmatch(self.passes) is not None

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

    def to_dict(self, version: str = "5") -> dict[str, str]:
        """The fields by name, as files of that version have them."""
        found = {name: str(value) for name, value in vars(self).items()}
        if version != "5":
            match = _EARLIER.fullmatch(found.pop("passes"))
            found["cuts"], found["chunk_tokens"] = match.groups() if match else ("unknown", "unknown")
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ModelFingerprint:
        """The inverse of `to_dict`; raises `PackCorruptError` when fields are missing, unknown or not strings."""
        names = {field.name for field in fields(cls)}
        earlier = names - {"passes"} | {*_UNTIL_4}
        if set(data) not in (names, earlier) or not all(isinstance(value, str) for value in data.values()):
            raise PackCorruptError(f"Got the fingerprint fields {sorted(data)}; expected strings for {sorted(names)}.")
        found = {name: str(value) for name, value in data.items()}
        if set(found.values()) == {"unknown"}:
            return cls.unknown()
        if "passes" not in found:
            found["passes"] = f"cut by rule {found.pop('cuts')} every {found.pop('chunk_tokens')}"
        return cls(**found)


def _digest(values: Iterable[str]) -> str:
    return blake2b("\0".join(values).encode(), digest_size=16).hexdigest()
