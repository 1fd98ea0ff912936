"""`kp calibrate`, `kp packet`: measure composers, and train the soft tokens of one of them."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kp_cli.options import JsonFlag, ModelOptions, Place, PlaceOptions, existing, is_collection, spread
from kp_cli.output import tell
from kp_cli.sources import read_facts
from kp_cli.sources.texts import read_json_lines
from kp_core import FactStore, PackStore
from kp_core.errors import FactError, OptionError
from kp_methods import PacketComposer
from kp_methods.calibration import COMPOSERS, CalibrationQuestion, calibrate_composers, calibrations_of, enough_of
from kp_methods.packet.composer import SHIPPED
from kp_methods.packet.training import PacketTraining, checkpoint_of, train_wrapper, wrapper_scores

packet = typer.Typer(
    name="packet",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Soft tokens around packs (KV Packet), so that documents compose without computing: train and measure them.",
)

_Documents = Annotated[str, typer.Argument(metavar="DOCUMENTS", help="A collection, or a file or folder.")]
_ROW = "expected an object with the string 'question', and where there are 'answer', 'kind' and the strings 'passages'"


@spread
def calibrate(  # noqa: PLR0913 - one parameter per option or group of options
    place: Place,
    questions: Annotated[
        Path, typer.Argument(metavar="JSONL", help="An object a line: question; optional answer, passages, kind.")
    ],
    *,
    k: Annotated[int, typer.Option("-k", "--k", min=2, help="How many facts, for a question without passages.")] = 5,
    composers: Annotated[str, typer.Option(help="What to measure, with spaces between.")] = " ".join(COMPOSERS),
    minutes: Annotated[float, typer.Option(min=0.1, help="Most minutes; twenty questions are asked at least.")] = 10,
    read: PlaceOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure which composers answer as well as the text, and how much sooner; `--composer auto` chooses by it.

    Each question is answered from the text of its passages and by each composer. Without `passages`, the facts that
    the collection finds are taken; without `answer`, the model's own answer from the text is right. Questions of one
    `kind` are judged by themselves: a composer must do for all.
    """
    with read.open(place, read_only=True) as facts:
        asked = enough_of(_questions(existing(questions), facts, k))  # Before a model is loaded.
        store, session = PackStore(read.noted_folder(place, facts)), model.load()
    calibration = calibrate_composers(
        session, asked, composers.split(), view=store.view("default"), minutes=minutes, progress=not as_json
    )
    chosen = {}
    for packs, tokens in calibration.sizes.items():
        composer, reason = calibrations_of(session.host).chosen(calibration, packs, tokens)
        chosen[packs] = f"{composer.key}, because {reason}"
    lines = [calibration.table(), *(f"auto, up to {packs} packs: {sentence}." for packs, sentence in chosen.items())]
    tell({**asdict(calibration), "auto": chosen}, "\n".join(lines), as_json=as_json)


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


@packet.command()
@spread
def train(  # noqa: PLR0913 - one parameter per setting
    place: _Documents,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", dir_okay=False, help="The wrapper to write.")],
    *,
    soft: Annotated[int, typer.Option(help="Soft tokens before each pack, and behind.")] = 8,
    steps: Annotated[int, typer.Option(help="Most steps.")] = 1000,
    batch: Annotated[int, typer.Option(help="Samples of one step.")] = 2,
    documents: Annotated[tuple[int, int], typer.Option(metavar="FROM TO", help="Documents of one sample.")] = (1, 10),
    tokens: Annotated[tuple[int, int], typer.Option(help="Their length; longer ones are cut.")] = (128, 1024),
    every: Annotated[int, typer.Option(help="Steps between two looks at held-out documents.")] = 50,
    minutes: Annotated[float | None, typer.Option(help="Stop then, with the best so far. Default: no limit.")] = None,
    read: PlaceOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Train a wrapper on documents; the same command goes on where it was interrupted.

    It ends after --steps, when held-out documents show no progress any more, or after --minutes.
    """
    settings = PacketTraining(soft, steps, batch, documents=documents, tokens=tokens, every=every)
    command_line = shlex.join(["kp", *(part for part in sys.argv[1:] if part != "--json")])
    texts, session = _read(place, read), model.load()
    wrapper = train_wrapper(session, texts, out, settings, minutes=minutes, about=command_line, progress=not as_json)
    report = {"file": str(out), "id": wrapper.id, "bytes": out.stat().st_size, **wrapper.training}
    message = (
        f"{out}: {report['steps']} steps in {report['minutes']} minutes. On held-out documents the answers are "
        f"{report['best']['held_kl']:.4f} nats from full attention (best at step {report['best']['step']}); without "
        f"soft tokens {report['without_soft_tokens_kl']:.4f}."
    )
    if checkpoint_of(out).exists():
        message += f" {checkpoint_of(out)} stays: the same command goes on."
    tell(report, message, as_json=as_json)


@packet.command("eval")
@spread
def evaluate(  # noqa: PLR0913 - one parameter per option
    place: _Documents,
    *,
    wrapper: Annotated[Path, typer.Option(metavar="FILE", help="Default: that of the bundled model.")] = SHIPPED,
    documents: Annotated[list[int] | None, typer.Option(min=1, help="How many; may be repeated. [5, 10]")] = None,
    tokens: Annotated[tuple[int, int] | None, typer.Option(help="Their length. Default: as trained.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Questions for each number of documents.")] = 10,
    read: PlaceOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure how far answers over packets are from those over the full text (KL of the answer's tokens, in nats).

    Beside it: packets without soft tokens, which is what `splice` does. Of the documents that the wrapper was trained
    on, those are taken that were held out.
    """
    trained = PacketComposer.load(wrapper)
    texts, session = _read(place, read), model.load()
    trained.check(session.fingerprint)
    rows = wrapper_scores(session, trained, texts, documents or [5, 10], limit, tokens=tokens)
    table = Table("documents", "packet", "without soft tokens", "packet is nearer")
    for row in rows:
        share = f"{row['nearer']} of {limit}"
        table.add_row(str(row["documents"]), f"{row['kl']:.4f}", f"{row['without_soft_tokens_kl']:.4f}", share)
    tell({"wrapper": trained.id, "questions": limit, "rows": rows}, table, as_json=as_json)


def _read(place: str, options: PlaceOptions) -> list[tuple[str, str]]:
    """Titles and texts of a collection or of files."""
    if is_collection(place):
        with options.open(place, read_only=True) as facts:
            return [(fact.title, fact.text) for fact in facts.facts()]
    return [(fact.title, fact.text) for fact in read_facts([existing(Path(place))])]
