"""`KnowledgePackRetriever`: a fact store as a LangChain retriever whose documents have packs."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import DeleteResponse, UpsertResponse
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import Field, model_validator

from kp_core import Embedder, Fact, FactStore, Session
from kp_core.compiling import open_facts
from kp_core.delivery import Delivery, Unit
from kp_core.edit import How
from kp_core.engines.request import refuse_unknown
from kp_core.errors import FactError
from kp_core.facts import Filter, Reranker
from kp_core.packs.view import Packs
from kp_langchain.documents import PackRetriever, to_fact
from kp_langchain.wrapped import WrappedRetriever

__all__ = ["KnowledgePackRetriever"]

logger = logging.getLogger(__name__)

_PER_CALL = ("k", "probes", "where", "score_threshold", "rerank")


class KnowledgePackRetriever(PackRetriever):
    """Finds facts of `namespace` in `fact_store` and returns each as a document. See `PackRetriever` for the rest.

    The `id` is the fact's. `handle`, `score`, `bank` (if banks were searched), `title`, `source` and `text` are added
    to the fact's metadata, unless it has such a field or the value is empty. `kp` holds `handle`, `score`, `id` and
    `bank`.

    With `unit="bank"` a document is a whole bank of about twenty facts, one per line, under one handle: the `k` banks
    with the best facts are returned. With `unit="document"` it is all facts of a source.

    All facts are searched; with `probes`, only those of this many nearest banks. `where` filters facts by metadata (see
    `kp_core.facts.filters`), `score_threshold` by their cosine. `rerank`, e.g. `kp_core.facts.LexicalReranker()`,
    orders the results; the first `k` that pass `score_threshold` are returned. Scores stay cosines. These five options
    may also be given to `invoke`.

    Raises `OptionError` for options that do not exist, `FactError` for a blank question and a store without facts.
    """

    fact_store: FactStore = Field(exclude=True)
    k: int = Field(default=4, ge=1)
    probes: int | None = Field(default=None, ge=1)
    where: dict[str, Any] | None = None
    score_threshold: float | None = None
    rerank: Reranker | None = Field(default=None, exclude=True)
    unit: Unit = "fact"

    @model_validator(mode="before")
    @classmethod
    def _check_given(cls, given: Any) -> Any:  # noqa: ANN401 - what a caller gave
        if given.get("fact_store") is not None:
            open_facts(given["fact_store"])
        return given

    @classmethod
    def from_facts(  # noqa: PLR0913 - one keyword per part it is made of
        cls,
        facts: Iterable[Fact],
        *,
        engine: Session,
        store: Packs,
        fact_store: FactStore | None = None,
        embedder: Embedder | Embeddings | None = None,
        path: str | os.PathLike[str] | None = None,
        lazy: bool = False,
        progress: bool = True,
        **fields: Any,  # noqa: ANN401
    ) -> Self:
        """A retriever over `facts`: adds them to the fact store, and compiles their packs into `store`.

        Without `fact_store`, one is made with `embedder` (by default the bundled MiniLM), in Chroma at `path` or in
        memory. Facts go into the retriever's namespace. A fact that has a namespace of its own stays there, where this
        retriever does not find it. `lazy` is `kv="lazy"`: KV is computed on first use. With `unit="bank"`, new facts
        regroup banks, whose packs are then compiled again.
        """
        refuse_unknown(fields, (*cls.model_fields, *inspect.signature(cls.from_facts).parameters), cls.__name__)
        fields |= {"kv": "lazy"} if lazy else {}
        retriever = cls(fact_store=open_facts(fact_store, embedder, path), store=store, engine=engine, **fields)
        retriever._delivery().add(facts, progress=progress)
        return retriever

    @classmethod
    def from_documents(cls, documents: Iterable[Document], *, progress: bool = True, **settings: Any) -> Self:  # noqa: ANN401
        """As `from_facts`, for documents, with the same `settings`. Facts with the documents' ids are replaced."""
        retriever = cls.from_facts([], **settings)
        retriever._add(documents, progress=progress)  # noqa: SLF001 - one of ours
        return retriever

    @classmethod
    def from_retriever(
        cls,
        retriever: BaseRetriever,
        *,
        store: Packs,
        engine: Session | None = None,
        **fields: Any,  # noqa: ANN401
    ) -> WrappedRetriever:
        """A retriever that adds packs to what `retriever` finds; `fields` are those of `WrappedRetriever`."""
        if not isinstance(retriever, BaseRetriever):
            raise FactError(
                f"Got {type(retriever)}; expected a LangChain retriever, e.g. `Chroma(...).as_retriever()`."
            )
        return WrappedRetriever(retriever=retriever, store=store, engine=engine, **fields)

    @classmethod
    def from_vectorstore(
        cls,
        vectorstore: VectorStore,
        *,
        search_type: str = "similarity",
        search_kwargs: dict[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> WrappedRetriever:
        """A retriever that adds packs to what a search of `vectorstore` finds. Nothing is copied or embedded again.

        `search_type` and `search_kwargs` are those of `VectorStore.as_retriever`; `settings` those of `from_retriever`.
        """
        if not isinstance(vectorstore, VectorStore):
            raise FactError(f"Got {type(vectorstore)}; expected a LangChain vector store, e.g. `Chroma(...)`.")
        searched = vectorstore.as_retriever(search_type=search_type, search_kwargs=search_kwargs or {})
        return cls.from_retriever(searched, **settings)

    def upsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:  # noqa: ANN401
        """Store documents as facts and compile their packs. Facts with the same ids are replaced, and so are their
        packs.

        A document without an id gets one from its text. Blank documents are left out, with a warning.
        """
        refuse_unknown(kwargs, ("items",), "upsert")
        kept = self._add(items, progress=False)
        blank = [item.id or "" for item in items if not item.page_content.strip()]
        return UpsertResponse(succeeded=kept, failed=blank)

    def delete(
        self,
        ids: list[str] | None = None,
        *,
        where: Filter | None = None,
        source: str | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> DeleteResponse:
        """Delete facts by id, filter or source document, and the packs that no fact uses any more."""
        refuse_unknown(kwargs, ("where", "source"), "delete")
        removed_ids = [fact.id for fact in self._delivery().delete(ids, where=where, source=source)]
        return DeleteResponse(num_deleted=len(removed_ids), succeeded=removed_ids, num_failed=0, failed=[])

    def edit(self, doc_id: str, old: str, new: str, *, how: How = "amend") -> Document:
        """Correct `old` to `new` in a document, and return it; see `kp_core.delivery.Delivery.edit`."""
        return _document(self._delivery().edit(doc_id, old, new, how=how))

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:  # noqa: ANN401
        """The documents with these ids, as they were stored; unknown ids are skipped."""
        refuse_unknown(kwargs, ("ids",), "get")
        return [_document(fact) for fact in self.fact_store.facts(ids=list(ids), namespace=self.namespace)]

    def _delivery(self) -> Delivery:
        return self._deliver(self.fact_store, self.unit)

    def _add(self, documents: Iterable[Document], *, progress: bool) -> list[str]:
        documents = list(documents)
        documents_with_text = [document for document in documents if document.page_content.strip()]
        if len(documents_with_text) < len(documents):
            logger.warning(
                "%d of %d documents are blank and were left out.",
                len(documents) - len(documents_with_text),
                len(documents),
            )
        all_facts = [
            to_fact(document, id=document.id or "", metadata=document.metadata) for document in documents_with_text
        ]
        facts = [fact.moved(self.namespace) for fact in all_facts]
        self._delivery().add(facts, overwrite=True, progress=progress)
        return [fact.id for fact in facts]

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,  # noqa: ARG002 - LangChain's signature
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        refuse_unknown(options, _PER_CALL, "A call of the retriever")
        settings = {name: options.get(name, getattr(self, name)) for name in _PER_CALL}
        results = self._delivery().search(query, **settings)
        return [self._packed(_document(f.unit), f, score=f.hit.score, bank=f.hit.bank) for f in results]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun | None = None,  # noqa: ARG002 - LangChain's signature
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        return await asyncio.to_thread(self._get_relevant_documents, query, **options)


def _document(fact: Fact) -> Document:
    metadata = {name: value for name, value in (("title", fact.title), ("source", fact.source)) if value}
    return Document(fact.text, id=fact.id, metadata=metadata | dict(fact.metadata))
