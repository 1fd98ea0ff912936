"""`KnowledgePackIndex`: documents in, query engines and chat engines over packs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import run_transformations
from llama_index.core.schema import BaseNode, Document, TransformComponent
from llama_index.core.utils import iter_batch
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from numpy.typing import NDArray

from kp_core import Embedder, Fact, FactStore, Session
from kp_core.compiling import open_facts
from kp_core.delivery import Delivery, Unit
from kp_core.facts.embed import normalised
from kp_core.packs.view import Packs
from kp_llamaindex.base import PackIndex
from kp_llamaindex.nodes import REF_DOC, REF_HASH, to_fact
from kp_llamaindex.retriever import KnowledgePackRetriever, open_settled
from kp_llamaindex.vector_index import PackedVectorIndex
from kp_llamaindex.vector_store import KnowledgePackVectorStore

__all__ = ["KnowledgePackIndex"]

logger = logging.getLogger(__name__)

_SAMPLE, _SAME, _NAMED = 4, 0.98, 500


class KnowledgePackIndex(PackIndex):
    """An index over a fact store and a pack store, filled from LlamaIndex's nodes.

    The pack of a node holds what a text node would give the model: its text, and the metadata that is not in
    `excluded_llm_metadata_keys`. The same text is embedded. Nodes whose embeddings come from the fact store's embedder
    are not embedded again (except a few, to compare). With `unit="bank"` a pack holds a bank of about twenty nodes,
    with `unit="document"` all nodes of a source. The other settings are those of `PackIndex`.
    """

    _RETRIEVAL: ClassVar = ("similarity_top_k", "probes", "filters", "score_cutoff", "rerank", "content", "unit")

    def __init__(
        self,
        engine: Session,
        store: Packs,
        fact_store: FactStore,
        *,
        unit: Unit = "fact",
        progress: bool = True,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(engine, store, **settings)
        self.fact_store, self.unit, self.progress = open_facts(fact_store), unit, progress

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        *,
        transformations: Sequence[TransformComponent] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """An index over `documents`, cut into nodes by `transformations` (by default those of LlamaIndex's settings).

        `settings` are those of `from_nodes`.
        """
        steps = list(Settings.transformations if transformations is None else transformations)
        nodes = run_transformations(list(documents), steps)
        return cls.from_nodes(nodes, transformations=transformations, **settings)

    @classmethod
    def from_nodes(  # noqa: PLR0913 - one keyword per part it is made of
        cls,
        nodes: Sequence[BaseNode],
        *,
        engine: Session,
        store: Packs,
        fact_store: FactStore | None = None,
        embedder: Embedder | BaseEmbedding | None = None,
        path: str | os.PathLike[str] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """An index over `nodes`.

        Without `fact_store`, one is made, in Chroma at `path` or in memory. Its embedder is `embedder` (ours or
        LlamaIndex's), else the `embed_model` set in LlamaIndex's settings, else the bundled MiniLM.
        """
        index = cls(engine, store, open_settled(fact_store, embedder, path), **settings)
        index.insert_nodes(nodes)
        return index

    @classmethod
    def from_vector_index(cls, index: VectorStoreIndex, **settings: Any) -> PackedVectorIndex:  # noqa: ANN401
        """An index over the nodes of `index`, as packs. `index` still stores and finds them; nothing is embedded again.

        `settings` are those of `PackIndex`; `engine` and `store` are needed.
        """
        return PackedVectorIndex(index, **settings)

    @classmethod
    def from_vector_store(
        cls,
        vector_store: BasePydanticVectorStore,
        embed_model: BaseEmbedding | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> PackedVectorIndex:
        """As `from_vector_index`, for a vector store. `embed_model`, which made its vectors, embeds the questions.

        Raises `FactError` without an `embed_model`, here or in LlamaIndex's settings, and for a store without texts.
        """
        return PackedVectorIndex.over(vector_store, embed_model, **settings)

    def insert_nodes(self, nodes: Sequence[BaseNode]) -> None:
        """Add `nodes` to the fact store and compile their packs. Blank nodes are left out; known nodes cost nothing.

        A node is known if its id is stored, or if the same text came from a document with the same text and metadata:
        documents get new ids whenever they are read.
        """
        nodes_with_text = [node for node in nodes if node.get_content().strip()]
        if len(nodes_with_text) < len(nodes):
            logger.warning("%d of %d nodes are blank and were left out.", len(nodes) - len(nodes_with_text), len(nodes))
        facts = self._known([to_fact(node) for node in nodes_with_text])
        # Documents may share a text; each keeps it when the other is deleted.
        self.delivery.add(
            facts, overwrite=True, vectors=self._embeddings(nodes_with_text, facts), progress=self.progress
        )

    def delete_ref_doc(self, ref_doc_id: str) -> None:
        """Remove the nodes of a document, and the packs that no node uses any more."""
        self.delivery.delete(where={REF_DOC: ref_doc_id})

    def as_vector_store(self) -> KnowledgePackVectorStore:
        """The index as a vector store, e.g. for an `IngestionPipeline`. It then follows the pipeline's changes and
        deletions.
        """
        name = self.fact_store.embedder.name
        return KnowledgePackVectorStore(index=self, embedder=name, namespace=self.namespace)

    def as_retriever(self, **settings: Any) -> KnowledgePackRetriever:  # noqa: ANN401
        """A retriever; `settings` are those of `KnowledgePackRetriever`."""
        return KnowledgePackRetriever(self.fact_store, **{**self._packing, "unit": self.unit, **settings})

    @property
    def delivery(self) -> Delivery:
        """The `Delivery` that adds, removes and compiles nodes."""
        return self.as_retriever().delivery

    def _known(self, facts: Sequence[Fact]) -> list[Fact]:
        """`facts`; each known fact is replaced by its stored form."""
        hashes = (fact.metadata[REF_HASH] for fact in facts)
        stored = {(fact.text, fact.metadata[REF_HASH]): fact for fact in self._held(REF_HASH, hashes)}
        return [stored.setdefault((fact.text, fact.metadata[REF_HASH]), fact) for fact in facts]

    def _hashes(self, ref_doc_ids: Sequence[str]) -> Mapping[str, str]:
        facts = self._held(REF_DOC, ref_doc_ids)
        return {str(fact.metadata[REF_DOC]): str(fact.metadata.get(REF_HASH)) for fact in facts}

    def _held(self, field: str, values: Iterable[object]) -> Iterator[Fact]:
        """The stored facts whose metadata `field` has one of these values."""
        for batch in iter_batch(dict.fromkeys(values), _NAMED):
            yield from self.fact_store.facts(where={field: {"$in": batch}}, namespace=self.namespace)

    def _embeddings(self, nodes: Sequence[BaseNode], facts: Sequence[Fact]) -> NDArray[np.float32] | None:
        """The embeddings of the nodes, if they come from the fact store's embedder; else `None`."""
        if len({len(node.embedding or ()) for node in nodes}) != 1 or not nodes[0].embedding:
            return None
        vectors = normalised([node.embedding or () for node in nodes])
        sample = self.fact_store.embedder.embed([fact.text for fact in facts[:_SAMPLE]])
        is_same = (
            sample.shape == vectors[:_SAMPLE].shape and float((sample * vectors[:_SAMPLE]).sum(axis=1).min()) >= _SAME
        )
        return vectors if is_same else None
