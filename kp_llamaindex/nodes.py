"""`PackNode`, whose content is a handle for the model; nodes as facts, and metadata filters as filters of facts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Self

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from kp_core import Fact
from kp_core.errors import FactError
from kp_core.packs.handle import inert

logger = logging.getLogger(__name__)

_OPERATORS = {
    FilterOperator.EQ: "$eq",
    FilterOperator.NE: "$ne",
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
    FilterOperator.IN: "$in",
    FilterOperator.NIN: "$nin",
    FilterOperator.CONTAINS: "$contains",
}
_TOGETHER = {FilterOperator.ALL: "$and", FilterOperator.ANY: "$or"}


class PackNode(TextNode):
    """A text node whose content for the model (`MetadataMode.LLM`) is the handle of its pack, and else its text.

    If its text, or metadata that the model sees, was rewritten since, the node gives the text again, with a logged
    warning. `class_name()` stays `TextNode`: code that reads a stored `PackNode` without this class gets a text node.
    """

    handle: str = Field(default="", description="Handle of the pack; empty for none.")
    digest: str = Field(default="", description="Digest of the content that the handle stands for.")
    label: str = Field(default="", description="What the model sees on a line before the content, e.g. its number.")
    _warned: bool = PrivateAttr(default=False)

    @classmethod
    def from_node(cls, node: BaseNode, handle: str = "") -> Self:
        """`node` as a pack node. `handle` is that of the node's present content for the model."""
        copied = cls.model_fields.keys() - {"id_", "text", "handle", "digest"}
        fields = {name: getattr(node, name) for name in copied if hasattr(node, name)}
        pack_node = cls(id_=node.node_id, text=node.get_content(MetadataMode.NONE), **fields)
        pack_node.handle, pack_node.digest = handle, _digest(pack_node.llm_text()) if handle else ""
        return pack_node

    @property
    def is_intact(self) -> bool:
        """Whether the handle still stands for the node's content."""
        return bool(self.handle) and _digest(self.llm_text()) == self.digest

    def llm_text(self) -> str:
        """What a plain text node would give the model, without outer blanks, which LlamaIndex's synthesizers strip."""
        return super().get_content(MetadataMode.LLM).strip()

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        """The handle for `MetadataMode.LLM`; for other modes the text, with the metadata of that mode."""
        if metadata_mode != MetadataMode.LLM:
            return super().get_content(metadata_mode)
        content = self.handle
        if not self.is_intact:
            if self.handle and not self._warned:
                self._warned = True
                logger.warning("Node %s was rewritten since its pack was made; it goes as text.", self.node_id)
            content = inert(self.llm_text())
        return f"{self.label}\n{content}" if self.label else content

    def get_content_blocks(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> list[BaseContentBlock]:
        """As `get_content`, as blocks."""
        if metadata_mode != MetadataMode.LLM:
            return super().get_content_blocks(metadata_mode)
        return [TextBlock(text=self.get_content(metadata_mode))]


class NumberSources(BaseNodePostprocessor):
    """Puts `Source 1:`, `Source 2:`, ... on a line before each node, for prompts that ask for citations.

    LlamaIndex's `CitationQueryEngine` cuts texts into new nodes, which would go as text. With this postprocessor, a
    `RetrieverQueryEngine` with `CITATION_QA_TEMPLATE` cites packs. `response.source_nodes[n - 1]` is source n.
    """

    def _postprocess_nodes(
        self, nodes: Sequence[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        numbered = []
        for number, scored in enumerate(nodes, 1):
            node = scored.node if isinstance(scored.node, PackNode) else PackNode.from_node(scored.node)
            node = node.model_copy(update={"label": f"Source {number}:"})
            numbered.append(NodeWithScore(node=node, score=scored.score))
        return numbered


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def to_node(fact: Fact, handle: str = "") -> PackNode:
    """A node of the fact's text; its title, source and metadata are the node's, and the model does not see them."""
    about = {"title": fact.title, "source": fact.source}
    metadata = {**{name: value for name, value in about.items() if value}, **fact.metadata}
    node = TextNode(id_=fact.id, text=fact.text, metadata=metadata)
    node.excluded_llm_metadata_keys = node.excluded_embed_metadata_keys = list(metadata)
    return PackNode.from_node(node, handle)


def to_where(filters: MetadataFilters) -> dict[str, Any]:
    """Convert `filters`, which may be nested, to a filter of facts (see `kp_core.banks.filters`).

    Raises `FactError` for the operators that Chroma lacks: `TEXT_MATCH`, `TEXT_MATCH_INSENSITIVE`, `IS_EMPTY`, `NOT`.
    """
    if filters.condition == FilterCondition.NOT:
        raise FactError("Got filters joined by NOT; expected AND or OR. Negate them one by one, with != and `nin`.")
    parts = [to_where(part) if isinstance(part, MetadataFilters) else _where(part) for part in filters.filters]
    return {"$or" if filters.condition == FilterCondition.OR else "$and": parts} if parts else {}


def _where(wanted: MetadataFilter) -> dict[str, Any]:
    key, operator, value = wanted.key, wanted.operator, wanted.value
    if operator in _OPERATORS:
        return {key: {_OPERATORS[operator]: value}}
    if operator in _TOGETHER and isinstance(value, list) and value:
        return {_TOGETHER[operator]: [{key: {"$contains": item}} for item in value]}
    known = ", ".join(operator.value for operator in _OPERATORS)
    raise FactError(
        f"Got the filter {key!r} {operator.value} {value!r}; expected one of {known}, or any or all of a list."
    )
