"""`kp steer`: make steerings from pairs of texts, and show their files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from kp_cli.options import JsonFlag, ModelOptions, did_you_mean, existing, spread
from kp_cli.output import table_of, tell
from kp_core.errors import OptionError
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

steer = typer.Typer(
    name="steer",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Change how a model speaks, without a word in the prompt: make and look at steerings.",
)


@steer.command("list")
def list_presets(*, as_json: JsonFlag = False) -> None:
    """The presets that come with the package."""
    presets, table = [], Table("preset", "towards, and away from", "pairs")
    for name in preset_names():
        presets.append({"name": name, "about": preset_about(name), "pairs": len(preset(name))})
        table.add_row(*map(str, presets[-1].values()))
    next_step = "`kp steer make PRESET -o FILE` makes a steering of one."
    tell({"presets": presets}, Group(table, next_step), as_json=as_json)


@steer.command()
@spread
def make(  # noqa: PLR0913 - one parameter per option or group of options
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A preset, or a JSON file of pairs.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", dir_okay=False, help="The file to write.")],
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
    steering = model.load().make_steering(contrast_pairs, method=method, layers=chosen, progress=not as_json)
    of_model = model.model or model.engine or "the bundled SmolLM2-135M-Instruct"
    steering = replace(steering, provenance={**steering.provenance, "pairs": pairs, "of": of_model})
    save_steering(steering, out)
    next_step = f"`kp ask COLLECTION QUESTION --steering {shlex.quote(str(out))}` answers with it."
    _show(out, steering, next_step, as_json=as_json)


@steer.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A steering, as `kp steer make` writes it.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """What a steering is made of, how strong it is, and what it was calibrated to."""
    existing(file, "`kp steer make PAIRS -o FILE` makes one.")
    _show(file, load_steering(file), as_json=as_json)


def read_pairs(name: str) -> Sequence[Pair]:
    """The pairs of a preset, or of a JSON file: `[["positive", "negative"], ...]`, alone or under `pairs`.

    Raises `OptionError` for a name that is neither, and for a file of another form.
    """
    if name in preset_names():
        return preset(name)
    path, expected = Path(name), "expected [[positive, negative], ...]."
    if not name or not path.is_file():
        hint = did_you_mean(name, preset_names())
        raise OptionError(
            f"Got the pairs {name!r}; expected a JSON file, or one of {', '.join(preset_names())}. {hint}".rstrip()
        )
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{path} is not JSON ({error}); {expected}") from error
    rows = rows.get("pairs") if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise OptionError(f"{path} holds no list of pairs; {expected}")
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
    bounds = steering.coherent
    report: dict[str, Any] = {
        "file": str(file),
        "id": steering.id,
        "method": steering.method,
        "model": steering.fingerprint.id,
        "dtype": steering.fingerprint.dtype,
        "layers": list(steering.layers),
        "keys": bool(steering.keys),
        "strength": steering.strength if steering.scales and steering.values else None,
        "coherent": bounds and "from {:g} to {:g}".format(*bounds),
        "recommended": {
            "alone": steering.default_alpha(with_knowledge=False),
            "with_knowledge": steering.default_alpha(with_knowledge=True),
            "calibrated": steering.recommended is not None,
        },
        "made": dict(steering.provenance),
    }
    shown = Group(table_of(report), *filter(None, [next_step]))
    # JSON has no infinity, so `None` says that no limit was found on this side.
    report["coherent"] = bounds and [bound if math.isfinite(bound) else None for bound in bounds]
    report["norms"] = {str(layer): norm for layer, norm in steering.norms.items()}
    tell(report, shown, as_json=as_json)
