"""`kp steer`: make steerings from pairs of texts, and show their files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from kp_cli.shared import JsonFlag, ModelOptions, did_you_mean, existing, spread, table_of, tell
from kp_core.errors import SteeringError
from kp_core.steering import (
    LayerRange,
    Method,
    Pair,
    Steering,
    load_steering,
    preset,
    preset_about,
    preset_names,
    save_steering,
)

__all__ = ["read_pairs", "steer"]

steer = typer.Typer(
    name="steer",
    no_args_is_help=True,
    help="Change how a model speaks, without a word in the prompt: make and look at steerings.",
)

_NO_FILE = "`kp steer make PAIRS -o FILE` makes one."
_File = Annotated[Path, typer.Argument(metavar="FILE", help="A steering, as `kp steer make` writes it.")]


@steer.command("list")
def list_presets(*, as_json: JsonFlag = False) -> None:
    """The presets that come with the package."""
    presets = [{"name": name, "about": preset_about(name), "pairs": len(preset(name))} for name in preset_names()]
    table = Table("preset", "towards, and away from", "pairs")
    for row in presets:
        table.add_row(str(row["name"]), str(row["about"]), str(row["pairs"]))
    next_step = "`kp steer make PRESET -o FILE` makes a steering of one."
    tell({"presets": presets}, Group(table, next_step), as_json=as_json)


@steer.command()
@spread
def make(  # noqa: PLR0913 - one parameter per option or group of options
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A preset, or a JSON file of pairs.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    *,
    method: Annotated[Method, typer.Option(help="Values in mean, or keys and values at the last token.")] = "mean",
    layers: Annotated[
        str | None, typer.Option(metavar="RANGE", help="0.33-0.67 of the depth, or 10-19. Default: the middle third.")
    ] = None,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Make a steering from pairs of texts: towards the first of each, away from the second.

    It fits the model and the dtype that it was made in.
    """
    contrast_pairs, chosen = read_pairs(pairs), _layers(layers)
    new_steering = model.load().make_steering(contrast_pairs, method=method, layers=chosen, progress=not as_json)
    of_model = model.model or model.engine or "the bundled SmolLM2-135M-Instruct"
    made = {**new_steering.provenance, "pairs": pairs, "of": of_model}
    new_steering = replace(new_steering, provenance=made)
    save_steering(new_steering, out)
    _show(
        out,
        new_steering,
        f"`kp ask COLLECTION QUESTION --steering {out}` answers with it.",
        as_json=as_json,
    )


@steer.command()
def show(file: _File, *, as_json: JsonFlag = False) -> None:
    """What a steering is made of, how strong it is, and what it was calibrated to."""
    _show(file, load_steering(existing(file, _NO_FILE)), as_json=as_json)


def read_pairs(name: str) -> Sequence[Pair]:
    """The pairs of a preset, or of a JSON file: `[["positive", "negative"], ...]`, alone or under `pairs`.

    Raises `SteeringError` for a name that is neither, and for a file of another form.
    """
    if name in preset_names():
        return preset(name)
    path = Path(name)
    if not name or not path.is_file():
        hint = did_you_mean(name, preset_names())
        raise SteeringError(
            f"Got the pairs {name!r}; expected a JSON file, or one of {', '.join(preset_names())}. {hint}".rstrip()
        )
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SteeringError(f"{path} is not JSON ({error}); expected a list of [positive, negative].") from error
    rows = parsed.get("pairs") if isinstance(parsed, dict) else parsed
    if not isinstance(rows, list):
        raise SteeringError(f"{path} holds no list of pairs; expected [[positive, negative], ...].")
    return [tuple(row) if isinstance(row, list) else row for row in rows]


def _layers(text: str | None) -> LayerRange | None:
    if text is None:
        return None
    start, dash, stop = text.partition("-")
    try:
        if "." in text:
            return float(start), float(stop)
        return range(int(start), int(stop if dash else start) + 1)
    except ValueError as error:
        raise typer.BadParameter(f"Got --layers {text}; expected 0.33-0.67 or 10-19.") from error


def _show(file: Path, steering: Steering, next_step: str = "", *, as_json: bool) -> None:
    alone, with_knowledge = (steering.default_alpha(with_knowledge=knows) for knows in (False, True))
    report: dict[str, Any] = {
        "file": str(file),
        "id": steering.id,
        "method": steering.method,
        "model": steering.fingerprint.id,
        "dtype": steering.fingerprint.dtype,
        "layers": list(steering.layers),
        "keys": bool(steering.keys),
        "strength": steering.strength if steering.scales and steering.values else None,
        # JSON has no infinity, so `None` says that no limit was found on this side.
        "coherent": steering.coherent and [bound if math.isfinite(bound) else None for bound in steering.coherent],
        "recommended": {
            "alone": alone,
            "with_knowledge": with_knowledge,
            "calibrated": steering.recommended is not None,
        },
        "made": dict(steering.provenance),
    }
    norms = {str(layer): norm for layer, norm in steering.norms.items()}
    shown = report | {"coherent": steering.coherent and "from {:g} to {:g}".format(*steering.coherent)}
    tell({**report, "norms": norms}, Group(table_of(shown), *filter(None, [next_step])), as_json=as_json)
