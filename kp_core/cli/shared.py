"""What commands share: options, opening collections, output."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from kp_core.cli import importing
from kp_core.errors import FactError, ModelError, PackError
from kp_core.facts import Fact, Filter, LexicalReranker
from kp_core.packs.handle import check_namespace

if TYPE_CHECKING:
    from kp_core import KnowledgePack, Session

__all__ = [
    "ERRORS",
    "JsonFlag",
    "ModelOptions",
    "SearchOptions",
    "TargetPath",
    "Where",
    "WrongError",
    "checked_namespace",
    "console",
    "counted",
    "did_you_mean",
    "filter_of",
    "is_store",
    "located",
    "plain",
    "print_json",
    "read_one",
    "show_table",
    "sourced",
    "spread",
    "tell",
]

_SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SIGNS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

ERRORS = (ImportError, OSError, ValueError, RuntimeError, MemoryError)
"""What libraries raise besides our own errors; shown in one line unless --debug."""


def checked_namespace(name: str | None) -> str | None:
    """`name` of an option, where one is given; raises `HandleError` for what cannot name a namespace."""
    return None if name is None else check_namespace(name)


TargetPath = Annotated[
    str, typer.Argument(metavar="PATH", help="A collection, a store of packs (a folder or a URL), or a pack file.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="JSON", help="""Only facts that match, e.g. '{"year": {"$gte": 1990}}'."""),
]


@dataclass(frozen=True)
class ModelOptions:
    """The model of a command, and what runs it."""

    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A folder, or a name on the hub. Default: the bundled SmolLM2-135M."),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL|MODULE:FUNCTION",
            help="The address of a server of `kp serve` (its key in KP_API_KEY), or what makes the engine, called with "
            "the model. Default: Hugging Face.",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Default: the best of this machine.")
    ] = None

    def load(self) -> Session:
        """A session on the engine; raises `ModelError` where there is none."""
        with importing():
            from kp_core import load_engine

            if self.engine is None:
                importlib.import_module("kp_core.engines.hf")
        settings: dict[str, str] = {} if self.dtype is None else {"dtype": self.dtype}
        if (self.engine or "").startswith(("http://", "https://")) and (key := os.environ.get("KP_API_KEY")):
            settings["api_key"] = key
        try:
            return load_engine(self.model, engine=self.engine, **settings)
        except TypeError as error:
            if self.engine is None:
                raise
            raise ModelError(
                f"{self.engine} refused what it was called with, model={self.model!r} and {settings or 'nothing else'} "
                f"({error}); expected a function of `model`, and of `dtype` where --dtype is given."
            ) from error


@dataclass(frozen=True)
class SearchOptions:
    """Which facts a question may find, and in which order."""

    where: Where = None
    namespace: Annotated[str | None, typer.Option(help="Only facts of this namespace.", callback=checked_namespace)] = (
        None
    )
    lexical: Annotated[
        bool, typer.Option("--lexical", help="Let words count beside meaning: names, numbers, codes (BM25).")
    ] = False

    def keywords(self) -> dict[str, Any]:
        """As the keywords of `FactStore.search`."""
        rerank = LexicalReranker() if self.lexical else None
        return {"where": filter_of(self.where), "namespace": self.namespace, "rerank": rerank}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with the options in each of its parameters that is a dataclass in place of the parameter."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    fields = {name: inspect.signature(kind).parameters for name, kind in groups.items()}

    def call(**given: Any) -> None:  # noqa: ANN401 - whatever the options hold
        made = {name: kind(**{field: given.pop(field) for field in fields[name]}) for name, kind in groups.items()}
        command(**given, **made)

    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        types = get_type_hints(groups[name], include_extras=True) if name in groups else hints
        each = fields[name].values() if name in groups else (parameter,)
        flat += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[one.name]) for one in each]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    # This is what typer reads.
    vars(call)["__signature__"] = inspect.Signature(flat)
    return call


class WrongError(Exception):
    """Something was found wrong, and has been said."""


def plain(text: str) -> str:
    """`text` with signs for control characters: those of facts, titles, files and models must not steer a terminal."""
    return text.translate(_SIGNS)


class _Terminal(Console):
    """A console whose own codes alone reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def console() -> Console:
    """The terminal; a file or pipe gets lines of 120 characters. Text is printed as it is, brackets and all."""
    made = _Terminal(highlight=False, markup=False)
    return made if made.is_terminal else _Terminal(highlight=False, markup=False, width=120)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    said = json.dumps(data, ensure_ascii=False, indent=2, default=str)
    # JSON escapes the first 32 control characters alone.
    sys.stdout.write(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", said) + "\n")


def tell(data: Mapping[str, Any], said: str, *, as_json: bool) -> None:
    """Print `data` as JSON, or else what is `said` of it."""
    if as_json:
        print_json(data)
    else:
        console().print(said, soft_wrap=True)


def show_table(rows: Mapping[str, Any], title: str | None = None) -> None:
    """Print names and values in two columns."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    # Fingerprints are for comparing: no terminal is too narrow for all of one.
    table.add_column(overflow="fold")
    for name, value in rows.items():
        parts = (
            [f"{key.replace('_', ' ')}: {_shown(each)}" for key, each in value.items()]
            if isinstance(value, dict)
            else None
        )
        table.add_row(name.replace("_", " "), _shown(value) if parts is None else "\n".join(parts))
    console().print(table)


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """The nearest of `names` as a question, where one is near; else `otherwise`."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise


def filter_of(where: str | None) -> Filter | None:
    """The filter in an option; raises `FactError` for what is no JSON object."""
    found = None
    with suppress(ValueError):
        found = None if where is None else json.loads(where)
    if where is not None and not isinstance(found, dict):
        raise FactError(f"""Got --where {where!r}; expected JSON, an object, e.g. '{{"lang": "en"}}'.""")
    return found


def located(place: str) -> str | Path:
    """Where packs are: a URL as it is, else a path."""
    from kp_core.packs.objects import is_far

    return place if is_far(place) else Path(place)


def is_store(place: str | Path) -> bool:
    """Whether packs are kept in this folder, or under this URL."""
    from kp_core.packs.objects import open_blobs
    from kp_core.packs.secret import is_made

    return is_made(open_blobs(place))


def read_one(path: Path) -> KnowledgePack:
    """The pack in a file; raises `PackError`, naming it, for what is none."""
    from kp_core.packs.file import read_pack

    try:
        return read_pack(path.read_bytes())
    except PackError as error:
        raise PackError(f"{path} is no pack file, or damaged: {error}") from error


def sourced(fact: Fact) -> str:
    """Where a fact is from: its source, and the page there."""
    page = fact.metadata.get("page")
    return f"{fact.source}, page {page}" if fact.source and page is not None else fact.source


def counted(count: int, noun: str) -> str:
    """`1 fact`, `2 facts`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{name} ({_shown(each)})" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
