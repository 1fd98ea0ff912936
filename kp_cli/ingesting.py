"""Reading knowledge into a collection: what `kp build` and `kp add` share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kp_cli.shared import checked_namespace, console, counted, did_you_mean
from kp_core.errors import SourceError
from kp_core.facts import Added, ChromaFactStore, Fact
from kp_core.facts.sources import OnError, read_dataset, read_facts
from kp_core.facts.sources.drafts import STDIN
from kp_core.progress import bar_of

__all__ = ["SourceOptions", "ingest", "report", "say"]

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
        int, typer.Option(help="Longest paragraph of text, Markdown, Word, PDF and HTML, in characters.")
    ] = 2000
    encoding: Annotated[str | None, typer.Option(metavar="NAME", help="Of text that is not UTF-8, e.g. cp1252.")] = None

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
            encoding=self.encoding,
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


def ingest(collection: ChromaFactStore, facts: Iterable[Fact], files: Iterable[Path], ttl: float | None) -> Added:
    """Add facts in batches, with a bar that knows how many bytes of the files have become facts."""
    # Of standard input nobody knows; it is no file.
    size = sum(path.stat().st_size for each in files for path in (each, *each.rglob("*")) if path.is_file())
    added, source, seen = Added(), iter(facts), 0
    with bar_of("Adding", size or None, "B") as bar:
        while batch := list(itertools.islice(source, _BATCH)):
            added += collection.add(batch, ttl=ttl)
            seen += len(batch)
            bar.set_postfix(facts=seen, refresh=False)
            bar.update(sum(len(fact.text.encode()) for fact in batch))
        bar.update(max(0, size - bar.n))  # A file has more bytes than its text.
    return added


def report(facts: ChromaFactStore, added: Added, skipped: list[SourceError]) -> dict[str, Any]:
    """What became of the facts, and what the collection is now, as JSON."""
    return {**asdict(added), "skipped": [str(error) for error in skipped], "facts": len(facts)}


def say(told: dict[str, Any]) -> None:
    """Print what `report` gives."""
    out, near = console(), told["near_duplicates"]
    skipped = len(told["skipped"])
    out.print(f"Facts added: {told['added']}; already stored: {told['duplicates']}; rows skipped: {skipped}.")
    if near:
        out.print(f"{len(near)} say nearly what another does:")
        for each in near[:_SHOWN]:
            out.print(f"  {each['id']} ≈ {each['earlier']} ({each['score']:.3f})")
        if len(near) > _SHOWN:
            out.print("  … all of them with --json")
    if corrected := told["superseded"]:
        shown = ", ".join(corrected[:_SHOWN]) + (", …" if len(corrected) > _SHOWN else "")
        out.print(
            f"Corrected in the collection since, and left as they are: {shown}. (Files still say what they said.)"
        )
    out.print(f"Now {counted(told['facts'], 'fact')}.")


def _check_files(files: Iterable[Path]) -> None:
    """Say that a file is missing before anything is loaded."""
    for source in files:
        if str(source) != STDIN and not source.exists():
            around = [str(path) for path in source.parent.iterdir() if path.exists()] if source.parent.is_dir() else []
            raise SourceError(f"There is no file {source}. {did_you_mean(str(source), around)}".rstrip())


def _mapping(columns: Iterable[str]) -> dict[str, str]:
    for column in columns:
        if not all(column.partition("=")):
            raise typer.BadParameter(f"Got --column {column}; expected COLUMN=FIELD, e.g. context=text.")
    return dict(column.split("=", 1) for column in columns)
