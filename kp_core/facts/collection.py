"""A Chroma collection that somebody else made, as facts to be read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from kp_core.errors import FactError
from kp_core.facts.base import Fact
from kp_core.facts.embed import Embedder, OtherEmbedder, SentenceTransformerEmbedder
from kp_core.facts.reading import SearchedFacts
from kp_core.facts.records import QueriedCollection, told
from kp_core.facts.table import Table
from kp_core.packs.handle import check_namespace

__all__ = ["CollectionFacts"]

logger = logging.getLogger(__name__)

_SAMPLE = 4
_SAME = 0.98
_SPACES = ("cosine", "l2", "ip")


class CollectionFacts(SearchedFacts):
    """The records of a collection as facts of `namespace`: found, listed and compiled, never changed.

    Ids, documents and metadata are theirs; `title` and `source` of a fact are the metadata of these names. A hit's
    score is the cosine; under the distance `ip` the dot product, and under `l2` of vectors that are not of length 1
    what orders as it does. Questions are embedded by `embedder`, else by the collection's own embedding function, else
    by the bundled MiniLM; a few texts are embedded and compared first. There are no banks.

    Raises `FactError` where these vectors are not those of the collection (both are described).
    """

    def __init__(
        self,
        collection: Any,  # noqa: ANN401 - a chromadb.Collection
        embedder: Embedder | None = None,
        namespace: str = "default",
        where: str = "Chroma",
    ) -> None:
        self.name, self.where = collection.name, f"{where}, collection {collection.name!r}"
        with told(self.where):
            settings = collection.configuration_json or {}
            spaces = [each.get("space") for each in settings.values() if isinstance(each, Mapping)]
            space = next((each for each in spaces if each in _SPACES), "l2")
        self._table: Any = QueriedCollection(collection, check_namespace(namespace), self.where, _fact, space)
        super().__init__(embedder or _own_embedder(collection, settings) or SentenceTransformerEmbedder())
        self._check_embedder()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r}, {self.embedder!r})"

    def __len__(self) -> int:
        return len(self._table)

    def _tables(self, namespace: str | None) -> list[Table]:
        return [self._table] if namespace in (None, self._table.namespace) else []

    def _with_banks(self, table: Table) -> Table:  # noqa: ARG002 - there are none
        raise FactError(
            f"{self.where} is not ours, so no banks are kept for it. Search without `probes`, deliver facts or "
            "documents; or copy it: `ChromaFactStore(folder).add(facts.facts())`."
        )

    def _refuse(self, *_: object, **__: object) -> Any:  # noqa: ANN401
        raise FactError(f"{self.where} is not ours and is only read. Change it with what made it.")

    add = update = delete = rebuild = _refuse

    def _check_embedder(self) -> None:
        rows = self._table.page(0, _SAMPLE, vectors=True)
        if not rows:
            return
        held = np.stack([row.vector for row in rows])
        made = self.embedder.embed([row.fact.text for row in rows])
        about = f"vectors of {held.shape[1]} dimensions; the embedder {self.embedder.name!r} makes"
        if made.shape != held.shape:
            raise FactError(f"{self.where} holds {about} {made.shape[1]}. Give the embedder that it was made with.")
        cosines = (held * made).sum(axis=1) / np.maximum(np.linalg.norm(held, axis=1), 1e-12)
        if float(np.median(cosines)) < _SAME:
            raise FactError(
                f"{self.where} holds {about} others (cosine {float(np.median(cosines)):.2f} on the same texts). Give "
                "the embedder that it was made with."
            )


def _own_embedder(collection: Any, settings: Mapping[str, Any]) -> OtherEmbedder | None:  # noqa: ANN401
    """The embedding function that a collection was made with."""
    told_of = settings.get("embedding_function") or {}
    function = getattr(collection, "_embedding_function", None)
    # Chroma gives a collection that names no function its default one, which did not make these vectors.
    if function is None or told_of.get("type") != "known":
        return None
    name = str(told_of.get("name"))
    return OtherEmbedder(name, _told(name, function), _told(name, lambda text: function.embed_query([text])[0]))


def _told(name: str, embed: Any) -> Any:  # noqa: ANN401 - Chroma's
    def told_of(texts: Any) -> Any:  # noqa: ANN401
        try:
            return embed(texts)
        except Exception as error:  # whatever it asks and wherever it downloads from
            raise FactError(
                f"The collection's own embedding function, {name!r}, fails ({type(error).__name__}: {error}). "
                "Give an embedder that makes the same vectors; for Chroma's default that is all-MiniLM-L6-v2, e.g. "
                "`SentenceTransformerEmbedder()`, or --embedder with its folder."
            ) from error

    return told_of


def _fact(fact_id: str, text: str, metadata: Mapping[str, Any] | None, namespace: str) -> Fact:
    about = {name: value for name, value in (metadata or {}).items() if name and name != "_node_content"}
    title, source = (str(about.get(name) or "") for name in ("title", "source"))
    return Fact(text, title=title, source=source, metadata=about, id=fact_id, namespace=namespace)
