"""Tools that give packs to an agent, and conversions between handles and texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, StructuredTool

from kp_core import Handle, KnowledgePack, Packs, PackView, find_handles
from kp_core.packs.handle import inert
from kp_core.packs.store import open_packs

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
    if namespace and not isinstance(store, PackView):
        store = open_packs(store).view(namespace)

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
    documents, peek = list[Document](), _peeking(store)
    for item in found:
        document = Document(item) if isinstance(item, str) else item
        text, own = document.page_content, own_handle(document)
        handles = [handle for *_, handle in find_handles(text)]
        if own is not None and text != str(own):
            # A retriever made a handle in it inert.
            is_its_text = "kp: " in text and (pack := peek(own)) is not None and inert(pack.text) == text
            handles = [own] if is_its_text else []
        resolved = [(handle, pack) for handle in handles if (pack := peek(handle)) is not None]
        if not resolved:
            documents.append(document)
        for handle, pack in resolved:
            origin = {name: pack.provenance[name] for name in ("title", "source") if name in pack.provenance}
            metadata = {**origin, "handle": str(handle), **document.metadata}
            documents.append(Document(pack.text, id=document.id, metadata=metadata))
    return documents


def to_handles(documents: Iterable[Document], store: Packs | PackView | str) -> list[Document]:
    """Documents with text as documents with handles, for use behind a reranker and before the model.

    A handle in the metadata is used only if its pack has the document's text, up to blanks around it. A text that was
    rewritten goes to the model as it is, with a logged warning.
    """
    handed, peek = list[Document](), _peeking(store)
    for document in documents:
        handle, text = own_handle(document), document.page_content
        if handle is None or text == str(handle):
            handed.append(document)
        elif (pack := peek(handle)) is not None and inert(pack.text).strip() == inert(text).strip():
            handed.append(Document(str(handle), id=document.id, metadata=document.metadata))
        else:
            changed = "The text of document %s is not that of %s any more; it goes as text."
            logger.warning(changed, document.id, handle)
            handed.append(document)
    return handed


def own_handle(document: Document) -> Handle | None:
    """The handle that one of our retrievers put into the metadata of `document`, if any."""
    record = document.metadata.get("kp", document.metadata)
    name = record.get("handle") if isinstance(record, dict) else None
    handles = find_handles(name) if isinstance(name, str) else []
    return handles[0][2] if handles and str(handles[0][2]) == name else None


def _peeking(store: Packs | PackView | str) -> Callable[[Handle], KnowledgePack | None]:
    """What returns the pack of a handle, unless a view may not read it. Raises `PackError` for what is no store."""
    if isinstance(store, PackView):
        return lambda handle: store.source.peek(handle) if handle.namespace in store.namespaces else None
    return open_packs(store).peek
