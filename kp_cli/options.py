"""Options of the commands, and the places of files, collections and packs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from kp_cli import importing, waiting
from kp_core import SentenceTransformerEmbedder
from kp_core.banks import ChromaFactStore, Filter
from kp_core.banks.base import content_id
from kp_core.banks.chroma import is_fact_store, is_url
from kp_core.bundled import check_reachable
from kp_core.errors import FactError, ModelError
from kp_core.packs.blobs import replace_file
from kp_core.packs.handle import check_namespace

if TYPE_CHECKING:
    from kp_core import Session


Place = Annotated[
    str, typer.Argument(metavar="COLLECTION", help="The folder of the collection, or the URL of a Chroma server.")
]
TargetPath = Annotated[
    str, typer.Argument(metavar="PATH", help="A collection, or a store of packs: a folder or a URL.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="JSON", help="""Only facts that match, e.g. '{"year": {"$gte": 1990}}'."""),
]
Namespace = Annotated[
    str | None,
    typer.Option(help="Namespace of the facts.", callback=lambda name: None if name is None else check_namespace(name)),
]
MOST_FACTS = 10**6
"""The most that a search can be asked for."""
_LOOKED_AT = 1000
PLACES = "packs.json"
"""In the folder of a collection: where its packs were stored, the last first, and servers that have some, too."""
_DEFAULT = "packs"


@dataclass(frozen=True)
class ModelOptions:
    """Options for the model of a command, and for the engine that runs it."""

    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder, GGUF file or name on the hub. Default: the bundled SmolLM2-135M."),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="llama|hf|URL|MODULE:FUNCTION",
            help="`llama` (llama.cpp; default for a GGUF file), `hf` (Hugging Face), the address of a server of "
            "`kp serve` (its key in KP_API_KEY), or a function that takes the model and returns an engine.",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: the best that this machine supports."),
    ] = None

    @property
    def address(self) -> str:
        """The address of a server; empty if the model runs here."""
        return self.engine if self.engine and self.engine.startswith(("http://", "https://")) else ""

    def load(self) -> Session:
        """A session on the engine. Raises `ModelError` if there is none."""
        with importing(), waiting("Loading libraries"):
            from kp_core import load_engine

            if self.engine is None and not Path(self.model or "").is_file():
                if self.model is not None:
                    check_reachable(self.model)
                importlib.import_module("kp_core.engines.hf.loading")
        settings: dict[str, str] = {} if self.dtype is None else {"dtype": self.dtype}
        if self.address and (key := os.environ.get("KP_API_KEY")):
            settings["api_key"] = key
        try:
            with waiting("Loading the model"):
                return load_engine(self.model, engine=self.engine, **settings)
        except TypeError as error:
            if self.engine is None:
                raise
            raise ModelError(
                f"{self.engine} refused its arguments, model={self.model!r} and {settings or 'nothing else'} "
                f"({error}); expected a function of `model`, and of `dtype` where --dtype is given."
            ) from error


@dataclass(frozen=True)
class PlaceOptions:
    """Options for opening a collection."""

    embedder: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Embedding model: a folder, a name on the hub, or `bundled` (default)."),
    ] = None
    packs: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where packs are: a folder, or a URL such as s3://bucket/prefix. Default: where they were last, else "
            "COLLECTION/packs, or a cache folder for a collection on a server.",
        ),
    ] = None

    def open(self, place: str, *, new: bool = False, **settings: Any) -> ChromaFactStore:  # noqa: ANN401 - of that
        """The collection in a folder or on a server. Raises `FactError` if there is none, unless it may be `new`."""
        path, hint = Path(place), "`kp build COLLECTION FILE...` makes one."
        if path.is_dir() and any(path.iterdir()):
            hint = f"`kp build NAME {shlex.quote(place)}` makes one of its files."
        # A database that is not ours is refused by the store itself.
        if not (new or (path / "chroma.sqlite3").exists() or is_collection(place)):
            collections = [name for name in siblings(path) if is_fact_store(Path(name))]
            shown = path.resolve() if place in (".", "..") else place
            raise FactError(f"There is no collection in {shown}. {did_you_mean(place, collections, hint)}")
        return ChromaFactStore(place, self._embedder(), **settings)

    def _embedder(self) -> SentenceTransformerEmbedder | None:
        if self.embedder in (None, "bundled"):
            return None if self.embedder is None else SentenceTransformerEmbedder()
        # As sentence-transformers completes it.
        is_whole = "/" in self.embedder or Path(self.embedder).exists()
        check_reachable(self.embedder if is_whole else f"sentence-transformers/{self.embedder}")
        return SentenceTransformerEmbedder(self.embedder)

    def folder(self, place: str, facts: ChromaFactStore) -> str:
        """The place of the packs of `facts`, opened from `place`: `--packs`, else the last one, else the default."""
        return self.packs or self.folders(place, facts)[0]

    def noted_folder(self, place: str, facts: ChromaFactStore, server: str = "") -> str:
        """As `folder`, for a command that stores packs, also on a server: later ones find these without `--packs`."""
        if (self.packs or server) and facts.path is not None:
            names = [*dict.fromkeys([*self._names(facts.path), *filter(None, [server])])]
            with suppress(OSError):  # A collection that can only be read.
                replace_file(facts.path / PLACES, [json.dumps(names).encode()])
        return self.folder(place, facts)

    def own(self, place: str, facts: ChromaFactStore) -> str:
        """The place of packs that is of `facts` alone: the default."""
        return self._cache(place) if facts.path is None else str(facts.path / _DEFAULT)

    def servers(self, facts: ChromaFactStore) -> list[str]:
        """The addresses of servers of `kp serve` that have compiled packs of `facts` in stores of their own."""
        return [] if facts.path is None else [name for name in self._names(facts.path) if name.startswith("http")]

    def folders(self, place: str, facts: ChromaFactStore) -> list[str]:
        """All places where packs of `facts` are or were, first the one to use. The default is in no foreign folder."""
        if facts.path is None:
            return [self.packs or self.own(place, facts)]
        names = [name for name in self._names(facts.path) if not name.startswith("http")]
        return [name if is_url(name) else str(facts.path / name) for name in names]

    def _names(self, path: Path) -> list[str]:
        """The places of a collection at `path`, as they are noted there: the default by its name, as folders move."""
        noted, given = path / PLACES, list[str]()
        if self.packs and is_url(self.packs):
            given = [self.packs]
        elif self.packs:
            there = Path(self.packs).resolve()
            given = [_DEFAULT if there == (path / _DEFAULT).resolve() else str(there)]
        try:
            earlier = json.loads(noted.read_bytes()) if noted.exists() else []
            return [*dict.fromkeys([*given, *map(str, earlier), _DEFAULT])]
        except (ValueError, TypeError) as error:
            raise FactError(f"{noted} is damaged; remove it, and give `--packs` where packs are elsewhere.") from error

    @staticmethod
    def _cache(place: str) -> str:
        location = place if is_url(place) else str(Path(place).resolve())
        slug = re.sub(r"\W+", "-", location).strip("-")[-40:]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return str(cache / "knowledge-packs" / f"{slug}-{content_id(location)[:8]}")


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with each dataclass parameter replaced by the dataclass's fields, as options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    def call(**given: Any) -> None:  # noqa: ANN401 - whatever the options hold
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    options = list[inspect.Parameter]()
    for name, parameter in inspect.signature(command).parameters.items():
        source = groups.get(name, command)
        types = get_type_hints(source, include_extras=True)
        options += [
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[option.name])
            for option in (inspect.signature(source).parameters.values() if name in groups else [parameter])
        ]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    # Typer reads this signature.
    vars(call)["__signature__"] = inspect.Signature(options)
    return call


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """The nearest of `names` as a question, if one is near; else `otherwise`."""
    similar = difflib.get_close_matches(name, list(names), n=1)
    return f"Did you mean {similar[0]}?" if similar else otherwise


def siblings(path: Path) -> list[str]:
    """Paths of what exists beside `path`."""
    return [str(sibling) for sibling in path.parent.iterdir() if sibling.exists()] if path.parent.is_dir() else []


def existing(path: Path, hint: str = "Check the path.") -> Path:
    """`path`. Raises `FactError` if nothing is there, with the nearest name beside it, else with `hint`."""
    if not path.exists():
        raise FactError(f"There is no file {path}. {did_you_mean(str(path), siblings(path), hint)}")
    return path


def filter_of(where: str | None) -> Filter | None:
    """The filter in an option. Raises `FactError` unless it is a JSON object."""
    if where is None:
        return None
    with suppress(ValueError):
        if isinstance(parsed := json.loads(where), dict):
            return parsed
    raise FactError(f"""Got --where {where!r}; expected JSON, an object, e.g. '{{"lang": "en"}}'.""")


def about_filter(where: Filter, facts: ChromaFactStore) -> str:
    """What to say of a filter that no fact passes: what one of the facts has there, such as text for a number."""
    names = [name for name in _names_in(where) if not name.startswith("kp:")]
    for fact in itertools.islice(facts.stored(), _LOOKED_AT):
        if held := {name: fact.metadata[name] for name in names if name in fact.metadata}:
            return f"No fact passes the filter. One has {json.dumps(held, ensure_ascii=False)}."
    return "No fact passes the filter."


def _names_in(where: Mapping[str, Any]) -> Iterator[str]:
    for name, value in where.items():
        if not name.startswith("$"):
            yield name
        for each in value if name in ("$and", "$or") else ():
            yield from _names_in(each)


def is_collection(place: str) -> bool:
    """Whether `place` is a collection. Any URL counts, as a server may hold one."""
    return is_url(place) or is_fact_store(Path(place))


def is_store(place: str) -> bool:
    """Whether packs are stored in this folder or under this URL."""
    from kp_core.packs.objects import open_blobs
    from kp_core.packs.secret import is_made

    return is_made(open_blobs(place))
