"""Tools that bring packs to an agent, and the way back from handles to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, StructuredTool

from kp_core import Handle, PackStore, Session, find_handles

__all__ = ["create_pack_search_tool", "create_remember_tool", "resolve_documents", "to_handles"]

logger = logging.getLogger(__name__)


def create_pack_search_tool(
    retriever: BaseRetriever,
    store: PackStore,
    *,
    name: str = "search_knowledge",
    description: str = "Search the knowledge base for facts about a question.",
) -> BaseTool:
    """A tool that searches with `retriever`: handles to the model, documents with text and source as artifact."""

    def given(documents: Sequence[Document]) -> tuple[str, list[Document]]:
        content = "\n".join(document.page_content for document in documents)
        return content or "Nothing was found.", resolve_documents(documents, store)

    def search(query: str) -> tuple[str, list[Document]]:
        return given(retriever.invoke(query))

    async def asearch(query: str) -> tuple[str, list[Document]]:
        return given(await retriever.ainvoke(query))

    return StructuredTool.from_function(
        search, asearch, name=name, description=description, response_format="content_and_artifact"
    )


def create_remember_tool(
    engine: Session,
    store: PackStore,
    *,
    namespace: str = "default",
    name: str = "remember",
    description: str = "Keep a text in memory for the rest of the conversation and for later ones.",
) -> BaseTool:
    """A tool that compiles the text it is given into a pack of `namespace`, and answers with its handle.

    The text is prefilled while the tool runs, as memory of the system message; the artifact is the document.
    """

    def keep(text: str) -> tuple[str, list[Document]]:
        handle = store.put(engine.build_pack(text, namespace=namespace, compiled_for="system"))
        return str(handle), resolve_documents([str(handle)], store)

    async def akeep(text: str) -> tuple[str, list[Document]]:
        return await asyncio.to_thread(keep, text)

    return StructuredTool.from_function(
        keep, akeep, name=name, description=description, response_format="content_and_artifact"
    )


def resolve_documents(found: Iterable[Document | str], store: PackStore) -> list[Document]:
    """Documents and handles as documents of text: what to show to people, and to cite.

    A document's text replaces its handle, all else stays; a text may hold several handles, and gives one document for
    each. What resolves to nothing in `store` stays as it is.
    """
    documents: list[Document] = []
    for each in found:
        text = each if isinstance(each, str) else each.page_content
        about = {} if isinstance(each, str) else each.metadata
        identity = None if isinstance(each, str) else each.id
        packs = [(handle, store.peek(handle)) for _, _, handle in find_handles(text)]
        known = [(handle, pack) for handle, pack in packs if pack is not None]
        if not known:
            documents.append(Document(text, id=identity, metadata=about))
        for handle, pack in known:
            said = {name: pack.provenance[name] for name in ("title", "source") if name in pack.provenance}
            metadata = {**said, **about, "handle": str(handle)}
            documents.append(Document(pack.text, id=identity, metadata=metadata))
    return documents


def to_handles(documents: Iterable[Document], store: PackStore) -> list[Document]:
    """Documents with text as documents with handles: behind a reranker, before the model.

    A handle is taken from the metadata only if it is the handle of the very text. A text that was rewritten since goes
    to the model as it is, with a logged warning.
    """
    made = []
    for document in documents:
        name, text = document.metadata.get("handle"), document.page_content
        if not name or find_handles(text):
            made.append(document)
            continue
        handle = Handle.parse(name)
        if handle in (store.handle(text, handle.namespace), store.handle(text.strip() + "\n", handle.namespace)):
            made.append(Document(str(handle), id=document.id, metadata=document.metadata))
        else:
            logger.warning("The text of document %s is not that of %s any more; it goes as text.", document.id, handle)
            made.append(document)
    return made
