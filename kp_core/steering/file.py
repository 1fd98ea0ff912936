"""Stores a steering as one safetensors file, as safe as a pack file: digested, fingerprinted, written atomically."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from kp_core.errors import PackCorruptError, PackError, SteeringError
from kp_core.packs.codec import digest
from kp_core.packs.envelope import Envelope
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.steering.value import Steering

__all__ = ["load_steering", "save_steering", "steering_bytes", "steering_of"]

_ENVELOPE = Envelope("knowledge-pack-steering", "steering", ("2", "3"))  # The versions differ in the fingerprint only.


def save_steering(steering: Steering, path: str | Path) -> Path:
    """Write `steering` to `path` atomically, replacing an existing file."""
    return _ENVELOPE.save(path, *_content(steering))


def steering_bytes(steering: Steering) -> bytes:
    """The bytes of the file that `save_steering` writes."""
    return _ENVELOPE.write(*_content(steering))


def _content(steering: Steering) -> tuple[dict[str, object], dict[str, Tensor]]:
    tensors = {f"layers.{layer}.value": delta for layer, delta in steering.values.items()}
    tensors |= {f"layers.{layer}.key": delta for layer, delta in steering.keys.items()}
    bounds = steering.coherent
    content: dict[str, object] = {
        # JSON has no infinity.
        "coherent": None if bounds is None else [bound if math.isfinite(bound) else None for bound in bounds],
        "fingerprint": steering.fingerprint.to_dict(),
        "method": steering.method,
        "provenance": dict(steering.provenance),
        "recommended": None if steering.recommended is None else list(steering.recommended),
        "scales": {str(layer): scale for layer, scale in steering.scales.items()},
        "tensors": {name: digest(tensor) for name, tensor in tensors.items()},
    }
    return content, tensors


def load_steering(path: str | Path) -> Steering:
    """Load the steering in `path` and check every digest; nothing is unpickled, and the file is not memory-mapped.

    `Steering.check` tests at use whether it fits a model. Raises `SteeringError` for a file that is damaged, of another
    kind or of another version, `FileNotFoundError` if there is none.
    """
    with _refused(str(path)):
        return _steering(*_ENVELOPE.load(path))


def steering_of(data: bytes, name: str = "What was sent") -> Steering:
    """The inverse of `steering_bytes`; raises `SteeringError`, which contains `name`, for any other bytes."""
    with _refused(name):
        return _steering(*_ENVELOPE.read(data))


@contextmanager
def _refused(name: str) -> Iterator[None]:
    try:
        yield
    except (PackError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SteeringError(f"{name} is no intact steering: {error} Make it anew, or load another copy.") from error


def _steering(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Steering:
    if {name: digest(tensor) for name, tensor in tensors.items()} != content["tensors"]:
        raise PackCorruptError("The tensors do not match their digests.")
    deltas: dict[str, dict[int, Tensor]] = {"value": {}, "key": {}}
    for name, tensor in tensors.items():
        _, layer, kind = name.split(".")
        deltas[kind][int(layer)] = tensor
    return Steering(
        deltas["value"],
        ModelFingerprint.from_dict(content["fingerprint"]),
        content["method"],
        deltas["key"],
        {int(layer): float(scale) for layer, scale in content["scales"].items()},
        _pair(content["coherent"]),
        _pair(content["recommended"]),
        {name: str(value) for name, value in content["provenance"].items()},
    )


def _pair(numbers: list[float | None] | None) -> tuple[float, float] | None:
    if numbers is None:
        return None
    low, high = numbers
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)
