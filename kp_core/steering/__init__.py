"""Steering: changes how a model speaks by adding to cached values, without extra tokens or forward passes."""

from kp_core.steering.calibrate import Calibration, CalibrationRow, Task, calibrate, likeness, repetition
from kp_core.steering.presets import preset, preset_about, preset_names
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
    "Calibration",
    "CalibrationRow",
    "LayerRange",
    "Method",
    "Pair",
    "Scope",
    "Steering",
    "SteeringWarning",
    "Task",
    "as_steering",
    "calibrate",
    "likeness",
    "load_steering",
    "preset",
    "preset_about",
    "preset_names",
    "repetition",
    "resolve_layers",
    "save_steering",
    "steering_bytes",
    "steering_of",
]
