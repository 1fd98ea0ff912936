"""Retrievers whose documents have packs, their tool for agents, and conversions between handles and texts."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import DeleteResponse, UpsertResponse
from langchain_core.indexing.base import DocumentIndex
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import RunnableConfig, set_config_context
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kp_core import Embedder, Fact, FactStore, Handle, KnowledgePack, Message, Packs, PackView, Question, Session
from kp_core.banks import Filter, Hit
from kp_core.banks.compiling import Unit, open_facts
from kp_core.banks.delivery import KV, Delivery, Found, Precompile
from kp_core.errors import FactError, OptionError
from kp_core.events import subscribe
from kp_core.packs.codec import Compression
from kp_core.packs.handle import find_handles, inert
from kp_core.packs.store import open_packs
from kp_core.plan.request import CompiledFor, refuse_unknown
from kp_core.prompt.conversation import SLOT, text_of
from kp_methods.edit import How, edit_fact

logger = logging.getLogger(__name__)

_LOOKED_UP = 200
_OF_SEARCH = ("k", "probes", "where", "score_threshold")
_PER_CALL = (*_OF_SEARCH, "grade")
_PACKING = ("compiled_for", "compress", "kv", "namespace", "precompile")
_HELPS = "Does this help to answer the question below?\n\n{}"


class PackRetriever(BaseRetriever):
    """A retriever whose documents have packs in `store`.

    By default a document's `page_content` is its text, in which nothing resolves as a handle. With `content="handle"`
    it is the handle alone, for models that resolve it. `engine` makes packs of documents that have none, and computes
    their KV for the position `compiled_for` (for a prompt: `pack_place(prompt)`) when it is idle, or with
    `precompile="now"` before the search returns; without an engine they come as text. `kv` and `compress` are those of
    `kp_core.banks.delivery.Delivery`.
    """

    store: Annotated[Packs, BeforeValidator(open_packs)] = Field(exclude=True)
    engine: Session | None = Field(default=None, exclude=True)
    namespace: str = "default"
    content: Literal["text", "handle"] = "text"
    compiled_for: CompiledFor = Field(default="user", exclude=True)
    kv: KV = "stored"
    precompile: Precompile = "idle"
    compress: Compression = "none"

    _hints: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **fields: Any) -> None:
        # Here and not in a validator, because Pydantic would wrap the error.
        refuse_unknown(fields, type(self).model_fields, type(self).__name__, self._hints)
        super().__init__(**fields)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._delivery()  # It raises for an invalid namespace.
        return self

    def _delivery(self, facts: FactStore | None = None, **settings: Any) -> Delivery:
        settings |= {name: getattr(self, name) for name in _PACKING}
        return Delivery(facts, self.engine, self.store, **settings)

    def _packed(self, document: Document, found: Found, **known: object) -> Document:
        """`document` with the pack that was `found` for it, and with further metadata (`known`)."""
        handle = None if found.handle is None else str(found.handle)
        known = {name: value for name, value in known.items() if value is not None}
        added = {**known, "text": document.page_content} | ({"handle": handle} if handle else {})
        metadata = added | document.metadata | {"kp": {"handle": handle, **known, "id": document.id}}
        content = found.content if self.content == "handle" else inert(document.page_content)
        return document.model_copy(update={"page_content": content, "metadata": metadata})


class WrappedRetriever(PackRetriever):
    """The documents that `retriever` finds, with packs; order, text, id and metadata stay.

    `handle`, `text` and `kp` are added to the metadata, the first two only if it has no such field. Other fields are
    those of `KnowledgePackRetriever`: `namespace`, `content`, `compiled_for`, `precompile`, `kv`, `compress`. Options
    of a call go to `retriever`. After changes of the documents that it finds, call `sync`.
    """

    retriever: BaseRetriever = Field(exclude=True)
    _hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (*_OF_SEARCH, "search_kwargs", "search_type"),
        'The retriever inside searches: give it to that, e.g. `as_retriever(search_kwargs={"k": 4})`.',
    ) | {"grade": "Only a `KnowledgePackRetriever` over a fact store grades; ask `KnowledgePackDecisions` behind this."}

    def compile(self, documents: Iterable[Document], *, progress: bool = True) -> list[str]:
        """Compile the packs of `documents` that have none, before anybody asks; returns the handles of all.

        For the documents that the vector store has by now. Those that come later are compiled when they are found.
        """
        documents = list(documents)
        if other := next((each for each in documents if not isinstance(each, Document)), None):
            raise FactError(f"Got {other!r} to compile; expected a LangChain `Document`.")
        facts = (_to_fact(document, self.namespace) for document in documents if self._has_text(document))
        return [str(handle) for handle in self._delivery().compile(facts, progress=progress) if handle is not None]

    def sync(self, documents: Iterable[Document] | None = None) -> list[str]:
        """Delete the packs of documents that were changed or deleted in the vector store; returns their handles.

        A pack is kept if the document that it was compiled from still has its text, or the retriever finds another that
        has. `documents` are all that there are now, for vector stores that cannot look up ids, and for a retriever with
        a filter: what only the filter no longer finds stays otherwise. Packs of this namespace that were made of facts
        or documents and cannot be traced go too, so keep one namespace for one collection. Packs that were put by hand
        stay. Raises `FactError` if documents cannot be looked up. Nothing is deleted if the vector store fails.
        """
        source = self.retriever.vectorstore if isinstance(self.retriever, VectorStoreRetriever) else self.retriever

        def texts(packs: Mapping[Handle, KnowledgePack]) -> Iterator[str]:
            if not isinstance(source, VectorStore):
                raise NotImplementedError
            ids = list({pack.provenance.get("id", "") for pack in packs.values()} - {""})
            found = set[str]()
            for at in range(0, len(ids), _LOOKED_UP):
                found |= {document.page_content for document in _by_ids(source, ids[at : at + _LOOKED_UP])}
            yield from found
            # A pack is traced to one document; another may have its text.
            for text in [pack.text for pack in packs.values() if found and pack.text not in found]:
                yield from (document.page_content for document in self.retriever.invoke(text))

        given = texts if documents is None else lambda _: (document.page_content for document in documents)
        try:
            removed = self._delivery().sync(given)
        except NotImplementedError as error:
            name = type(source).__name__
            raise FactError(f"{name} looks up no ids; give all its documents: `sync(documents)`.") from error
        return [str(handle) for handle in removed]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        since = self.store.cancelled
        return self._delivered(self.retriever.invoke(query, config, **options), config, since)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        since = self.store.cancelled
        documents = await self.retriever.ainvoke(query, config, **options)
        return await asyncio.to_thread(self._delivered, documents, config, since)

    def _delivered(self, documents: Sequence[Document], config: RunnableConfig, since: object) -> list[Document]:
        """`documents` with packs, except blank ones, and those that one of our retrievers returned as handles."""
        todo = {at: _to_fact(each, self.namespace) for at, each in enumerate(documents) if self._has_text(each)}
        with set_config_context(config) as context:
            hits = [Hit(fact, 0.0) for fact in todo.values()]
            results = context.run(partial(self._delivery().deliver, hits, since=since))
        found = dict(zip(todo, results, strict=True))
        return [self._packed(document, found[at]) if at in found else document for at, document in enumerate(documents)]

    def _has_text(self, document: Document) -> bool:
        """Whether a document is text to compile: not blank, and not the handle that a retriever of ours made of one.

        A handle counts with the text that it stands for, which nobody has who only knows the handle.
        """
        handle, text = own_handle(document), document.metadata.get("text")
        if handle is None or document.page_content != str(handle) or not isinstance(text, str):
            return bool(document.page_content.strip())
        return self.store.handle(text, handle.namespace) != handle


class KnowledgePackRetriever(PackRetriever, DocumentIndex):
    """Finds facts of `namespace` in `fact_store` and returns each as a document. See `PackRetriever` for the rest.

    `langchain_core.indexing.index` can fill it.

    `handle`, `score`, `bank` (if banks were searched), `title`, `source` and `text` are added to the fact's metadata,
    unless it has such a field or the value is empty. `kp` holds `handle`, `score`, `id` and `bank`. With `unit="bank"`
    a document is a whole bank of about twenty facts, one per line, with `unit="document"` all facts of a source.

    `probes`, `where` and `score_threshold` are those of `Delivery.search`. Like `k`, they may also be given to
    `invoke`, and so may `grade`: documents of which `engine` gives less than this probability that they help to
    answer are left out (`Session.decide`, a short pass for each). Scores are cosines.

    Raises `OptionError` for options that do not exist, `FactError` for a blank question and a store without facts.
    """

    fact_store: FactStore = Field(exclude=True)
    k: int = Field(default=4, ge=1)
    probes: int | None = Field(default=None, ge=1)
    where: dict[str, Any] | None = None
    score_threshold: float | None = None
    grade: float | None = Field(default=None, ge=0, le=1)
    unit: Unit = "fact"

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
        progress: bool = True,
        **fields: Any,
    ) -> Self:
        """A retriever over `facts`: adds them to the fact store, and compiles their packs into `store`.

        Without `fact_store`, one is made with `embedder` (by default the bundled MiniLM), in Chroma at `path` or in
        memory. Facts with a namespace of their own keep it, and this retriever does not find them.
        """
        refuse_unknown(fields, (*cls.model_fields, *inspect.signature(cls.from_facts).parameters), cls.__name__)
        retriever = cls(fact_store=open_facts(fact_store, embedder, path), store=store, engine=engine, **fields)
        retriever._delivery().add(facts, progress=progress)
        return retriever

    @classmethod
    def from_documents(cls, documents: Iterable[Document], *, progress: bool = True, **settings: Any) -> Self:
        """As `from_facts`, for documents, with the same `settings`. Facts with the documents' ids are replaced."""
        retriever = cls.from_facts([], **settings)
        retriever.upsert(list(documents), progress=progress)
        return retriever

    @classmethod
    def from_retriever(cls, retriever: BaseRetriever, *, store: Packs, **fields: Any) -> WrappedRetriever:
        """A retriever that adds packs to what `retriever` finds, with `compile` and `sync`.

        `fields` are those of `kp_langchain.retriever.WrappedRetriever`.
        """
        if not isinstance(retriever, BaseRetriever):
            expected = "a LangChain retriever, e.g. `vectorstore.as_retriever()`"
            raise FactError(f"Got {type(retriever)}; expected {expected}.")
        return WrappedRetriever(retriever=retriever, store=store, **fields)

    def upsert(self, items: Sequence[Document], /, *, progress: bool = False, **kwargs: Any) -> UpsertResponse:
        """Add documents, or replace those of the same ids, and compile their packs. Blank documents are left out."""
        refuse_unknown(kwargs, ("progress",), "upsert")
        if blank := [item.id or "" for item in items if not item.page_content.strip()]:
            logger.warning("%d of %d documents are blank and were left out.", len(blank), len(items))
        facts = [_to_fact(item, self.namespace, item.metadata) for item in items if item.page_content.strip()]
        self._delivery().add(facts, overwrite=True, progress=progress)
        return UpsertResponse(succeeded=[fact.id for fact in facts], failed=blank)

    def delete(
        self, ids: list[str] | None = None, *, where: Filter | None = None, source: str | None = None, **kwargs: Any
    ) -> DeleteResponse:
        """Delete facts by id, filter or source document, and the packs that no fact uses any more."""
        refuse_unknown(kwargs, ("where", "source"), "delete")
        removed_ids = [fact.id for fact in self._delivery().delete(ids, where=where, source=source)]
        return DeleteResponse(num_deleted=len(removed_ids), succeeded=removed_ids, num_failed=0, failed=[])

    def edit(self, doc_id: str, old: str, new: str, *, how: How = "amend") -> Document:
        """Correct `old` to `new` in a document, and return it; see `kp_methods.edit.edit_fact`."""
        return _to_document(edit_fact(self._delivery(), doc_id, old, new, how=how))

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:
        """The documents with these ids, as they were stored; unknown ids are skipped."""
        refuse_unknown(kwargs, ("ids",), "get")
        return [_to_document(fact) for fact in self.fact_store.facts(ids=list(ids), namespace=self.namespace)]

    def _delivery(self, facts: FactStore | None = None, **settings: Any) -> Delivery:
        return super()._delivery(self.fact_store, unit=self.unit)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        refuse_unknown(options, _PER_CALL, "A call of the retriever")
        settings = {name: options.get(name, getattr(self, name)) for name in _OF_SEARCH}
        with set_config_context({"callbacks": run_manager.get_child()}) as context:
            results = context.run(self._delivery().search, query, **settings)
        if (grade := options.get("grade", self.grade)) is not None:
            if isinstance(grade, bool) or not isinstance(grade, int | float) or not 0 <= grade <= 1:
                raise OptionError(f"Got grade={grade!r}; expected a number from 0 to 1.")
            results = [result for result in results if self._helps(result, query) >= grade]
        return [self._packed(_to_document(f.unit), f, score=f.hit.score, bank=f.hit.bank) for f in results]

    def _helps(self, found: Found, query: str) -> float:
        """The probability that what was `found` helps to answer. Its pack stands where it was compiled for."""
        if self.engine is None:
            raise OptionError("Got grade= without an engine; expected the `engine` that grades.")
        role, state = self.compiled_for, list[Message]()
        for message in [{"role": role, "content": SLOT}] if isinstance(role, str) else role:
            before, slot, _ = text_of(message).partition(SLOT)
            state.append({**message, "content": before + found.content if slot else before})
            if slot:  # What stands behind the pack there is left out.
                break
        question = Question(_HELPS.format(inert(query)))
        decided = self.engine.decide(state, {0: question}, view=self.store.view(self.namespace), rotations="all")
        return decided.answers[0].probabilities["yes"]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        search = partial(self._get_relevant_documents, run_manager=run_manager.get_sync())
        return await asyncio.to_thread(search, query, **options)


