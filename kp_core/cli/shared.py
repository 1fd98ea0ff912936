"""What commands share: options, opening banks, output."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kp_core.errors import BankError, PackError
from kp_core.facts import ChromaFactBank, Filter
from kp_core.facts.embed import SentenceTransformerEmbedder
from kp_core.facts.layout import BankFile
from kp_core.packs.file import read_pack
from kp_core.packs.pack import KnowledgePack

__all__ = [
    "ERRORS",
    "BankPath",
    "EmbedderName",
    "InNamespace",
    "JsonFlag",
    "LexicalFlag",
    "ModelName",
    "TargetPath",
    "Where",
    "WrongError",
    "console",
    "counted",
    "filter_of",
    "is_bank",
    "is_store",
    "open_bank",
    "print_json",
    "read_one",
]

ERRORS = (OSError, ValueError, RuntimeError, MemoryError)
"""What libraries raise besides our own errors; shown in one line unless --debug."""

_BUNDLED = "all-MiniLM-L6-v2"

BankPath = Annotated[Path, typer.Argument(metavar="BANK", help="The folder of the bank.")]
TargetPath = Annotated[Path, typer.Argument(metavar="PATH", help="A bank, a store of packs, or a pack file.")]
ModelName = Annotated[
    str | None, typer.Option(metavar="MODEL", help="A folder, or a name on the hub. Default: the bundled SmolLM2-135M.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
EmbedderName = Annotated[
    str | None,
    typer.Option(
        "--embedder", metavar="MODEL", help="Embedding model: a folder, or a name on the hub. Default: the bank's."
    ),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="JSON", help="""Only facts that match, e.g. '{"year": {"$gte": 1990}}'."""),
]
InNamespace = Annotated[str | None, typer.Option(help="Only facts of this namespace.")]
LexicalFlag = Annotated[
    bool, typer.Option("--lexical", help="Let words count beside meaning: names, numbers, codes (BM25).")
]


class WrongError(Exception):
    """Something was found wrong, and has been said."""


def console() -> Console:
    """The terminal; a file or pipe gets lines of 120 characters. Text is printed as it is, brackets and all."""
    made = Console(highlight=False, markup=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, width=120)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, indent=2, default=str) + "\n")


def filter_of(where: str | None) -> Filter | None:
    """The filter in an option; raises `BankError` for what is no JSON object."""
    if where is None:
        return None
    try:
        found = json.loads(where)
    except ValueError as error:
        raise BankError(f"""Got --where {where!r}; expected JSON, e.g. '{{"lang": "en"}}' ({error}).""") from error
    if not isinstance(found, dict):
        raise BankError(f"""Got --where {where!r}; expected a JSON object, e.g. '{{"lang": "en"}}'.""")
    return found


def is_bank(path: Path) -> bool:
    """Whether a bank lies in this folder."""
    return (path / "facts.jsonl").exists()


def is_store(path: Path) -> bool:
    """Whether packs are kept in this folder."""
    return (path / "secret").is_file()


def read_one(path: Path) -> KnowledgePack:
    """The pack in a file; raises `PackError`, naming it, for what is none."""
    try:
        return read_pack(path.read_bytes())
    except PackError as error:
        raise PackError(f"{path} is no pack file, or damaged: {error}") from error


def counted(count: int, noun: str) -> str:
    """`1 fact`, `2 facts`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def open_bank(path: Path, embedder: str | None = None, *, new: bool = False, **options: Any) -> ChromaFactBank:  # noqa: ANN401
    """The bank in a folder, with the embedder it was built with unless another is named.

    Raises `BankError` where there is none, with the nearest name that is one; with `new` it is made.
    """
    if not new and not is_bank(path):
        around = path.parent.iterdir() if path.parent.is_dir() else ()
        banks = [str(each) for each in around if is_bank(each)]
        near = difflib.get_close_matches(str(path), banks, n=1, cutoff=0.4) or difflib.get_close_matches(
            f"./{path}", banks, n=1, cutoff=0.4
        )
        hint = f"Did you mean {near[0]}?" if near else "`kp build BANK FILE...` makes one."
        raise BankError(f"There is no bank in {path}. {hint}")
    about = BankFile.read(path)
    name = embedder or (about.embedder if about else None)
    model = None if name in {None, _BUNDLED} else name
    return ChromaFactBank(path, SentenceTransformerEmbedder(model, name=name if model and about else None), **options)
