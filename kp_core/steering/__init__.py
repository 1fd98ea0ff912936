"""Steering: changes how a model speaks by adding to cached values, without extra tokens or forward passes."""

from kp_core.steering.calibrate import Calibrated, Calibration, CalibrationRow, Task, calibrate, repetition
from kp_core.steering.file import load_steering, save_steering
from kp_core.steering.pairs import likeness, preset, preset_about, preset_names
from kp_core.steering.value import (
    AskedSteering,
    LayerRange,
    Method,
    Pair,
    Scope,
    Side,
    Steering,
    SteeringWarning,
    as_steering,
    resolve_layers,
)

__all__ = [
    "AskedSteering",
    "Calibrated",
    "Calibration",
    "CalibrationRow",
    "LayerRange",
    "Method",
    "Pair",
    "Scope",
    "Side",
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
]
