"""Presets: contrastive pairs to make steerings from."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from kp_core.errors import OptionError


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    entries = (files("kp_core") / "presets").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def preset_about(name: str) -> str:
    """Short description of what a preset steers towards and away from; raises as `preset`."""
    return str(_read(name)["about"])


def preset(name: str) -> tuple[tuple[str, str], ...]:
    """The (positive, negative) pairs of a preset, for `engine.make_steering`; at least 24.

    The preset is named after the positive side. Raises `OptionError` for an unknown name.
    """
    return tuple((positive, negative) for positive, negative in _read(name)["pairs"])


def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise OptionError(f"Got the preset {name!r}; expected one of {', '.join(preset_names())}.")
    content: dict[str, Any] = json.loads((files("kp_core") / "presets" / f"{name}.json").read_text(encoding="utf-8"))
    return content