def _by_ids(vectors: Any, ids: Sequence[str]) -> list[Document]:
    """The documents with these ids. Raises `NotImplementedError` if `vectors` cannot look up ids."""
    try:
        found: list[Document] = vectors.get_by_ids(list(ids))
    except ValidationError:  # langchain-chroma 1.1 fails for documents without metadata.
        stored = vectors.get(list(ids))
        rows = zip(stored["documents"], stored["metadatas"], stored["ids"], strict=True)
        found = [Document(text, metadata=about or {}, id=own_id) for text, about, own_id in rows if text is not None]
    return found


def _to_fact(document: Document, namespace: str, metadata: Mapping[str, Any] = {}) -> Fact:
    """A document's text as a fact. The fact takes `title` and `source` from the document, if they are strings."""
    origin = (document.metadata.get(name) for name in ("title", "source"))
    title, source = (value if isinstance(value, str) else "" for value in origin)
    return Fact(document.page_content, title, source, metadata, document.id or "", namespace)


def _to_document(fact: Fact) -> Document:
    metadata = {name: value for name, value in (("title", fact.title), ("source", fact.source)) if value}
    return Document(fact.text, id=fact.id, metadata=metadata | dict(fact.metadata))


def create_pack_search_tool(
    retriever: BaseRetriever,
    store: Packs | PackView | str,
    *,
    name: str = "search_knowledge",
    description: str = "Search the knowledge base for facts about a question.",
) -> BaseTool:
    """A tool that searches with `retriever`. The model gets handles; the artifact is their documents, with sources.

    `resolve_documents(message.artifact, store)` reads their texts. They are in neither, because a checkpoint would keep
    them when they are deleted. The tool reads the retriever's namespace of `store`. For a retriever without one, pass a
    view of the store.
    """
    namespace = getattr(retriever, "namespace", None)
    if namespace and not isinstance(store, PackView):
        store = open_packs(store).view(namespace)

    def search(query: str) -> tuple[str, list[Document]]:
        documents = to_handles(retriever.invoke(query), store)
        content = "\n".join(document.page_content for document in documents)
        return content or "Nothing was found.", [_without_text(document) for document in documents]

    return StructuredTool.from_function(
        search, name=name, description=description, response_format="content_and_artifact"
    )


