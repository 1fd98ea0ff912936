"""The identity of the model that computed a KV cache, and of the numerics it used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

from kp_core.errors import PackCorruptError, PackError

NUMERICS = ("dtype", "engine", "passes")
"""The fields that affect only rounding; all other fields are the identity of the model."""
OVERWRITTEN = "/overwrite:"
"""Part of the dtype of KV that was edited in place; the digest of the edit follows."""


@dataclass(frozen=True)
class ModelFingerprint:
    """Identity of the model, and numerics: everything else that determines the bits of a KV cache.

    Each field is a short readable string or a hexadecimal BLAKE2b digest. Engines of one identity and different
    numerics compute approximately the same.
    """

    weights: str
    """Digest of every weight in the checkpoint: name, shape, dtype and bytes."""
    adapters: str
    """Digest of the adapters: their weights, which of them are active, and their strength; `none` without adapters."""
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
    """How forward passes are computed, as far as it affects bits: library version and instruction set if the bits
    depend on nothing else, otherwise `any`."""

    @property
    def id(self) -> str:
        """One digest of all fields, for use as a key."""
        return _digest(self.to_dict().values())

    @property
    def identity(self) -> str:
        """One digest of the fields that identify the model."""
        return _digest(value for name, value in self.to_dict().items() if name not in NUMERICS)

    def is_edit_of(self, model: ModelFingerprint) -> bool:
        """Whether this is KV of `model` that was overwritten (`OVERWRITTEN`)."""
        dtype, overwritten, _ = self.dtype.partition(OVERWRITTEN)
        return bool(overwritten) and replace(self, dtype=dtype) == model

    def same_model(self, other: ModelFingerprint) -> bool:
        """Whether both identify the same model, whatever their numerics."""
        return self.diff(other).keys() <= set(NUMERICS)

    def diff(self, other: ModelFingerprint) -> dict[str, tuple[str, str]]:
        """Return each field that differs, as `(mine, other's)`; empty if equal."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    @classmethod
    def unknown(cls) -> ModelFingerprint:
        """Return a fingerprint that differs from that of every model in every field."""
        return cls(**{field.name: "unknown" for field in fields(cls)})

    def to_dict(self) -> dict[str, str]:
        """Return the fields by name."""
        return {name: str(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ModelFingerprint:
        """Parse the output of `to_dict`; raises `PackCorruptError` if fields are missing, unknown or not strings."""
        names = {field.name for field in fields(cls)}
        if set(data) != names or not all(isinstance(value, str) for value in data.values()):
            raise PackCorruptError(f"Got the fingerprint fields {sorted(data)}; expected strings for {sorted(names)}.")
        return cls(**{name: str(value) for name, value in data.items()})


def _digest(values: Iterable[str]) -> str:
    return blake2b("\0".join(values).encode(), digest_size=16).hexdigest()


def mismatch(
    what: str,
    differences: Mapping[str, tuple[str, str]],
    kind: str = "pack",
    advice: str = "",
    *,
    same_model: bool = False,
) -> PackError:
    """Return the error for `what` that another model made, or the same model in other numerics.

    `differences` maps each differing field to `(of the pack, of the model)`.
    """
    lines = "; ".join(f"{name}: {kind} has {held}, model has {model}" for name, (held, model) in differences.items())
    cause = "was made by this model with other numerics" if same_model else "was not made by this model"
    advice = advice or (
        'Its KV is not used. To go on, have it computed anew from its text with `mismatch="rebuild"`, or build the '
        "pack again with `engine.build_pack(pack.text, ...)`."
    )
    return PackError(f"{what} {cause} ({lines}). {advice}")
