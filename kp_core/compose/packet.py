"""Composes packs between trained soft tokens, the wrapper; each is compiled once and composed without a forward pass.

A wrapper's file is safetensors with digest and fingerprint, written atomically.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kp_core.compose.splice import SpliceComposer
from kp_core.errors import FingerprintMismatchError, PackCorruptError, PackError, WrapperError
from kp_core.packs.envelope import Envelope, mapping
from kp_core.packs.fingerprint import NUMERICS, ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["SHIPPED", "PacketComposer", "laid_out", "read_signed", "write_signed"]

SHIPPED = Path(__file__).parents[1] / "wrappers" / "smollm2-135m-instruct.safetensors"
"""The wrapper of the bundled model; its training record has the command that made it."""

_ENVELOPE = Envelope("knowledge-pack-wrapper", "content", ("1",), covers_tensors=True)


@dataclass(frozen=True, eq=False)
class PacketComposer(SpliceComposer):
    """Moves packs together with trained soft tokens around them, a wrapper (KV Packet, arXiv 2604.13226, section 3).

    `header` and `trailer` are input embeddings, `(soft tokens, hidden)`, in float32 on the CPU. They fit the model of
    `fingerprint` with any numerics. `training` records settings, steps and measurements.

    Header, pack and trailer are compiled behind the prefix of the pack, once for each wrapper, and stored. At use they
    are copied and their keys rotated, without a forward pass. Soft tokens take positions of the prompt, and count as
    approximate like their packs. A pack behind the prefix it was compiled for is exact and has no soft tokens.
    Approximate, and best on the kind of text that the wrapper was trained on: measure with `kp calibrate` before
    you use it. Raises `WrapperError` for tensors of another shape, and for values that are not finite.
    """

    header: Tensor
    trailer: Tensor
    fingerprint: ModelFingerprint
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "training", MappingProxyType(dict(self.training)))
        for name in ("header", "trailer"):
            tensor = getattr(self, name).detach().to("cpu", torch.float32).contiguous()
            if tensor.ndim != 2 or tensor.shape[1] != self.header.shape[-1] or not tensor.isfinite().all():
                raise WrapperError(
                    f"Got a {name} of shape {tuple(tensor.shape)}; expected finite numbers (soft tokens, hidden), "
                    "as wide in the header as in the trailer."
                )
            object.__setattr__(self, name, tensor)

    @classmethod
    def load(cls, wrapper: str | Path = SHIPPED) -> PacketComposer:
        """The composer in a file, by default that of the bundled model, with its digest checked; nothing is unpickled.

        `check` tests at use whether it fits a model. Raises `WrapperError` for a file that is missing, damaged or of
        another kind.
        """
        return cls._of(*read_signed(wrapper, _ENVELOPE))

    @classmethod
    def of(cls, data: bytes) -> PacketComposer:
        """The inverse of `to_bytes`; raises `WrapperError`."""
        try:
            return cls._of(*_ENVELOPE.read(data))
        except (PackError, ValueError, TypeError, AttributeError) as error:
            raise WrapperError(f"Got what is no wrapper: {error}") from error

    @classmethod
    def _of(cls, content: dict[str, Any], tensors: dict[str, Tensor]) -> PacketComposer:
        try:
            fingerprint = ModelFingerprint.from_dict(mapping(content["fingerprint"], "fingerprint"))
            return cls(tensors["header"], tensors["trailer"], fingerprint, mapping(content["training"], "training"))
        except (PackCorruptError, LookupError) as error:
            raise WrapperError(
                f"The file describes no wrapper: {error}. Train it anew, or load another copy."
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write the wrapper to `path` atomically, replacing an existing file; raises `WrapperError` if that fails."""
        return write_signed(path, _ENVELOPE, *self._content)

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes."""
        return _ENVELOPE.write(*self._content)

    @property
    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        content = {"fingerprint": self.fingerprint.to_dict(), "training": dict(self.training)}
        return content, {"header": self.header, "trailer": self.trailer}

    @cached_property
    def id(self) -> str:
        """Digest of the soft tokens and of the model they fit."""
        digest = blake2b(self.fingerprint.identity.encode(), digest_size=16)
        for tensor in (self.header, self.trailer):
            digest.update(f"{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    @property
    def key(self) -> str:  # type: ignore[override]
        """Method and digest of the wrapper."""
        return f"packet:{self.id}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacketComposer) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `FingerprintMismatchError`, naming each differing field, unless it was trained for that model."""
        differences = self.fingerprint.diff(fingerprint)
        identity = {name: difference for name, difference in differences.items() if name not in NUMERICS}
        if identity:
            advice = "Train one with `kp packet train`, or use another composer."
            raise FingerprintMismatchError(f"The wrapper {self.id[:8]}", identity, "wrapper", advice)

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs."""
        return prompt.spans

    def wrap(self, pack: KnowledgePack, token_ids: Sequence[int]) -> KnowledgePack:
        """The pack with `token_ids` between its soft tokens, without KV.

        The first and last of `token_ids` are repeated as placeholder ids of the soft tokens.
        """
        before, behind = (token_ids[0],) * len(self.header), (token_ids[-1],) * len(self.trailer)
        return replace(pack, token_ids=(*before, *token_ids, *behind), kv=None)

    def unwrapped(self, pack: KnowledgePack) -> tuple[int, ...]:
        """The ids between the soft tokens of a wrapped pack."""
        return pack.token_ids[len(self.header) : len(pack.token_ids) - len(self.trailer)]


def laid_out(prompt: Prompt, wanted: Collection[Span], ends: Sequence[int], composer: PacketComposer) -> Prompt:
    """`prompt` with the `wanted` spans wrapped in soft tokens; later tokens move to higher positions.

    `ends` has the end of each span including the blank tokens behind it (`ChatTemplate.ends`). These become part of the
    wrapped pack, so that no tokens between packs must be computed.
    """
    wrapped = {
        span.start: (end, composer.wrap(span.pack, prompt.token_ids[span.start : end]))
        for span, end in zip(prompt.spans, ends, strict=True)
        if span in wanted
    }

    def moved(at: int) -> int:
        """Where the token at `at` stands behind the soft tokens before it."""
        return at + sum(len(pack.token_ids) - (end - start) for start, (end, pack) in wrapped.items() if end <= at)

    ids: list[int] = []
    copied = 0
    for start, (end, pack) in wrapped.items():
        ids += (*prompt.token_ids[copied:start], *pack.token_ids)
        copied = end
    spans = []
    for span in prompt.spans:
        end, pack = wrapped.get(span.start, (span.stop, span.pack))
        reference = replace(span.reference, pack=pack)
        spans.append(replace(span, start=moved(span.start), stop=moved(end), reference=reference))
    # A message may begin at the start of a pack, never inside it.
    inside = {at for start, (end, _) in wrapped.items() for at in range(start + 1, end)}
    texts = [
        replace(span, start=moved(span.start), stop=moved(span.stop))
        for span in prompt.as_text
        if span.start not in inside
    ]
    return replace(
        prompt,
        token_ids=(*ids, *prompt.token_ids[copied:]),
        spans=tuple(spans),
        breaks=tuple(moved(at) for at in prompt.breaks if at not in inside),
        as_text=tuple(texts),
    )


def write_signed(
    path: str | Path, envelope: Envelope, content: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """`envelope.save`; raises `WrapperError` if writing fails, and then leaves an existing file unchanged."""
    try:
        return envelope.save(path, content, tensors)
    except OSError as error:
        raise WrapperError(
            f"{Path(path).absolute()} could not be written ({error.strerror or error}); what was there before is "
            "untouched. Make room, or name another place."
        ) from error


def read_signed(path: str | Path, envelope: Envelope) -> tuple[Any, dict[str, Tensor]]:
    """Read a file of `write_signed`; raises `WrapperError` for anything else."""
    try:
        return envelope.load(path)
    except FileNotFoundError as error:
        raise WrapperError(f"There is no {path}. `kp packet train` makes one.") from error
    except (PackError, ValueError, TypeError, AttributeError) as error:
        raise WrapperError(f"{path} cannot be used: {error} Train it anew, or load another copy.") from error
