"""`KnowledgePackPostprocessor`: makes packs of the nodes of any retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import Field, model_validator
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.schema import BaseNode, ImageNode, IndexNode, NodeWithScore, QueryBundle

from kp_core import Fact
from kp_core.delivery import Delivery, Precompile
from kp_core.facts import Hit
from kp_core.packs.codec import Compression
from kp_llamaindex.llm import KnowledgePackLLM
from kp_llamaindex.nodes import PackNode
from kp_llamaindex.place import pack_place

__all__ = ["KnowledgePackPostprocessor", "PackedRetriever"]


class KnowledgePackPostprocessor(BaseNodePostprocessor):
    """Turns the nodes of any retriever into `PackNode`s of packs in `store`. Text, metadata, scores and order stay.

    A new node is compiled by `engine`, for the position `compiled_for` (by default that of the first node in
    LlamaIndex's own question prompt). Its KV is stored unless `lazy`, as `compress` says (see `kp_core.delivery`). With
    `precompile="background"` the node goes as text the first time, and is compiled when the engine is idle. Nodes of
    images and nodes without text stay as they are. Put it last, behind rerankers and whatever rewrites nodes.

        engine = index.as_query_engine(llm=llm, node_postprocessors=[KnowledgePackPostprocessor(engine=..., store=...)])
    """

    engine: Any = Field(exclude=True, repr=False)
    store: Any = Field(exclude=True, repr=False)
    namespace: str = "default"
    compiled_for: Any = Field(default=None, description="A role, or messages as `pack_place` makes them.")
    lazy: bool = False
    precompile: Precompile = "use"
    compress: Compression = "none"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.compiled_for is None:
            self.compiled_for = pack_place(DEFAULT_TEXT_QA_PROMPT_SEL, KnowledgePackLLM(engine=self.engine))
        self.delivery  # noqa: B018 - it refuses what is no namespace
        return self

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "KnowledgePackPostprocessor"

    @property
    def delivery(self) -> Delivery:
        """The `Delivery` that compiles and looks up packs."""
        return Delivery(
            None,
            self.engine,
            self.store,
            kv="lazy" if self.lazy else "stored",
            compiled_for=self.compiled_for,
            namespace=self.namespace,
            precompile=self.precompile,
            compress=self.compress,
        )

    def discard(self, ref_doc_id: str) -> None:
        """Remove the packs of a document's nodes."""
        for handle in list(self.store):
            pack = self.store.peek(handle) if handle.namespace == self.namespace else None
            if pack is not None and pack.provenance.get("source") == ref_doc_id:
                self.delivery.forget(handle)

    def _postprocess_nodes(
        self,
        nodes: Sequence[NodeWithScore],
        query_bundle: QueryBundle | None = None,  # noqa: ARG002 - LlamaIndex's signature
    ) -> list[NodeWithScore]:
        todo = {at: PackNode.from_node(scored.node) for at, scored in enumerate(nodes) if not _stays(scored.node)}
        results = self.delivery.deliver([Hit(self._fact(node), 0.0) for node in todo.values()])
        packed_nodes = {
            at: PackNode.from_node(node, str(result.handle or ""))
            for (at, node), result in zip(todo.items(), results, strict=True)
        }
        return [
            NodeWithScore(node=packed_nodes.get(at, scored.node), score=scored.score) for at, scored in enumerate(nodes)
        ]

    def _fact(self, node: PackNode) -> Fact:
        source = node.ref_doc_id or node.node_id
        return Fact(node.llm_text(), source=source, id=node.node_id, namespace=self.namespace)


class PackedRetriever(BaseRetriever):
    """The nodes that `retriever` finds, as `packs` converts them."""

    def __init__(self, retriever: BaseRetriever, packs: KnowledgePackPostprocessor) -> None:
        super().__init__()
        self.retriever, self.packs = retriever, packs

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.packs.postprocess_nodes(self.retriever.retrieve(query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self.packs.postprocess_nodes, await self.retriever.aretrieve(query_bundle))


def _stays(node: BaseNode) -> bool:
    """Whether a node already has its pack, or has no text."""
    if isinstance(node, PackNode):
        return node.is_intact
    return isinstance(node, ImageNode | IndexNode) or not node.get_content().strip()
