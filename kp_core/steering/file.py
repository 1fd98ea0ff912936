"""A steering as one safetensors file, as safe as a pack file: digested, fingerprinted, never half written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from kp_core.errors import PackCorruptError, SteeringError
from kp_core.packs.codec import digest
from kp_core.packs.content import from_json, mapping, string, to_json
from kp_core.packs.durable import replace_file
from kp_core.packs.file import digest_metadata, header_stop
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.steering.value import Steering

__all__ = ["load_steering", "save_steering", "steering_bytes", "steering_of"]

_FORMAT, _VERSION, _READABLE = "knowledge-pack-steering", "3", ("2", "3")  # Fingerprints alone differ.
_METADATA = {"format", "version", "digest", "steering"}
_LARGEST_FILE = 1 << 30  # A steering has some thousand numbers; a file of gigabytes is something else.


def save_steering(steering: Steering, path: str | Path) -> Path:
    """Write `steering` to `path`, replacing what is there; the file is there whole or not at all."""
    target = Path(path).absolute()
    replace_file(target, [steering_bytes(steering)])
    return target


def steering_bytes(steering: Steering) -> bytes:
    """The file that `save_steering` writes."""
    tensors = {f"layers.{layer}.value": delta for layer, delta in steering.values.items()}
    tensors |= {f"layers.{layer}.key": delta for layer, delta in steering.keys.items()}
    bounds = steering.coherent
    content = to_json(
        {
            # JSON knows no infinity.
            "coherent": None if bounds is None else [bound if math.isfinite(bound) else None for bound in bounds],
            "fingerprint": steering.fingerprint.to_dict(),
            "method": steering.method,
            "provenance": dict(steering.provenance),
            "recommended": None if steering.recommended is None else list(steering.recommended),
            "scales": {str(layer): scale for layer, scale in steering.scales.items()},
            "tensors": {name: digest(tensor) for name, tensor in tensors.items()},
        },
        sort_keys=True,
    )
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "digest": digest_metadata(_VERSION, content),
        "steering": content,
    }
    data: bytes = safetensors.torch.save(tensors, metadata)
    return data


def load_steering(path: str | Path) -> Steering:
    """The steering in `path`, every digest checked; nothing is unpickled, and the file is not mapped.

    Whether it fits a model is checked where it is applied. Raises `SteeringError` for a file that is damaged, of
    another kind or of another version, `FileNotFoundError` when there is none.
    """
    file = Path(path)
    if file.stat().st_size > _LARGEST_FILE:
        raise SteeringError(f"{file} has {file.stat().st_size} bytes; expected a steering of at most {_LARGEST_FILE}.")
    return steering_of(file.read_bytes(), str(file))


def steering_of(data: bytes, name: str = "What was sent") -> Steering:
    """The inverse of `steering_bytes`; raises `SteeringError`, which says `name`, for anything it would not write."""
    try:
        return _parse(data)
    except (PackCorruptError, SafetensorError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SteeringError(f"{name} is no intact steering: {error} Make it anew, or load another copy.") from error


def _parse(data: bytes) -> Steering:
    header = mapping(from_json(data[8 : header_stop(data, len(data))]), "header")
    metadata = mapping(header.get("__metadata__"), "__metadata__")
    if set(metadata) != _METADATA or metadata["format"] != _FORMAT:
        raise PackCorruptError(f"Got the metadata {sorted(metadata)}; expected {sorted(_METADATA)} of a {_FORMAT!r}.")
    version, text = string(metadata["version"], "version"), string(metadata["steering"], "steering")
    if version not in _READABLE:
        raise PackCorruptError(f"Got version {version!r}; this release reads the versions {', '.join(_READABLE)}.")
    if metadata["digest"] != digest_metadata(version, text):
        raise PackCorruptError("The metadata do not match their digest.")
    content = json.loads(text)
    tensors = safetensors.torch.load(data)
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
