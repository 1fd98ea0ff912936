"""Contrastive pairs that come with the package, written for it."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from kp_core.errors import SteeringError

__all__ = ["preset", "preset_about", "preset_names"]


@cache
def preset_names() -> tuple[str, ...]:
    """The presets there are, sorted."""
    found = (files("kp_core") / "presets").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in found if entry.name.endswith(".json")))


def preset_about(name: str) -> str:
    """What a preset steers towards, and away from, in a few words; raises as `preset`."""
    return str(_read(name)["about"])


def preset(name: str) -> tuple[tuple[str, str], ...]:
    """The (positive, negative) pairs of a preset, for `engine.make_steering`; at least 24.

    The first side is what the preset is named after. Raises `SteeringError` for a name that does not exist.
    """
    return tuple((positive, negative) for positive, negative in _read(name)["pairs"])


def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise SteeringError(f"Got the preset {name!r}; expected one of {', '.join(preset_names())}.")
    found: dict[str, Any] = json.loads((files("kp_core") / "presets" / f"{name}.json").read_text(encoding="utf-8"))
    return found