def _without_text(document: Document) -> Document:
    """A document of a handle without the text in its metadata; any other as it is."""
    if document.page_content != str(own_handle(document)):
        return document
    metadata = {name: value for name, value in document.metadata.items() if name != "text"}
    return document.model_copy(update={"metadata": metadata})


def resolve_documents(
    found: Iterable[Document | Mapping[str, Any] | str], store: Packs | PackView | str
) -> list[Document]:
    """Documents and handles as documents of text, to show to people and to cite.

    A document's text replaces its handle; all else stays, also a handle whose pack is deleted. A document may be the
    mapping that a checkpointer makes of it. A string, or a document from another retriever, gives one document for each
    of its handles. Handles inside the text of a fact are not resolved. Pass a view, `store.view("mine")`, wherever
    handles come from somebody else: a store is read in all its namespaces.
    """
    documents, peek = list[Document](), _peeking(store)
    for item in found:
        document = Document(item) if isinstance(item, str) else Document.model_validate(item)
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


def _tell(name: str, counts: Mapping[str, float | str]) -> None:
    """Pass an event on as `on_custom_event` of the run in which it happens; one in the background belongs to none."""
    with suppress(RuntimeError):  # Not in a run.
        dispatch_custom_event(name, dict(counts))


subscribe(_tell)
