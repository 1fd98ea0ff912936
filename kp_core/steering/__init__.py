"""Steering: change how a model speaks by adding to cached values, at no token and no forward pass."""

from kp_core.steering.calibrate import Calibrated, Calibration, CalibrationRow, Task, calibrate, repetition
from kp_core.steering.file import load_steering, save_steering
from kp_core.steering.pairs import likeness, preset, preset_about, preset_names
from kp_core.steering.plan import (
    AskedSteering,
    Block,
    LayerRange,
    Part,
    Scope,
    as_steering,
    plan_blocks,
    resolve_layers,
)
from kp_core.steering.value import Method, Pair, Side, Steering, SteeringWarning

__all__ = [
    "AskedSteering",
    "Block",
    "Calibrated",
    "Calibration",
    "CalibrationRow",
    "LayerRange",
    "Method",
    "Pair",
    "Part",
    "Scope",
    "Side",
    "Steering",
    "SteeringWarning",
    "Task",
    "as_steering",
    "calibrate",
    "likeness",
    "load_steering",
    "plan_blocks",
    "preset",
    "preset_about",
    "preset_names",
    "repetition",
    "resolve_layers",
    "save_steering",
]
