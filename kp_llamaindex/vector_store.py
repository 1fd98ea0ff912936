"""`KnowledgePackVectorStore`: a `KnowledgePackIndex` as a vector store of LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from kp_core import FactStore
from kp_core.errors import FactError
from kp_llamaindex.filters import to_where
from kp_llamaindex.nodes import REF_DOC, to_fact, to_node

__all__ = ["KnowledgePackVectorStore"]


class KnowledgePackVectorStore(TransformComponent, BasePydanticVectorStore):
    """The nodes of a `KnowledgePackIndex`, as a vector store of LlamaIndex that finds them as packs. The index makes
    it.

    As the vector store of an `IngestionPipeline`, it follows documents that change or are deleted, with their packs. It
    is also the pipeline's last step, which embeds nodes as the index does (a pipeline stores no nodes without
    embeddings).

        nodes = index.as_vector_store()
        pipeline = IngestionPipeline(
            transformations=[SentenceSplitter(), nodes], vector_store=nodes, docstore=SimpleDocumentStore()
        )
    """

    stores_text: bool = True
    is_embedding_query: bool = False
    index: Any = Field(exclude=True, repr=False)
    # A pipeline's cache tells stores apart by these fields.
    embedder: str
    namespace: str

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "KnowledgePackVectorStore"

    @property
    def client(self) -> FactStore:
        """The fact store."""
        store: FactStore = self.index.fact_store
        return store

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:  # noqa: ANN401, ARG002
        """Embed `nodes`, except blank ones."""
        nodes_with_text = [node for node in nodes if node.get_content().strip()]
        vectors = (
            self.client.embedder.embed([to_fact(node).text for node in nodes_with_text]) if nodes_with_text else ()
        )
        for node, vector in zip(nodes_with_text, vectors, strict=True):
            node.embedding = vector.tolist()
        return nodes

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:  # noqa: ANN401
        """Add nodes and compile their packs."""
        self.index.insert_nodes(nodes)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:  # noqa: ANN401
        """Remove the nodes of a document, and their packs."""
        self.index.delete_ref_doc(ref_doc_id)

    async def acall(self, nodes: Sequence[BaseNode], **_: Any) -> Sequence[BaseNode]:  # noqa: ANN401
        """As `__call__`, in a thread."""
        return await asyncio.to_thread(self, nodes)

    async def async_add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:  # noqa: ANN401
        """As `add`, in a thread."""
        return await asyncio.to_thread(self.add, nodes)

    async def adelete(self, ref_doc_id: str, **_: Any) -> None:  # noqa: ANN401
        """As `delete`, in a thread."""
        await asyncio.to_thread(self.delete, ref_doc_id)

    async def aquery(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:  # noqa: ANN401
        """As `query`, in a thread."""
        return await asyncio.to_thread(self.query, query)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """Remove nodes, and their packs."""
        self.index.delivery.delete(node_ids, where=None if filters is None else to_where(filters))

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes that match, as text."""
        conditions = None if filters is None else to_where(filters)
        return [to_node(fact) for fact in self.client.facts(ids=node_ids, where=conditions, namespace=self.namespace)]

    def clear(self) -> None:
        """Remove all nodes, and their packs."""
        self.delete_nodes([fact.id for fact in self.client.facts(namespace=self.namespace)])

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:  # noqa: ANN401
        """The nodes nearest to the query's text. Raises `FactError` for other modes, and for a query without text."""
        if query.mode != VectorStoreQueryMode.DEFAULT or not query.query_str:
            raise FactError(f"Got a query of mode {query.mode.value!r}, {query.query_str!r}; expected words to embed.")
        conditions: list[MetadataFilter | MetadataFilters] = [] if query.filters is None else [query.filters]
        if query.doc_ids:
            conditions.append(MetadataFilter(key=REF_DOC, operator=FilterOperator.IN, value=query.doc_ids))
        if query.node_ids:
            conditions.append(MetadataFilter(key="id", operator=FilterOperator.IN, value=query.node_ids))
        filters = MetadataFilters(filters=conditions) if conditions else None
        retriever = self.index.as_retriever(similarity_top_k=query.similarity_top_k, filters=filters)
        scored_nodes = retriever.retrieve(query.query_str)
        return VectorStoreQueryResult(
            nodes=[scored.node for scored in scored_nodes],
            similarities=[scored.score for scored in scored_nodes],
            ids=[scored.node_id for scored in scored_nodes],
        )
