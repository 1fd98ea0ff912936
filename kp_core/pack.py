"""A pack: a piece of knowledge, compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kp_core.errors import FingerprintMismatchError, KVShapeError
from kp_core.fingerprint import ModelFingerprint
from kp_core.handle import check_namespace
from kp_core.kv import KVTensors

__all__ = ["Head", "KnowledgePack"]


@dataclass(frozen=True)
class Head:
    """What stood before a pack when its KV was computed.

    `token_ids` are the tokens, `cuts` the positions at which their prefill was cut (ascending, the last one is
    `len(token_ids)`). KV is exact only behind the same tokens, and bit-identical only behind the same cuts.
    """

    token_ids: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class KnowledgePack:
    """Text, its tokens, and (unless the pack is lazy) the KV a model computed for them behind a head.

    `token_ids` is the part of the text's tokenisation that stays the same whatever follows it in a prompt; the last
    characters of `text` may therefore be in no token here, and are prefilled with what follows. `kv` holds one entry
    per token of `token_ids`. A pack is immutable data: every operation returns a new one.

    Raises `KVShapeError` when `kv` and `token_ids` disagree, `HandleError` when `namespace` is not one.
    """

    text: str
    namespace: str
    token_ids: tuple[int, ...]
    head: Head
    fingerprint: ModelFingerprint
    kv: KVTensors | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Where the pack comes from (`title`, `source`) and what computed it (`device`, `torch`): strings, for people."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))
        if self.kv is not None and self.kv.tokens != len(self.token_ids):
            raise KVShapeError(
                f"Got KV of {self.kv.tokens} tokens for a pack of {len(self.token_ids)}; expected one entry per token."
            )

    @property
    def is_lazy(self) -> bool:
        """Whether the KV is absent, to be computed on first use."""
        return self.kv is None

    @property
    def nbytes(self) -> int:
        """Bytes of the KV; 0 for a lazy pack."""
        return 0 if self.kv is None else self.kv.nbytes

    def without_kv(self) -> KnowledgePack:
        """The same knowledge as a lazy pack."""
        return replace(self, kv=None)

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `FingerprintMismatchError`, naming each differing field, unless this pack was made by that model."""
        differences = self.fingerprint.diff(fingerprint)
        if differences:
            raise FingerprintMismatchError(f"The pack {self.text[:40]!r}", differences)
