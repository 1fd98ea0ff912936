"""`kp calibrate`: measure which composers answer as well as the text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kp_cli.shared import JsonFlag, ModelOptions, Place, PlaceOptions, existing, spread, tell
from kp_cli.sources.texts import read_json_lines
from kp_core.banks.store import FactStore
from kp_core.errors import FactError, OptionError
from kp_core.packs.store import PackStore
from kp_methods.calibration import (
    COMPOSERS,
    CalibrationQuestion,
    calibrate_composers,
    calibrations_of,
    enough_of,
)

__all__ = ["calibrate"]

_ROW = "expected an object with the string 'question', and where there are 'answer', 'kind' and the strings 'passages'"


@spread
def calibrate(  # noqa: PLR0913 - one parameter per option or group of options
    place: Place,
    questions: Annotated[
        Path, typer.Argument(metavar="JSONL", help="An object a line: question; optional answer, passages, kind.")
    ],
    *,
    k: Annotated[int, typer.Option("-k", min=2, help="How many facts, for a question without passages.")] = 5,
    composers: Annotated[str, typer.Option(help="What to measure, with spaces between.")] = " ".join(COMPOSERS),
    minutes: Annotated[float, typer.Option(min=0.1, help="Most minutes; twenty questions are asked at least.")] = 10,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it to a file, too.")] = None,
    read: PlaceOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure which composers answer as well as the text, and how much sooner; `--composer auto` chooses by it.

    Each question is answered from the text of its passages and by each composer. Without `passages`, the facts that
    the collection finds are taken; without `answer`, the model's own answer from the text is right. Questions of one
    `kind` are judged by themselves: a composer must do for all.
    """
    if out is not None:
        existing(out.parent)  # Before minutes are spent.
    with read.open(place, read_only=True) as facts:
        asked = enough_of(_questions(existing(questions), facts, k))
        store, session = PackStore(read.folder(place, facts)), model.load()
    calibration = calibrate_composers(
        session, asked, composers.split(), view=store.view("default"), minutes=minutes, progress=not as_json
    )
    chosen = {}
    for packs, tokens in calibration.sizes.items():
        composer, reason = calibrations_of(session.host).chosen(calibration, packs, tokens)
        chosen[packs] = f"{composer.key}, because {reason}"
    lines = [calibration.table(), *(f"auto, up to {packs} packs: {sentence}." for packs, sentence in chosen.items())]
    tell({**asdict(calibration), "auto": chosen}, "\n".join(lines), as_json=as_json)
    if out is not None:  # Last, so that the result is shown if this fails.
        out.write_text(calibration.to_json(), encoding="utf-8")


def _questions(path: Path, facts: FactStore, k: int) -> list[CalibrationQuestion]:
    parsed = []
    for place, row in read_json_lines(path, 0):
        if isinstance(row, FactError):
            raise OptionError(f"{path}, {place}: {row}; {_ROW}") from row
        values: dict[str, Any] = {"answer": "", "kind": "", **row}
        passages = values.get("passages")
        if passages is None and isinstance(values.get("question"), str):
            passages = [hit.fact.text for hit in facts.search(values["question"], k)]
        texts = [values.get("question"), values["answer"], values["kind"], *(passages or ())]
        if not all(isinstance(text, str) for text in texts) or isinstance(passages, str) or not values["question"]:
            raise OptionError(f"{path}, {place}: got {str(row)[:60]}; {_ROW}.")
        parsed.append(CalibrationQuestion(values["question"], tuple(passages or ()), values["answer"], values["kind"]))
    return parsed
