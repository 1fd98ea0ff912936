"""Where a collection is, how it is opened, and where its packs are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kp_core.cli.shared import did_you_mean, located
from kp_core.errors import FactError
from kp_core.facts import ChromaFactStore
from kp_core.facts.base import content_id
from kp_core.facts.client import is_url
from kp_core.facts.embed import SentenceTransformerEmbedder
from kp_core.facts.folder import is_fact_store

__all__ = ["Place", "PlaceOptions", "ReadOptions", "is_collection", "open_collection"]

_DATABASE = "chroma.sqlite3"
_OLD = "facts.jsonl"  # What version 0.1 kept facts in.

Place = Annotated[
    str, typer.Argument(metavar="COLLECTION", help="The folder of the collection, or the URL of a Chroma server.")
]


@dataclass(frozen=True)
class PlaceOptions:
    """What opening a collection takes."""

    embedder: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Embedding model: a folder, or a name on the hub. Default: what it was made with, else the bundled.",
        ),
    ] = None
    packs: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where packs are: a folder, or a URL such as s3://bucket/prefix. Default: COLLECTION/packs; of what "
            "is not ours, the user's cache.",
        ),
    ] = None
    tenant: Annotated[str | None, typer.Option(help="Tenant on the Chroma server.")] = None
    database: Annotated[str | None, typer.Option(help="Database on the Chroma server.")] = None
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME: VALUE'", help="Header for the Chroma server; may be repeated."),
    ] = None

    def server(self, place: str) -> dict[str, Any]:
        """What Chroma is asked with; raises `FactError` for a header without a colon, or for a folder."""
        given: dict[str, Any] = {"tenant": self.tenant, "database": self.database}
        pairs = [each.partition(":") for each in self.header or ()]
        if wrong := [name for name, colon, _ in pairs if not colon or not name.strip()]:
            raise FactError(f"Got --header {wrong[0]!r}; expected 'NAME: VALUE', e.g. 'Authorization: Bearer TOKEN'.")
        if pairs and not is_url(place):
            raise FactError(f"Got --header for {place}, which is a folder; headers go to a server.")
        given["headers"] = {name.strip(): value.strip() for name, _, value in pairs} or None
        return {name: value for name, value in given.items() if value is not None}

    def embedding(self) -> SentenceTransformerEmbedder | None:
        """The embedder that was named."""
        return None if self.embedder is None else SentenceTransformerEmbedder(self.embedder)

    def folder(self, place: str, facts: ChromaFactStore) -> str | Path:
        """Where the packs of `facts`, opened from `place`, are: nothing is put into a folder that is not ours."""
        if self.packs is not None:
            return located(self.packs)
        if facts.path is not None:
            return facts.path / "packs"
        where = f"{place if is_url(place) else Path(place).resolve()} {facts.collection or ''}".strip()
        slug = re.sub(r"\W+", "-", where).strip("-")[-40:]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "knowledge-packs" / f"{slug}-{content_id(where)[:8]}"


@dataclass(frozen=True)
class ReadOptions(PlaceOptions):
    """What reading a collection takes, which may be another's."""

    collection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of a Chroma folder or server that is not ours: read this collection, as it is."
        ),
    ] = None

    @contextmanager
    def reading(self, place: str, *, read_only: bool = True, wait: float = 0.0) -> Iterator[ChromaFactStore]:
        """The facts in `place`: those of a collection of ours, else of any Chroma collection, as it is."""
        ours = is_fact_store(Path(place)) or not (Path(place) / _DATABASE).is_file()
        if self.collection is None and ours:
            with open_collection(place, self, read_only=read_only, wait=wait) as facts:
                if not is_url(place) or len(facts):
                    yield facts
                    return
        yield ChromaFactStore.from_collection(self.collection, self.embedding(), path=place, **self.server(place))


def is_collection(place: str) -> bool:
    """Whether a collection lies here; a server may hold one."""
    return is_url(place) or is_fact_store(Path(place))


def open_collection(
    place: str,
    options: PlaceOptions,
    *,
    new: bool = False,
    hint: str = "`kp build COLLECTION FILE...` makes one.",
    **settings: Any,  # noqa: ANN401 - those of `ChromaFactStore`
) -> ChromaFactStore:
    """The collection in a folder or on a server; raises `FactError` where there is none, unless it may be `new`."""
    path = Path(place)
    if not new and not is_collection(place) and not any((path / name).exists() for name in (_DATABASE, _OLD)):
        around = path.parent.iterdir() if path.parent.is_dir() else ()
        names = [str(each) for each in around if is_fact_store(each)]
        raise FactError(f"There is no collection in {place}. {did_you_mean(place, names, hint)}")
    return ChromaFactStore(place, options.embedding(), **options.server(place), **settings)
