"""`KnowledgePackIndex`: a fact store as an index of LlamaIndex, and its vector store."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

from llama_index.core import MockEmbedding, Settings, StorageContext, VectorStoreIndex, chat_engine
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.ingestion import run_transformations
from llama_index.core.llms import LLM
from llama_index.core.llms.utils import LLMType
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE, CITATION_REFINE_TEMPLATE
from llama_index.core.schema import BaseNode, Document, TransformComponent
from llama_index.core.utils import iter_batch
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from kp_core import Embedder, Fact, FactStore, Session
from kp_core.compiling import open_facts
from kp_core.delivery import Delivery
from kp_core.engines.request import CompiledFor, refuse_unknown
from kp_core.errors import FactError, PromptError
from kp_core.packs.store import open_packs
from kp_core.packs.view import Packs
from kp_llamaindex.llm import KnowledgePackLLM
from kp_llamaindex.messages import pack_place
from kp_llamaindex.nodes import REF_DOC, REF_HASH, NumberSources, to_fact, to_node, to_where
from kp_llamaindex.retriever import PACKING, KnowledgePackRetriever, check_content, delivery_of, parameters

__all__ = ["KnowledgePackIndex", "KnowledgePackVectorStore"]

logger = logging.getLogger(__name__)

_NAMED = 500
_ENGINES: tuple[Callable[..., Any], ...] = (
    RetrieverQueryEngine.from_args,
    chat_engine.CondensePlusContextChatEngine.from_defaults,
    chat_engine.CondenseQuestionChatEngine.from_defaults,
    chat_engine.ContextChatEngine.from_defaults,
    chat_engine.SimpleChatEngine.from_defaults,
)
_RETRIEVAL = PACKING | {"similarity_top_k", "probes", "filters", "score_cutoff", "rerank", "content"}
_SETTINGS = _RETRIEVAL.union(*map(parameters, _ENGINES))


class KnowledgePackIndex(VectorStoreIndex):
    """A `VectorStoreIndex` of LlamaIndex over a fact store, whose nodes come as packs of `store`.

    The pack of a node holds what a text node would give the model: its text, and the metadata that is not in
    `excluded_llm_metadata_keys`. The fact store embeds the same text, whatever embedding the node has. Blank nodes are
    left out. A node is known if its id is stored, or if the same text came from a document with the same text and
    metadata, as documents get new ids whenever they are read.

    `compiled_for` is by default the position of the first node in LlamaIndex's own question prompt (see `pack_place`).
    Other `packing` is as for `KnowledgePackRetriever`.

    `llm` is the default LLM of the engines: a `KnowledgePackLLM` on the same engine, store and namespace unless given.
    An LLM of another class cannot resolve handles, so it gets nodes as text. `transformations` cut documents into
    nodes; by default they are those of LlamaIndex's settings.

    Raises `OptionError` for an option that neither retrievers nor engines have. For an index of your own, see
    `KnowledgePackPostprocessor`.

    Without `fact_store`, one is made, in Chroma at `path` or in memory. Its embedder is `embedder` (ours or
    LlamaIndex's), else the `embed_model` set in LlamaIndex's settings, else the bundled MiniLM.
    """

    _vector_store: KnowledgePackVectorStore

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        engine: Session,
        store: Packs,
        fact_store: FactStore | None = None,
        *,
        embedder: Embedder | BaseEmbedding | None = None,
        path: str | os.PathLike[str] | None = None,
        namespace: str = "default",
        compiled_for: CompiledFor | None = None,
        llm: LLM | None = None,
        transformations: Sequence[TransformComponent] | None = None,
        progress: bool = True,
        **packing: Any,
    ) -> None:
        store = open_packs(store)
        self.llm: LLM = llm or KnowledgePackLLM(engine=engine, store=store, namespaces=(namespace,))
        if compiled_for is None:
            compiled_for = pack_place(DEFAULT_TEXT_QA_PROMPT_SEL, self.llm)
        self._packing = {"engine": engine, "namespace": namespace, "compiled_for": compiled_for, **packing}
        if fact_store is None and embedder is None:
            settled = Settings._embed_model  # noqa: SLF001 - the public attribute would create one of OpenAI's
            embedder = None if isinstance(settled, MockEmbedding) else settled
        self.store, self.fact_store = store, open_facts(fact_store, embedder, path)
        self.delivery = delivery_of(self.fact_store, store, **self._packing)
        vectors = KnowledgePackVectorStore(delivery=self.delivery, progress=progress)
        parts = StorageContext.from_defaults(vector_store=vectors)
        # The fact store embeds.
        super().__init__([], embed_model=MockEmbedding(embed_dim=1), storage_context=parts)
        if transformations is not None:
            self._transformations = list(transformations)

    @classmethod
    def from_documents(cls, documents: Sequence[Document], **settings: Any) -> Self:  # type: ignore[override]
        """An index over `documents`, which its transformations cut into nodes; `settings` are those of the class."""
        index = cls(**settings)
        index.insert_nodes(run_transformations(list(documents), index._transformations))
        return index

    @classmethod
    def from_nodes(cls, nodes: Sequence[BaseNode], **settings: Any) -> Self:
        """An index over `nodes`; `settings` are those of the class."""
        index = cls(**settings)
        index.insert_nodes(nodes)
        return index

    @classmethod
    def from_vector_store(cls, vector_store: BasePydanticVectorStore, *_: Any, **__: Any) -> Self:
        """Not for vector stores of others: raises `FactError`, which says how to pack what they find."""
        raise FactError(
            f"{type(vector_store).__name__} is no fact store. Keep your index, and pack what it finds: "
            "`index.as_query_engine(llm=llm, node_postprocessors=[KnowledgePackPostprocessor(engine=..., store=...)])`."
        )

    def as_retriever(self, **settings: Any) -> KnowledgePackRetriever:
        """A retriever; `settings` are those of `KnowledgePackRetriever`."""
        # LlamaIndex gives it the settings of the engine, too.
        refuse_unknown(settings, _SETTINGS, f"A retriever or an engine of {type(self).__name__}")
        retrieval = {name: value for name, value in settings.items() if name in _RETRIEVAL}
        return KnowledgePackRetriever(self.fact_store, self.store, **self._packing | retrieval)

    def as_query_engine(
        self, llm: LLMType | None = None, *, citations: bool = False, **settings: Any
    ) -> BaseQueryEngine:
        """A `RetrieverQueryEngine`; `settings` are those of the retriever and of `RetrieverQueryEngine.from_args`.

        With `citations` the prompt asks for sources by number: `response.source_nodes[n - 1]` is source n. For a
        `text_qa_template`, packs are compiled for their place there unless `compiled_for` names another.
        """
        llm = llm or self.llm
        settings = self._readable(llm, settings)
        template = settings.get("text_qa_template")
        if citations:
            prompts = {"text_qa_template": CITATION_QA_TEMPLATE, "refine_template": CITATION_REFINE_TEMPLATE}
            numbered = [*settings.get("node_postprocessors", ()), NumberSources()]
            settings = {**prompts, **settings, "node_postprocessors": numbered}
        elif template and isinstance(llm, KnowledgePackLLM) and settings.get("content") != "text":
            with suppress(PromptError):  # The place differs from question to question.
                settings = {"compiled_for": pack_place(template, llm), **settings}
        return super().as_query_engine(llm, **settings)

    def as_chat_engine(
        self, chat_mode: ChatMode = ChatMode.BEST, llm: LLMType | None = None, **settings: Any
    ) -> BaseChatEngine:
        """A chat engine; `settings` are those of the retriever and of the engine's `from_defaults`."""
        llm = llm or self.llm
        return super().as_chat_engine(chat_mode, llm, **self._readable(llm, settings))

    def _readable(self, llm: LLMType, settings: dict[str, Any]) -> dict[str, Any]:
        """`settings`, with nodes as text for an LLM that does not resolve handles."""
        check_content(settings.get("content", "text"))
        if isinstance(llm, KnowledgePackLLM) or settings.get("content") == "text":
            return settings
        logger.warning("%s resolves no handles; nodes go to it as text.", type(llm).__name__)
        return {**settings, "content": "text"}

    def refresh_ref_docs(self, documents: Sequence[Document], **_: Any) -> list[bool]:
        """Insert new documents and update changed ones. Returns for each of `documents` whether it was either."""
        facts = self._vector_store.facts_with(REF_DOC, [document.id_ for document in documents])
        hashes = {fact.metadata[REF_DOC]: fact.metadata.get(REF_HASH) for fact in facts}
        changed = [hashes.get(document.id_) != document.hash for document in documents]
        for document, is_changed in zip(documents, changed, strict=True):
            if is_changed:
                self.update_ref_doc(document)
        return changed

    async def arefresh_ref_docs(self, documents: Sequence[Document], **_: Any) -> list[bool]:
        """As `refresh_ref_docs`, in a thread."""
        return await asyncio.to_thread(self.refresh_ref_docs, documents)


class KnowledgePackVectorStore(BasePydanticVectorStore):
    """The facts of a `KnowledgePackIndex`, as a vector store of LlamaIndex that finds them as packs.

    As `vector_store` of an `IngestionPipeline`, it follows its changes and deletions. A pipeline stores only nodes with
    embeddings, but the fact store embeds: `MockEmbedding(embed_dim=1)` will do as the last of its transformations.
    """

    stores_text: bool = True
    is_embedding_query: bool = False
    delivery: Delivery = Field(exclude=True, repr=False)
    progress: bool = Field(default=True, exclude=True)

    @property
    def client(self) -> FactStore:
        """The fact store."""
        store: FactStore = self.delivery.facts
        return store

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """Add nodes and compile their packs."""
        nodes_with_text = [node for node in nodes if node.get_content().strip()]
        if len(nodes_with_text) < len(nodes):
            logger.warning("%d of %d nodes are blank and were left out.", len(nodes) - len(nodes_with_text), len(nodes))
        facts = [to_fact(node) for node in nodes_with_text]
        known = self.facts_with(REF_HASH, [fact.metadata[REF_HASH] for fact in facts])
        stored = {(fact.text, fact.metadata[REF_HASH]): fact for fact in known}
        facts = [stored.setdefault((fact.text, fact.metadata[REF_HASH]), fact) for fact in facts]
        # Documents may share a text; each keeps it when the other is deleted.
        self.delivery.add(facts, overwrite=True, progress=self.progress)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        """Remove the nodes of a document, and their packs."""
        self.delivery.delete(where={REF_DOC: ref_doc_id})

    async def async_add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """As `add`, in a thread."""
        return await asyncio.to_thread(self.add, nodes)

    async def adelete(self, ref_doc_id: str, **_: Any) -> None:
        """As `delete`, in a thread."""
        await asyncio.to_thread(self.delete, ref_doc_id)

    async def aquery(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        """As `query`, in a thread."""
        return await asyncio.to_thread(self.query, query)

    def delete_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **_: Any) -> None:
        """Remove nodes, and their packs."""
        self.delivery.delete(node_ids, where=None if filters is None else to_where(filters))

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes that match, as text."""
        conditions = None if filters is None else to_where(filters)
        return [
            to_node(fact)
            for fact in self.client.facts(ids=node_ids, where=conditions, namespace=self.delivery.namespace)
        ]

    def clear(self) -> None:
        """Remove all nodes, and their packs."""
        self.delete_nodes([fact.id for fact in self.client.facts(namespace=self.delivery.namespace)])

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        """The nodes nearest to the query's text. Raises `FactError` for other modes, and for a query without text."""
        if query.mode != VectorStoreQueryMode.DEFAULT or not query.query_str:
            raise FactError(f"Got a query of mode {query.mode.value!r}, {query.query_str!r}; expected words to embed.")
        tests = [to_where(query.filters)] if query.filters else []
        tests += [{REF_DOC: {"$in": query.doc_ids}}] if query.doc_ids else []
        tests += [{"kp:id": {"$in": query.node_ids}}] if query.node_ids else []
        found = self.delivery.search(query.query_str, query.similarity_top_k, where={"$and": tests} if tests else None)
        nodes = [to_node(each.unit, str(each.handle or "")) for each in found]
        return VectorStoreQueryResult(
            nodes=nodes, similarities=[each.hit.score for each in found], ids=[node.node_id for node in nodes]
        )

    def facts_with(self, field: str, values: Iterable[object]) -> Iterator[Fact]:
        """The facts whose metadata `field` has one of these values."""
        for batch in iter_batch(dict.fromkeys(values), _NAMED):
            yield from self.client.facts(where={field: {"$in": batch}}, namespace=self.delivery.namespace)
