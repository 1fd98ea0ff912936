"""`kp steer`: make steerings from pairs of texts, measure how strong they may be, and show their files."""

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
from kp_cli.sources.texts import read_json_lines
from kp_core import SentenceTransformerEmbedder
from kp_core.errors import SourceError, SteeringError
from kp_core.steering import (
    LayerRange,
    Method,
    Pair,
    Steering,
    Task,
    calibrate,
    likeness,
    load_steering,
    preset,
    preset_about,
    preset_names,
    save_steering,
)

__all__ = ["steer"]

_QUESTIONS = (
    "What is the sun?",
    "Why do people sleep?",
    "How do I learn to swim?",
    "What should I eat for breakfast?",
    "Tell me about dogs.",
    "Why is the sea salty?",
    "How can I save money?",
    "What makes a good friend?",
)
_ROW = 'expected {"question": "...", "facts": "...", "expected": "..."}, of which only the first is needed.'

steer = typer.Typer(
    name="steer",
    no_args_is_help=True,
    help="Change how a model speaks, without a word in the prompt: make, measure and look at steerings.",
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
        f"`kp ask COLLECTION QUESTION --steering {out}` answers with it; `kp steer calibrate {out}` finds its limits.",
        as_json=as_json,
    )


@steer.command("calibrate")
@spread
def measure(  # noqa: PLR0913 - one parameter per option or group of options
    file: _File,
    *,
    pairs: Annotated[
        str | None, typer.Option(metavar="PAIRS", help="Score answers by these pairs. Default: those it was made from.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(metavar="JSONL", help="Questions, with facts and expected answers where there are.")
    ] = None,
    alphas: Annotated[
        str, typer.Option(help="Strengths to try, with commas between.")
    ] = "-2,-1,-0.5,0.5,0.7,1,1.5,2,3",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    plot: Annotated[Path | None, typer.Option(metavar="PICTURE", help="Draw the sweep: .png or .svg.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write. Default: FILE.")] = None,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Find the strengths that a model takes, and save them with the steering as its defaults.

    The effect is how like the answers are to the first sides of the pairs (1) or to the second (-1), by embedding.
    """
    steering = load_steering(existing(file, _NO_FILE))
    contrast_pairs, strengths = read_pairs(pairs or steering.provenance.get("pairs", "")), _numbers(alphas)
    rows = [{"question": question} for question in _QUESTIONS] if questions is None else _rows(questions)
    engine = model.load()
    steering.check(engine.fingerprint)
    tasks = [
        Task(
            row["question"],
            [engine.build_pack(row["facts"], compiled_for="system")] if "facts" in row else (),
            row.get("expected"),
        )
        for row in rows
    ]
    calibration = calibrate(
        *(engine, steering, tasks, likeness(contrast_pairs, SentenceTransformerEmbedder())),
        alphas=strengths,
        max_tokens=max_tokens,
        progress=not as_json,
    )
    save_steering(calibration.steering, out or file)
    if plot is not None:
        calibration.plot(plot)
    saved = str(out or file)
    tell({"file": saved, **calibration.to_dict()}, f"{calibration.table()}\nSaved in {saved}.", as_json=as_json)


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


def _rows(path: Path) -> list[dict[str, str]]:
    rows = []
    for place, row in read_json_lines(existing(path), 0):
        if isinstance(row, SourceError):
            raise SteeringError(f"{row}; {_ROW}") from row
        rows.append({name: value for name, value in row.items() if isinstance(value, str)})
        if "question" not in row or len(rows[-1]) < len(row):
            raise SteeringError(f"{path}, {place}: got {str(row)[:60]}; {_ROW}")
    if not rows:
        raise SteeringError(f"{path} holds no questions; {_ROW}")
    return rows


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


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)):
        raise typer.BadParameter(f"Got --alphas {text}; expected finite numbers with commas between.")
    return numbers


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
