"""Reading knowledge into a collection: what `kp build` and `kp add` share."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from kp_core.cli.shared import checked_namespace, console, counted, did_you_mean, print_json
from kp_core.errors import SourceError
from kp_core.facts import Added, ChromaFactBank, Fact
from kp_core.facts.sources import OnError, read_dataset, read_facts

__all__ = ["SourceOptions", "ingest", "tell"]

_BATCH = 256
_SHOWN = 5


@dataclass(frozen=True)
class SourceOptions:
    """A dataset beside files, and how facts are read."""

    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="A Hugging Face dataset too.")] = None
    config: Annotated[str | None, typer.Option(metavar="NAME", help="Configuration of --dataset.")] = None
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Split of --dataset; default: train.")] = None
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=FIELD", help="A column of --dataset to read, e.g. `context=text`. Default: all."),
    ] = None
    namespace: Annotated[str | None, typer.Option(help="Namespace of the facts.", callback=checked_namespace)] = None
    ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="Facts expire after this time.")] = None
    on_error: Annotated[OnError, typer.Option(help="What to do with rows that make no fact.")] = "raise"
    max_chars: Annotated[
        int, typer.Option(help="Longest paragraph of text, Markdown, PDF and HTML, in characters.")
    ] = 2000

    def facts(self, files: Sequence[Path], skipped: list[SourceError]) -> Iterator[Fact]:
        """The facts in `files`, then those of the dataset; rows passed over go to `skipped`.

        What is not there is said at once, before anything is read or written.
        """
        _check_files(files)
        facts = read_facts(
            files,
            on_error=self.on_error,
            skipped=skipped.append,
            max_chars=self.max_chars,
            namespace=self.namespace,
        )
        if self.dataset is None:
            if self.config or self.split or self.column:
                raise typer.BadParameter("--config, --split and --column go with --dataset.")
            return facts
        columns = _mapping(self.column) if self.column else None
        rows = read_dataset(
            *(self.dataset, self.config),
            split=self.split or "train",
            columns=columns,
            on_error=self.on_error,
            skipped=skipped.append,
            namespace=self.namespace,
        )
        return itertools.chain(facts, rows)


def ingest(collection: ChromaFactBank, facts: Iterable[Fact], files: Iterable[Path], ttl: float | None) -> Added:
    """Add facts in batches, with a bar that knows how many bytes of the files have become facts."""
    size = sum(path.stat().st_size for each in files for path in (each, *each.rglob("*")) if path.is_file())
    report, source, seen = Added(), iter(facts), 0
    with tqdm(None, "Adding", size or None, unit="B", unit_scale=True, disable=not sys.stderr.isatty(), delay=1) as bar:
        while batch := list(itertools.islice(source, _BATCH)):
            report += collection.add(batch, ttl=ttl)
            seen += len(batch)
            bar.set_postfix(facts=seen, refresh=False)
            bar.update(sum(len(fact.text.encode()) for fact in batch))
    return report


def tell(facts: ChromaFactBank, report: Added, skipped: list[SourceError], *, as_json: bool) -> None:
    """Say what became of the facts, and what the collection is now."""
    about = facts.calibration
    if as_json:
        held = {"facts": len(facts), "banks": facts.banks, "calibration": asdict(about) if about else None}
        print_json({**asdict(report), "skipped": [str(error) for error in skipped], **held})
        return
    out = console()
    out.print(f"Facts added: {report.added}; already stored: {report.duplicates}; rows skipped: {len(skipped)}.")
    if report.near_duplicates:
        out.print(f"{len(report.near_duplicates)} say nearly what another does:")
        for near in report.near_duplicates[:_SHOWN]:
            out.print(f"  {near.id} ≈ {near.earlier} ({near.score:.3f})")
        if len(report.near_duplicates) > _SHOWN:
            out.print("  … all of them with --json")
    out.print(f"Now {counted(len(facts), 'fact')} in {counted(facts.banks, 'bank')}.")
    if about:
        out.print(
            f"A search reads {counted(about.probes_of(facts.banks), 'bank')} and finds {about.recall:.1%} "
            f"of the {about.k} nearest (asked for: {about.target:.1%})."
        )


def _check_files(files: Iterable[Path]) -> None:
    """Say that a file is missing before anything is loaded."""
    for source in files:
        if not source.exists():
            around = [str(path) for path in source.parent.iterdir()] if source.parent.is_dir() else []
            raise SourceError(f"There is no file {source}. {did_you_mean(str(source), around)}".rstrip())


def _mapping(columns: Iterable[str]) -> dict[str, str]:
    for column in columns:
        if not all(column.partition("=")):
            raise typer.BadParameter(f"Got --column {column}; expected COLUMN=FIELD, e.g. context=text.")
    return dict(column.split("=", 1) for column in columns)
