"""Trained soft tokens around packs, and their file: safetensors, digested, fingerprinted, never half written."""

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
"""The wrapper of the bundled model; the command that made it is in its training record."""

_ENVELOPE = Envelope("knowledge-pack-wrapper", "content", ("1",), covers_tensors=True)


@dataclass(frozen=True, eq=False)
class Wrapper:
    """Soft tokens before and behind each pack: input embeddings (KV Packet, arXiv 2604.13226, section 3).

    `header` and `trailer` are `(soft tokens, hidden)` in float32 on the CPU. They belong to the model of `fingerprint`,
    in whatever numerics. `training` is for people: settings, steps, and what was measured. Raises `WrapperError` for
    tensors of another form.
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
        """Digest of the soft tokens and the model they are for."""
        digest = blake2b(self.fingerprint.identity.encode(), digest_size=16)
        for tensor in (self.header, self.trailer):
            digest.update(f"{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapper) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `WrapperMismatchError`, naming each differing field, unless it was trained for that model."""
        differences = self.fingerprint.diff(fingerprint)
        identity = {name: each for name, each in differences.items() if name not in NUMERICS}
        if identity:
            advice = "Train one with `kp packet train`, or use another composer."
            raise WrapperMismatchError(f"The wrapper {self.id[:8]}", identity, "wrapper", advice)


def save_wrapper(wrapper: Wrapper, path: str | Path) -> Path:
    """Write `wrapper` to `path`, replacing what is there; the file is there whole or not at all."""
    return write_signed(path, _ENVELOPE, *_content(wrapper))


def wrapper_bytes(wrapper: Wrapper) -> bytes:
    """`wrapper` as its file has it."""
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
    """The wrapper in `path`, its digest checked; nothing is unpickled.

    Whether it fits a model is checked where it is used. Raises `WrapperError` for a file that is absent, damaged or of
    another kind.
    """
    found = read_signed(path, _ENVELOPE)
    try:
        return _wrapper(*found)
    except (PackCorruptError, LookupError) as error:
        raise WrapperError(f"{path} describes no wrapper: {error}. Train it anew, or load another copy.") from error


def write_signed(
    path: str | Path, envelope: Envelope, content: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """`envelope.save`; raises `WrapperError` where the medium refuses; what was there is then as it was."""
    try:
        return envelope.save(path, content, tensors)
    except OSError as error:
        raise WrapperError(
            f"{Path(path).absolute()} could not be written ({error.strerror or error}); what was there before is "
            "untouched. Make room, or name another place."
        ) from error


def read_signed(path: str | Path, envelope: Envelope) -> tuple[Any, dict[str, Tensor]]:
    """What `write_signed` wrote; raises `WrapperError` for anything else."""
    try:
        return envelope.load(path)
    except FileNotFoundError as error:
        raise WrapperError(f"There is no {path}. `kp packet train` makes one.") from error
    except (PackError, ValueError, TypeError, AttributeError) as error:
        raise WrapperError(f"{path} cannot be used: {error} Train it anew, or load another copy.") from error
