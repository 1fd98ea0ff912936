"""Steering: changes how a model speaks by adding to cached values, without extra tokens or forward passes."""

from typing import NoReturn

from kp_core.errors import no_attribute
from kp_core.steering.contrast import preset, preset_about, preset_names
from kp_core.steering.value import (
    AskedSteering,
    LayerRange,
    Method,
    Pair,
    Scope,
    Steering,
    SteeringWarning,
    as_steering,
    load_steering,
    resolve_layers,
    save_steering,
    steering_bytes,
    steering_of,
)

__all__ = [
    "AskedSteering",
    "LayerRange",
    "Method",
    "Pair",
    "Scope",
    "Steering",
    "SteeringWarning",
    "as_steering",
    "load_steering",
    "preset",
    "preset_about",
    "preset_names",
    "resolve_layers",
    "save_steering",
    "steering_bytes",
    "steering_of",
]

_GONE = ("Calibration", "CalibrationRow", "Task", "calibrate", "likeness", "repetition")


def __getattr__(name: str) -> NoReturn:
    no_attribute(__name__, name, "use `benchmarks.steering_range` of the repository" if name in _GONE else "")
