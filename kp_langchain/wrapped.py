"""`WrappedRetriever`: adds packs to the documents of any retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.indexing import DeleteResponse, UpsertResponse
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import Field

from kp_core.errors import FactError
from kp_core.facts import Fact, Hit
from kp_langchain.documents import PackRetriever, to_fact
from kp_langchain.tools import own_handle

__all__ = ["WrappedRetriever"]


class WrappedRetriever(PackRetriever):
    """The documents that `retriever` finds, with packs; order, text, id and metadata stay.

    `handle`, `text` and `kp` are added to the metadata, the first two only if it has no such field. Options of a call
    go to `retriever`. Documents that are added and deleted here go to its vector store; packs of replaced or deleted
    texts are removed. A retriever other than the plain one of a vector store is read-only.
    """

    retriever: BaseRetriever = Field(exclude=True)

    def upsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:  # noqa: ANN401
        """Add `items` to the vector store, with its own options; documents with the same ids are replaced."""
        vectors = self._vectors()
        old = _held(vectors, [item.id for item in items if item.id])
        ids = vectors.add_documents(list(items), **kwargs)
        self._forget({document.page_content for document in old} - {item.page_content for item in items})
        return UpsertResponse(succeeded=ids, failed=[])

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> DeleteResponse:  # noqa: ANN401
        """Delete documents by id from the vector store; raises `FactError` without ids."""
        if ids is None:
            raise FactError("Got nothing to delete by; expected ids.")
        vectors = self._vectors()
        old_documents = _held(vectors, ids)
        if vectors.delete(ids, **kwargs) is False:
            return DeleteResponse(num_deleted=0, succeeded=[], num_failed=len(ids), failed=ids)
        self._forget({document.page_content for document in old_documents})
        return DeleteResponse(
            num_deleted=len(old_documents),
            succeeded=[document.id or "" for document in old_documents],
            num_failed=0,
            failed=[],
        )

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:  # noqa: ANN401, ARG002
        """The documents with these ids, as the vector store has them."""
        return _held(self._vectors(), list(ids))

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        return self._delivered(self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **options))

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        documents = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **options)
        return await asyncio.to_thread(self._delivered, documents)

    def _delivered(self, documents: Sequence[Document]) -> list[Document]:
        facts = [self._fact(document) for document in documents]
        delivered = iter(self._deliver(None).deliver([Hit(fact, 0.0) for fact in facts if fact is not None]))
        pairs = zip(documents, facts, strict=True)
        return [document if fact is None else self._packed(document, next(delivered)) for document, fact in pairs]

    def _fact(self, document: Document) -> Fact | None:
        """The fact for a pack; `None` for a blank text, and for a handle that one of our retrievers returned."""
        text = document.page_content
        if not text.strip() or text == str(own_handle(document)):
            return None
        return to_fact(document, namespace=self.namespace)

    def _vectors(self) -> VectorStore:
        if not isinstance(self.retriever, VectorStoreRetriever):
            raise FactError(f"{type(self.retriever).__name__} is only read here. Change what it reads from.")
        return self.retriever.vectorstore

    def _forget(self, texts: set[str]) -> None:
        for text in texts:
            self._deliver(None).forget(self.store.handle(text, self.namespace))


def _held(vectors: VectorStore, ids: list[str]) -> list[Document]:
    """The documents with these ids; none if the vector store cannot look up ids."""
    with suppress(NotImplementedError):
        return vectors.get_by_ids(ids) if ids else []
    return []
