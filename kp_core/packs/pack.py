"""A pack: a piece of knowledge, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, Self

from kp_core.errors import FingerprintMismatchError, KVShapeError, PackError, SteeringError
from kp_core.kv import KVTensors
from kp_core.packs.codec import Compression, check_compression, rounded
from kp_core.packs.edits import Edit, Edits
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import check_namespace

__all__ = ["KnowledgePack", "PackKey", "PackSteering", "Prefix", "common_length"]

_ROUNDED = "/int8"  # Behind the dtype of a fingerprint: numerics of their own, so never taken for exact.


class PackSteering(Protocol):
    """What a pack has to know of a steering; `kp_core.steering.Steering` is the one there is."""

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing."""

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `FingerprintMismatchError` unless it was made by this model."""

    def at_alpha(self, alpha: float | None, *, with_knowledge: bool) -> Self:
        """It times `alpha`; without one, at its default strength."""

    def __add__(self, other: Self) -> Self: ...


@dataclass(frozen=True)
class Prefix:
    """The tokens that stood before a pack when its KV was computed; an empty one stands for the start of a prompt."""

    token_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PackKey:
    """Which of the KV entries of a text is wanted: of this model, and where it matters behind this prefix."""

    model: ModelFingerprint
    prefix: Prefix | None = None

    def fits(self, pack: KnowledgePack) -> bool:
        """Whether `pack` is what is wanted."""
        return pack.fingerprint == self.model and self.prefix in (None, pack.prefix)


@dataclass(frozen=True, eq=False)
class KnowledgePack:
    """Text, its tokens, and (unless the pack is lazy) the KV a model computed for them behind a prefix.

    `token_ids` is the part of the text's tokenisation that stays the same whatever follows it in a prompt; the last
    characters of `text` may therefore be in no token here, and are prefilled with what follows. Those of a pack for the
    system message include the end of its line, which is not in `text`. `kv` holds one entry
    per token of `token_ids`. A pack is immutable data: every operation returns a new one.

    Raises `KVShapeError` when `kv` and `token_ids` disagree, `HandleError` when `namespace` is not one, `PackError`
    when the provenance tells edits that nobody made.
    """

    text: str
    namespace: str
    token_ids: tuple[int, ...]
    prefix: Prefix
    fingerprint: ModelFingerprint
    kv: KVTensors | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Where the pack comes from (`title`, `source`) and what computed it (`device`, `torch`): strings, for people."""
    stored_bytes: int = field(default=0, compare=False)
    """Bytes of KV that the pack's source holds, though they are not loaded."""
    steering: PackSteering | None = None
    """What the engine adds to the pack's values wherever it places them (see `steer`). `kv` is always the plain KV, so
    that nothing altered is ever taken for what the model computed."""

    compression: Compression = "none"
    """How the KV is stored; see `compressed`."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))
        if self.kv is not None and self.kv.tokens != len(self.token_ids):
            raise KVShapeError(
                f"Got KV of {self.kv.tokens} tokens for a pack of {len(self.token_ids)}; expected one entry per token."
            )
        self.edits  # noqa: B018 - refused here, and not when it is first used

    @cached_property
    def edits(self) -> Edits:
        """What was edited in it, as its provenance tells."""
        return Edits.of(self.provenance)

    @property
    def history(self) -> tuple[Edit, ...]:
        """All edits that led to it, oldest first (see `kp_core.edit`)."""
        return self.edits.history

    @property
    def errata_start(self) -> int:
        """The first of its tokens that belongs to an erratum; their number where it has none."""
        return min((at for at in self.edits.starts if at > 0), default=len(self.token_ids))

    @property
    def is_lazy(self) -> bool:
        """Whether the KV is absent, to be computed on first use."""
        return self.kv is None

    @property
    def nbytes(self) -> int:
        """Bytes of the KV; 0 for a lazy pack."""
        return 0 if self.kv is None else self.kv.nbytes

    @property
    def key(self) -> PackKey:
        """What this entry of its text was made for."""
        return PackKey(self.fingerprint, self.prefix)

    def without_kv(self) -> KnowledgePack:
        """The same knowledge as a lazy pack."""
        return replace(self, kv=None)

    def compressed(self, compression: Compression) -> KnowledgePack:
        """The same knowledge, stored in fewer bytes; a lazy pack has nothing to compress.

        `"lossless"` changes no bit (0.7 of the bytes in bfloat16). `"int8"` rounds the KV at once (0.5 of them), and
        is told by the dtype of the fingerprint: a model uses such a pack with `mismatch="accept"` alone, as an
        approximation. Raises `PackError` for what is neither, and for int8 where the model has recurrent states.
        """
        check_compression(compression)
        if self.kv is None or compression != "int8":
            return replace(self, compression=compression)
        if self.kv.states:
            raise PackError(
                f"The pack {self.text[:40]!r} holds states of recurrent layers, which are not rounded to eight bits: "
                "the error would be carried on by all tokens behind it. Use compress='lossless'."
            )
        made = self.fingerprint
        if not made.dtype.endswith(_ROUNDED):
            made = replace(made, dtype=made.dtype + _ROUNDED)
        return replace(self, kv=rounded(self.kv), fingerprint=made, compression=compression)

    def steer(self, steering: PackSteering, alpha: float | None = None) -> KnowledgePack:
        """The same knowledge, spoken from otherwise: values `V + alpha * delta` (arXiv 2604.03270, section 2.6).

        Without `alpha` it is the default strength beside knowledge: what the steering was calibrated to, else 0.7.
        Steering a steered pack adds up, and what adds up to nothing is the plain pack again. The engine adds the deltas
        in the cache, at no token and no forward pass. A steered pack cannot be stored: store the pack and save the
        steering. Raises `SteeringMismatchError` for a steering of another model, `SteeringError` for an `alpha` that
        is not finite.
        """
        if not hasattr(steering, "at_alpha"):
            raise SteeringError(
                f"Got a steering of type {type(steering).__name__}; expected a Steering. Make one with "
                "`engine.make_steering(pairs)`."
            )
        scaled = steering.at_alpha(alpha, with_knowledge=True)
        # What the store recovered from text alone belongs to no model yet; the engine checks again.
        if self.fingerprint != ModelFingerprint.unknown():
            scaled.check(self.fingerprint)
        total = scaled if self.steering is None else self.steering + scaled
        return replace(self, steering=None if total.is_zero else total)

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `FingerprintMismatchError`, naming each differing field, unless this pack was made by that model."""
        differences = self.fingerprint.diff(fingerprint)
        if differences:
            same = self.fingerprint.same_model(fingerprint)
            raise FingerprintMismatchError(f"The pack {self.text[:40]!r}", differences, same_model=same)


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """How many tokens both begin with."""
    for at, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return at
    return min(len(left), len(right))
