"""Trained soft tokens around packs, and their file: safetensors with digest and fingerprint, written atomically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kp_core.errors import PackCorruptError, PackError, WrapperError, WrapperMismatchError
from kp_core.packs.envelope import Envelope, mapping
from kp_core.packs.fingerprint import NUMERICS, ModelFingerprint

__all__ = [
    "SHIPPED",
    "Wrapper",
    "load_wrapper",
    "read_signed",
    "save_wrapper",
    "wrapper_bytes",
    "wrapper_of",
    "write_signed",
]

SHIPPED = Path(__file__).parents[1] / "wrappers" / "smollm2-135m-instruct.safetensors"
"""The wrapper of the bundled model; its training record has the command that made it."""

_ENVELOPE = Envelope("knowledge-pack-wrapper", "content", ("1",), covers_tensors=True)


@dataclass(frozen=True, eq=False)
class Wrapper:
    """Soft tokens before and behind each pack: input embeddings (KV Packet, arXiv 2604.13226, section 3).

    `header` and `trailer` are `(soft tokens, hidden)` in float32 on the CPU. They fit the model of `fingerprint` with
    any numerics. `training` records settings, steps and measurements. Raises `WrapperError` for tensors of another
    shape, and for values that are not finite.
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

    @cached_property
    def id(self) -> str:
        """Digest of the soft tokens and of the model they fit."""
        digest = blake2b(self.fingerprint.identity.encode(), digest_size=16)
        for tensor in (self.header, self.trailer):
            digest.update(f"{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapper) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `WrapperMismatchError`, naming each differing field, unless the wrapper was trained for that model."""
        differences = self.fingerprint.diff(fingerprint)
        identity = {name: difference for name, difference in differences.items() if name not in NUMERICS}
        if identity:
            advice = "Train one with `kp packet train`, or use another composer."
            raise WrapperMismatchError(f"The wrapper {self.id[:8]}", identity, "wrapper", advice)


def save_wrapper(wrapper: Wrapper, path: str | Path) -> Path:
    """Write `wrapper` to `path` atomically, replacing an existing file; raises `WrapperError` if that fails."""
    return write_signed(path, _ENVELOPE, *_content(wrapper))


def wrapper_bytes(wrapper: Wrapper) -> bytes:
    """`wrapper` in the bytes of its file format."""
    return _ENVELOPE.write(*_content(wrapper))


def wrapper_of(data: bytes) -> Wrapper:
    """The inverse of `wrapper_bytes`; raises `WrapperError`."""
    try:
        return _wrapper(*_ENVELOPE.read(data))
    except (PackError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise WrapperError(f"Got what is no wrapper: {error}") from error


def _content(wrapper: Wrapper) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = {"fingerprint": wrapper.fingerprint.to_dict(), "training": dict(wrapper.training)}
    return content, {"header": wrapper.header, "trailer": wrapper.trailer}


def _wrapper(content: dict[str, Any], tensors: dict[str, Tensor]) -> Wrapper:
    fingerprint = ModelFingerprint.from_dict(mapping(content["fingerprint"], "fingerprint"))
    return Wrapper(tensors["header"], tensors["trailer"], fingerprint, mapping(content["training"], "training"))


def load_wrapper(path: str | Path) -> Wrapper:
    """Load the wrapper in `path` and check its digest; nothing is unpickled.

    `Wrapper.check` tests at use whether it fits a model. Raises `WrapperError` for a file that is missing, damaged or
    of another kind.
    """
    signed = read_signed(path, _ENVELOPE)
    try:
        return _wrapper(*signed)
    except (PackCorruptError, LookupError) as error:
        raise WrapperError(f"{path} describes no wrapper: {error}. Train it anew, or load another copy.") from error


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
