"""Base of our retrievers: documents with the handles of their packs, and the settings of delivery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from langchain_core.documents import Document
from langchain_core.indexing.base import DocumentIndex
from pydantic import ConfigDict, Field, model_validator

from kp_core import Fact, FactStore, Session
from kp_core.delivery import KV, Delivery, Found, Precompile, Unit
from kp_core.engines.request import CompiledFor, refuse_unknown
from kp_core.packs.codec import Compression
from kp_core.packs.handle import inert
from kp_core.packs.view import Packs

__all__ = ["PackRetriever", "to_fact"]


class PackRetriever(DocumentIndex):
    """A retriever whose documents have packs in `store`. `langchain_core.indexing.index` can fill it.

    By default a document's `page_content` is its text, with a blank inserted into anything that looks like a handle, so
    that it does not resolve. With `content="handle"` it is the handle alone, for models that resolve it. `engine`
    compiles documents without a pack when they are found, for the position `compiled_for` (for a prompt:
    `pack_place(prompt)`). With `precompile="background"` it does so when it is idle; until then the document comes as
    text. Without an engine it comes as text, with a logged warning. `kv` says whether KV is stored, and `compress` how
    (see `kp_core.delivery`).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    store: Packs = Field(exclude=True)
    engine: Session | None = Field(default=None, exclude=True)
    namespace: str = "default"
    content: Literal["text", "handle"] = "text"
    compiled_for: CompiledFor = Field(default="user", exclude=True)
    kv: KV = "stored"
    precompile: Precompile = "use"
    compress: Compression = "none"

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:  # noqa: ANN401 - what a caller gave
        refuse_unknown(given, cls.model_fields, cls.__name__)
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._deliver(None)  # It raises for an invalid namespace.
        return self

    def add_documents(self, documents: Sequence[Document]) -> list[str]:
        """Call `upsert` under the name that vector stores use. Returns the ids."""
        return list(self.upsert(documents)["succeeded"])

    def _deliver(self, facts: FactStore | None, unit: Unit = "fact") -> Delivery:
        return Delivery(
            facts,
            self.engine,
            self.store,
            unit=unit,
            kv=self.kv,
            compiled_for=self.compiled_for,
            namespace=self.namespace,
            precompile=self.precompile,
            compress=self.compress,
        )

    def _packed(self, document: Document, found: Found, **known: object) -> Document:
        """`document` with the pack that was `found` for it, and with further metadata (`known`)."""
        handle = None if found.handle is None else str(found.handle)
        known = {"handle": handle, **{name: value for name, value in known.items() if value is not None}}
        pack_metadata = {name: value for name, value in known.items() if value is not None} | {
            "text": document.page_content
        }
        metadata = pack_metadata | document.metadata | {"kp": known | {"id": document.id}}
        content = found.content if self.content == "handle" else inert(document.page_content)
        return document.model_copy(update={"page_content": content, "metadata": metadata})


def to_fact(document: Document, **others: Any) -> Fact:  # noqa: ANN401 - other fields of a fact
    """A document's text as a fact. The fact takes `title` and `source` from the metadata, if they are strings."""
    fields: dict[str, Any] = {
        name: value for name in ("title", "source") if isinstance(value := document.metadata.get(name), str)
    }
    return Fact(document.page_content, **fields, **others)
