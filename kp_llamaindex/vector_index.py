"""`PackedVectorIndex`: a `VectorStoreIndex` of LlamaIndex whose nodes come as packs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.vector_store import VectorIndexRetriever
from llama_index.core.schema import BaseNode, Document
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from kp_core.engines.request import refuse_unknown
from kp_core.errors import FactError
from kp_llamaindex.base import PackIndex
from kp_llamaindex.postprocessor import KnowledgePackPostprocessor, PackedRetriever
from kp_llamaindex.retriever import settled_model

__all__ = ["PackedVectorIndex"]


class PackedVectorIndex(PackIndex):
    """The nodes of a `VectorStoreIndex`, over any vector store, as packs; see `KnowledgePackIndex`.

    The `VectorStoreIndex` still stores, embeds and finds nodes. Documents that are added or deleted here are added or
    deleted there. Retrievers take its settings (`similarity_top_k`, `filters`, `vector_store_query_mode`, ...) and
    `content`.
    """

    _RETRIEVAL: ClassVar = (
        "content",
        *(name for name in inspect.signature(VectorIndexRetriever).parameters if name not in {"index", "kwargs"}),
        "vector_store_kwargs",
    )

    def __init__(self, index: VectorStoreIndex, **settings: Any) -> None:  # noqa: ANN401
        if not isinstance(index, VectorStoreIndex):
            raise FactError(
                f"Got {type(index)}; expected a VectorStoreIndex. Of another index, pack what it finds: "
                "`KnowledgePackPostprocessor`."
            )
        super().__init__(**settings)
        self.vector_index = index
        self.packs = KnowledgePackPostprocessor(**self._packing)

    @classmethod
    def over(cls, vector_store: BasePydanticVectorStore, embed_model: BaseEmbedding | None, **settings: Any) -> Self:  # noqa: ANN401
        """See `KnowledgePackIndex.from_vector_store`."""
        if not vector_store.stores_text:
            raise FactError(
                f"{type(vector_store).__name__} holds vectors without texts. Give the index that it belongs to: "
                "`KnowledgePackIndex.from_vector_index(index)`."
            )
        model = embed_model or settled_model()
        if model is None:
            raise FactError(
                f"Got {type(vector_store).__name__} without the model that embedded it. Pass `embed_model=...`, or set "
                "`Settings.embed_model`."
            )
        return cls(VectorStoreIndex.from_vector_store(vector_store, embed_model=model), **settings)

    def insert_nodes(self, nodes: Sequence[BaseNode]) -> None:
        """Add nodes to the index. Each is compiled when it is first found."""
        self.vector_index.insert_nodes(nodes)

    def insert(self, document: Document) -> None:
        """Add a document to the index, which cuts it into nodes itself."""
        self.vector_index.insert(document)

    def delete_ref_doc(self, ref_doc_id: str) -> None:
        """Remove the nodes of a document from the index, and their packs."""
        self.vector_index.delete_ref_doc(ref_doc_id, delete_from_docstore=True)
        # Otherwise its hash stays, and the document counts as known when it is added again.
        self.vector_index.docstore.delete_document(ref_doc_id, raise_error=False)
        self.packs.discard(ref_doc_id)

    def as_retriever(self, *, content: Literal["handle", "text"] = "handle", **settings: Any) -> BaseRetriever:  # noqa: ANN401
        """The index's own retriever; its nodes come as packs unless `content="text"`."""
        refuse_unknown(settings, self._RETRIEVAL, "The retriever")
        retriever = self.vector_index.as_retriever(**settings)
        return retriever if content == "text" else PackedRetriever(retriever, self.packs)

    def _hashes(self, ref_doc_ids: Sequence[str]) -> Mapping[str, str | None]:
        return {ref: self.vector_index.docstore.get_document_hash(ref) for ref in ref_doc_ids}
