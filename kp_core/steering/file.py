"""A steering as one safetensors file, as safe as a pack file: digested, fingerprinted, never half written."""

from __future__ import annotations

import math
from hashlib import blake2b
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from kp_core.errors import PackCorruptError, SteeringError
from kp_core.packs.content import from_json, mapping, string, to_json
from kp_core.packs.durable import make_dirs, publish, stage
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.steering.value import Steering

__all__ = ["load_steering", "save_steering"]

_FORMAT, _VERSION = "knowledge-pack-steering", "2"
_METADATA = {"format", "version", "digest", "steering"}
_FIELDS = {"coherent", "fingerprint", "method", "provenance", "recommended", "scales", "tensors"}
_LARGEST_FILE = 1 << 30  # A steering has some thousand numbers; a file of gigabytes is something else.


def save_steering(steering: Steering, path: str | Path) -> Path:
    """Write `steering` to `path`, replacing what is there; the file is there whole or not at all."""
    target = Path(path).absolute()
    tensors = _named(steering)
    content = to_json(
        {
            "coherent": None if steering.coherent is None else [_finite(bound) for bound in steering.coherent],
            "fingerprint": steering.fingerprint.to_dict(),
            "method": steering.method,
            "provenance": dict(steering.provenance),
            "recommended": None if steering.recommended is None else list(steering.recommended),
            "scales": {str(layer): scale for layer, scale in steering.scales.items()},
            "tensors": {name: _digest(tensor) for name, tensor in tensors.items()},
        },
        sort_keys=True,
    )
    metadata = {"format": _FORMAT, "version": _VERSION, "digest": _digest_text(_VERSION, content), "steering": content}
    make_dirs(target.parent)
    staged = stage(target.parent, [safetensors.torch.save(tensors, metadata)])
    try:
        publish(staged, target)
    finally:
        staged.unlink(missing_ok=True)
    return target


def load_steering(path: str | Path) -> Steering:
    """The steering in `path`, every digest checked; nothing is unpickled, and the file is not mapped.

    Whether it fits a model is checked where it is applied. Raises `SteeringError` for a file that is damaged, of
    another kind or of another version, `FileNotFoundError` when there is none.
    """
    file = Path(path)
    if file.stat().st_size > _LARGEST_FILE:
        raise SteeringError(f"{file} has {file.stat().st_size} bytes; expected a steering of at most {_LARGEST_FILE}.")
    try:
        return _parse(file.read_bytes())
    except (PackCorruptError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SteeringError(f"{file} is no intact steering: {error} Make it anew, or load another copy.") from error


def _parse(data: bytes) -> Steering:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise PackCorruptError(f"The file of {len(data)} bytes claims a header of {length}.")
    header = mapping(from_json(data[8 : 8 + length]), "header")
    metadata = mapping(header.get("__metadata__"), "__metadata__")
    if set(metadata) != _METADATA or metadata["format"] != _FORMAT:
        raise PackCorruptError(f"Got the metadata {sorted(metadata)}; expected {sorted(_METADATA)} of a {_FORMAT!r}.")
    version, text = metadata["version"], string(metadata["steering"], "steering")
    if version not in ("1", _VERSION):  # Fingerprints alone differ.
        raise PackCorruptError(f"Got version {version!r}; this release reads versions up to {_VERSION!r}.")
    if metadata["digest"] != _digest_text(version, text):
        raise PackCorruptError("The metadata do not match their digest.")
    content = mapping(from_json(text.encode()), "steering")
    if set(content) != _FIELDS:
        raise PackCorruptError(f"Got the fields {sorted(content)}; expected {sorted(_FIELDS)}.")
    tensors, digests = safetensors.torch.load(data), mapping(content["tensors"], "tensors")
    if {name: _digest(tensor) for name, tensor in tensors.items()} != digests:
        raise PackCorruptError("The tensors do not match their digests.")
    deltas: dict[str, dict[int, Tensor]] = {"value": {}, "key": {}}
    for name, tensor in tensors.items():
        _, layer, kind = name.split(".")
        deltas[kind][int(layer)] = tensor
    return Steering(
        deltas["value"],
        ModelFingerprint.from_dict(mapping(content["fingerprint"], "fingerprint")),
        string(content["method"], "method"),  # type: ignore[arg-type]  # checked by the constructor
        deltas["key"],
        {int(layer): _number(scale) for layer, scale in mapping(content["scales"], "scales").items()},
        _bounds(content["coherent"]),
        _pair(content["recommended"], "recommended"),
        {name: string(about, name) for name, about in mapping(content["provenance"], "provenance").items()},
    )


def _named(steering: Steering) -> dict[str, Tensor]:
    values = {f"layers.{layer}.value": delta for layer, delta in steering.values.items()}
    return values | {f"layers.{layer}.key": delta for layer, delta in steering.keys.items()}


def _finite(bound: float) -> float | None:
    """JSON knows no infinity."""
    return bound if math.isfinite(bound) else None


def _bounds(value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    low, high = _two(value, "coherent")
    return -math.inf if low is None else _number(low), math.inf if high is None else _number(high)


def _pair(value: object, name: str) -> tuple[float, float] | None:
    if value is None:
        return None
    first, second = _two(value, name)
    return _number(first), _number(second)


def _two(value: object, name: str) -> list[object]:
    if not isinstance(value, list) or len(value) != 2:
        raise PackCorruptError(f"Got {value!r} under {name!r}; expected two numbers.")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PackCorruptError(f"Got {value!r}; expected a number.")
    return float(value)


def _digest(tensor: Tensor) -> str:
    return blake2b(tensor.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def _digest_text(version: str, text: str) -> str:
    return blake2b(f"{version}\n{text}".encode(), digest_size=16).hexdigest()
