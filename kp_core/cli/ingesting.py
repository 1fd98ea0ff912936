"""Reading knowledge into a bank: what `kp build` and `kp add` share."""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kp_core.cli.shared import console, counted, print_json
from kp_core.errors import SourceError
from kp_core.facts import Added, ChromaFactBank, Fact
from kp_core.facts.sources import OnError, read_dataset, read_facts

__all__ = [
    "Column",
    "Config",
    "DatasetName",
    "MaxChars",
    "Namespace",
    "OnErrorOption",
    "Split",
    "Ttl",
    "facts_of",
    "ingest",
    "tell",
]

_BATCH = 256
_SHOWN = 5

DatasetName = Annotated[
    str | None, typer.Option("--dataset", metavar="NAME", help="A Hugging Face dataset too, by name or folder.")
]
Config = Annotated[str | None, typer.Option("--config", metavar="NAME", help="Configuration of --dataset.")]
Split = Annotated[str | None, typer.Option("--split", metavar="NAME", help="Split of --dataset; default: train.")]
Column = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="COLUMN=FIELD", help="A column of --dataset to read, e.g. `context=text`. Default: all."
    ),
]
Namespace = Annotated[str | None, typer.Option(help="Namespace of the facts.")]
OnErrorOption = Annotated[str, typer.Option(help="What to do with rows that make no fact: `raise` or `skip`.")]
Ttl = Annotated[float | None, typer.Option(metavar="SECONDS", help="Facts expire after this time.")]
MaxChars = Annotated[int, typer.Option(help="Longest paragraph of text, Markdown, PDF and HTML, in characters.")]


def facts_of(  # noqa: PLR0913 - what the two commands ask for
    sources: Sequence[Path],
    skipped: list[SourceError],
    *,
    dataset: str | None,
    config: str | None,
    split: str | None,
    columns: Sequence[str] | None,
    on_error: str,
    max_chars: int,
    namespace: str | None,
) -> Iterator[Fact]:
    """The facts in files, then those of a dataset; rows passed over go to `skipped`.

    What is not there is said at once, before anything is read or written.
    """
    checked = _checked(on_error)
    _check_sources(sources)
    facts = read_facts(sources, on_error=checked, skipped=skipped.append, max_chars=max_chars, namespace=namespace)
    if dataset is None:
        if config or split or columns:
            raise typer.BadParameter("--config, --split and --column go with --dataset.")
        return facts
    rows = read_dataset(
        *(dataset, config),
        split=split or "train",
        columns=_mapping(columns) if columns else None,
        on_error=checked,
        skipped=skipped.append,
        namespace=namespace,
    )
    return itertools.chain(facts, rows)


def ingest(bank: ChromaFactBank, facts: Iterable[Fact], sources: Iterable[Path], ttl: float | None) -> Added:
    """Add facts in batches, with a bar that knows how many bytes of the files have become facts."""
    size = sum(path.stat().st_size for source in sources for path in _inside(source))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[facts]:,} facts, {task.fields[rate]:.0f}/s"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    report, source = Added(), iter(facts)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("Adding", total=size or None, facts=0, rate=0.0)
        seen = 0
        while batch := list(itertools.islice(source, _BATCH)):
            report += bank.add(batch, ttl=ttl)
            seen += len(batch)
            elapsed = progress.tasks[task].elapsed or 1.0
            progress.update(
                task, advance=sum(len(fact.text.encode()) for fact in batch), facts=seen, rate=seen / elapsed
            )
    return report


def tell(bank: ChromaFactBank, report: Added, skipped: list[SourceError], *, as_json: bool) -> None:
    """Say what became of the facts, and what the bank is now."""
    about = bank.calibration
    if as_json:
        print_json(
            {
                "added": report.added,
                "duplicates": report.duplicates,
                "near_duplicates": [asdict(near) for near in report.near_duplicates],
                "skipped": [str(error) for error in skipped],
                "facts": len(bank),
                "banks": bank.banks,
                "calibration": asdict(about) if about else None,
            }
        )
        return
    out = console()
    out.print(f"Facts added: {report.added}; held already: {report.duplicates}; rows skipped: {len(skipped)}.")
    if report.near_duplicates:
        out.print(f"{len(report.near_duplicates)} say nearly what another does:")
        for near in report.near_duplicates[:_SHOWN]:
            out.print(f"  {near.id} ≈ {near.earlier} ({near.score:.3f})")
        if len(report.near_duplicates) > _SHOWN:
            out.print("  … all of them with --json")
    out.print(f"Now {counted(len(bank), 'fact')} in {counted(bank.banks, 'bank')}.")
    if about:
        out.print(
            f"A search looks at {counted(about.probes_of(bank.banks), 'bank')} and finds {about.recall:.1%} "
            f"of the {about.k} nearest (asked for: {about.target:.1%})."
        )


def _checked(on_error: str) -> OnError:
    if on_error == "raise":
        return "raise"
    if on_error == "skip":
        return "skip"
    raise typer.BadParameter(f"Got --on-error {on_error}; expected raise or skip.")


def _check_sources(sources: Iterable[Path]) -> None:
    """Say that a file is missing before anything is loaded."""
    for source in sources:
        if not source.exists():
            around = [str(path) for path in source.parent.iterdir()] if source.parent.is_dir() else []
            near = difflib.get_close_matches(str(source), around, n=1)
            raise SourceError(f"There is no file {source}." + (f" Did you mean {near[0]}?" if near else ""))


def _inside(source: Path) -> list[Path]:
    return [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]


def _mapping(columns: Iterable[str]) -> dict[str, str]:
    parts = [column.partition("=") for column in columns]
    for column, (name, _, role) in zip(columns, parts, strict=True):
        if not name or not role:
            raise typer.BadParameter(f"Got --column {column}; expected COLUMN=FIELD, e.g. context=text.")
    return {name: role for name, _, role in parts}
