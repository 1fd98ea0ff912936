"""A steering as one safetensors file, as safe as a pack file: digested, fingerprinted, never half written."""

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

_ENVELOPE = Envelope("knowledge-pack-steering", "steering", ("2", "3"))  # Fingerprints alone differ.


def save_steering(steering: Steering, path: str | Path) -> Path:
    """Write `steering` to `path`, replacing what is there; the file is there whole or not at all."""
    return _ENVELOPE.save(path, *_content(steering))


def steering_bytes(steering: Steering) -> bytes:
    """The file that `save_steering` writes."""
    return _ENVELOPE.write(*_content(steering))


def _content(steering: Steering) -> tuple[dict[str, object], dict[str, Tensor]]:
    tensors = {f"layers.{layer}.value": delta for layer, delta in steering.values.items()}
    tensors |= {f"layers.{layer}.key": delta for layer, delta in steering.keys.items()}
    bounds = steering.coherent
    content: dict[str, object] = {
        # JSON knows no infinity.
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
    """The steering in `path`, every digest checked; nothing is unpickled, and the file is not mapped.

    Whether it fits a model is checked where it is applied. Raises `SteeringError` for a file that is damaged, of
    another kind or of another version, `FileNotFoundError` when there is none.
    """
    with _refused(str(path)):
        return _steering(*_ENVELOPE.load(path))


def steering_of(data: bytes, name: str = "What was sent") -> Steering:
    """The inverse of `steering_bytes`; raises `SteeringError`, which says `name`, for anything it would not write."""
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
        {name: str(about) for name, about in content["provenance"].items()},
    )


def _pair(numbers: list[float | None] | None) -> tuple[float, float] | None:
    if numbers is None:
        return None
    low, high = numbers
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)
