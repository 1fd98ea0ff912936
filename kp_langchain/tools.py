"""Tools that give packs to an agent, and conversions between handles and texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, StructuredTool

from kp_core import Handle, KnowledgePack, find_handles
from kp_core.packs.handle import inert
from kp_core.packs.store import open_packs
from kp_core.packs.view import Packs, PackView

logger = logging.getLogger(__name__)


def create_pack_search_tool(
    retriever: BaseRetriever,
    store: Packs | PackView | str,
    *,
    name: str = "search_knowledge",
    description: str = "Search the knowledge base for facts about a question.",
) -> BaseTool:
    """A tool that searches with `retriever`. The model gets handles; the artifact is documents with text and source.

    The tool reads the retriever's namespace of `store`. For a retriever without one, pass a view of the store.
    """
    namespace = getattr(retriever, "namespace", None)
    store = _opened(store)
    store = store.view(namespace) if namespace and not isinstance(store, PackView) else store

    def search(query: str) -> tuple[str, list[Document]]:
        documents = retriever.invoke(query)
        content = "\n".join(document.page_content for document in to_handles(documents, store))
        return content or "Nothing was found.", resolve_documents(documents, store)

    return StructuredTool.from_function(
        search, name=name, description=description, response_format="content_and_artifact"
    )


def resolve_documents(found: Iterable[Document | str], store: Packs | PackView | str) -> list[Document]:
    """Documents and handles as documents of text, to show to people and to cite.

    A document's text replaces its handle; all else stays. A string, or a document from another retriever, gives one
    document for each of its handles. Handles inside the text of a fact are not resolved. Pass a view,
    `store.view("mine")`, wherever handles come from somebody else: a store is read in all its namespaces.
    """
    documents, store = list[Document](), _opened(store)
    for item in found:
        document = Document(item) if isinstance(item, str) else item
        text, handle = document.page_content, own_handle(document)
        handles: list[Handle] = []
        if handle is None or text == str(handle):
            handles = [each for *_, each in find_handles(text)]
        elif "kp: " in text:  # A retriever made a handle in it inert.
            pack = _peek(store, handle)
            handles = [handle] if pack is not None and inert(pack.text) == text else []
        resolved = [(each, pack) for each in handles if (pack := _peek(store, each)) is not None]
        if not resolved:
            documents.append(document)
        for each, pack in resolved:
            origin = {name: pack.provenance[name] for name in ("title", "source") if name in pack.provenance}
            metadata = {**origin, "handle": str(each), **document.metadata}
            documents.append(Document(pack.text, id=document.id, metadata=metadata))
    return documents


def to_handles(documents: Iterable[Document], store: Packs | PackView | str) -> list[Document]:
    """Documents with text as documents with handles, for use behind a reranker and before the model.

    A handle in the metadata is used only if its pack has the document's text, up to blanks around it. A text that was
    rewritten goes to the model as it is, with a logged warning.
    """
    documents_out, store = [], _opened(store)
    for document in documents:
        handle, text = own_handle(document), document.page_content
        if handle is not None and text != str(handle):
            pack = _peek(store, handle)
            if pack is not None and inert(pack.text).strip() == inert(text).strip():
                document = Document(str(handle), id=document.id, metadata=document.metadata)  # noqa: PLW2901
            else:
                changed = "The text of document %s is not that of %s any more; it goes as text."
                logger.warning(changed, document.id, handle)
        documents_out.append(document)
    return documents_out


def own_handle(document: Document) -> Handle | None:
    """The handle that one of our retrievers put into the metadata of `document`, if any."""
    record = document.metadata.get("kp", document.metadata)
    name = record.get("handle") if isinstance(record, dict) else None
    handles = find_handles(name) if isinstance(name, str) else []
    return handles[0][2] if handles and str(handles[0][2]) == name else None


def _opened(store: Packs | PackView | str) -> Packs | PackView:
    """`store`, or the one at this path. Raises `PackError` for anything else."""
    return store if isinstance(store, PackView) else open_packs(store)


def _peek(store: Packs | PackView, handle: Handle) -> KnowledgePack | None:
    """The pack of `handle`, unless it is in a namespace that a view may not read."""
    if isinstance(store, PackView):
        return store.source.peek(handle) if handle.namespace in store.namespaces else None
    return store.peek(handle)
