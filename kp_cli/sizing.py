"""`kp size`: what packs of some facts take, before anything is compiled."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kp_cli.compiling import units_of
from kp_cli.ingesting import SourceOptions
from kp_cli.places import PlaceOptions, is_collection, open_collection
from kp_cli.shared import JsonFlag, ModelOptions, console, counted, print_json, spread
from kp_core.compiling import compile_cost
from kp_core.delivery import Unit
from kp_core.facts.banking import BANK_SIZE
from kp_core.packs.codec import Compression

__all__ = ["size"]

_KINDS: dict[Compression, str] = {
    "none": "read soonest",
    "lossless": "no bit changed",
    "int8": "rounded: an approximation, read with --mismatch accept",
}


@spread
def size(
    places: Annotated[list[str], typer.Argument(metavar="PATH...", help="A collection; or files and folders of text.")],
    *,
    unit: Annotated[Unit, typer.Option(help="What a pack holds.")] = "fact",
    options: PlaceOptions,
    model: ModelOptions,
    as_json: JsonFlag = False,
) -> None:
    """Tokens, bytes on disk for each way of storing KV, and minutes to compile, on this machine and for this model.

    Nothing is stored. Tokens are counted on a sample of 256 packs, bytes and minutes measured by compiling eight.
    """
    if len(places) == 1 and is_collection(places[0]):
        with open_collection(places[0], options, read_only=True) as opened:
            facts, banks = list(opened.facts()), opened.bank_size
    else:
        facts, banks = list(SourceOptions().facts([Path(each) for each in places], [])), BANK_SIZE
    units = [each.text for each in units_of(facts, unit, banks)]
    session = model.load()
    costs = {kind: compile_cost(units, session, compress=kind) for kind in _KINDS}
    about: dict[str, Any] = {"facts": len(facts), "packs": len(units), "tokens": costs["none"].tokens}
    about |= {"text_bytes": sum(len(text.encode()) for text in units), "model": session.name}
    about["bytes_per_token"] = session.bytes_per_token
    if as_json:
        print_json({**about, "stored": {kind: asdict(cost) for kind, cost in costs.items()}})
        return
    out = console()
    out.print(
        f"{counted(len(facts), 'fact')}: {counted(about['packs'], 'pack')} of {about['tokens']:,} tokens, "
        f"{about['bytes_per_token']:,} bytes of KV each; the text has {about['text_bytes'] / 1e6:,.2f} MB."
    )
    table = Table("stored as", "MB on disk", "minutes to compile", "")
    for kind, note in _KINDS.items():
        table.add_row(kind, f"{costs[kind].nbytes / 1e6:,.1f}", f"{costs[kind].seconds / 60:.1f}", note)
    table.add_row("lazy", f"{about['text_bytes'] / 1e6:,.1f}", "0", "text alone; KV is computed at first use")
    out.print(table)
