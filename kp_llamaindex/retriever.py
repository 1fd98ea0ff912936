"""Nodes whose content for the model is a handle, and what finds them: in a fact store, or behind any retriever."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.schema import BaseNode, ImageNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from kp_core import Fact, FactStore, Handle, Hit, Packs, Session
from kp_core.banks.compiling import open_facts
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError
from kp_core.packs.handle import inert
from kp_core.plan.request import CompiledFor, refuse_unknown
from kp_llamaindex.llm import KnowledgePackLLM
from kp_llamaindex.messages import pack_place

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
_NODES_ELSEWHERE = (
    "An index over a vector store has an empty docstore; ask the vector store for its nodes (`get_nodes(None)` of "
    "Chroma). `discard(ref_doc_id)` removes the packs of one document."
)
_BESIDE = 1024  # Tokens of a prompt around packs, and of an answer.
_PACKING = ("engine", "namespace", "unit", "compiled_for", "lazy", "precompile", "compress")


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


def _delivery_of(
    facts: FactStore | None, store: Packs, *, engine: Session | None = None, lazy: bool = False, **settings: Any
) -> Delivery:
    """The `Delivery` of facts or of any nodes, with LlamaIndex's defaults; `settings` are other options of `_PACKING`.

    `lazy` packs get their KV on first use, others when they are compiled: when the engine is idle, or with
    `precompile="now"` before a search returns.
    """
    refuse_unknown(settings, _PACKING, "The packing of nodes")
    settings = {"namespace": "default", "compiled_for": "user", "precompile": "idle"} | settings
    return Delivery(facts, engine, store, kv="lazy" if lazy else "stored", **settings)


def _divided(nodes: Sequence[NodeWithScore], delivery: Delivery) -> list[NodeWithScore]:
    """`nodes`; without handles from a quarter of the model's window on, if their packs do not fit into one prompt.

    LlamaIndex cuts texts that are too long for a prompt, and asks several times. Handles look short to it. It fills
    half of the window (`KnowledgePackLLM.metadata`), and may count by another tokenizer: hence a quarter.
    """
    fitting, session = list(nodes), delivery.engine
    if session is None:
        return fitting
    window = session.max_positions
    most, least = max(window // 2, min(window * 7 // 8, window - _BESIDE)), window // 4
    sizes = [_pack_tokens(scored.node, delivery.store) for scored in nodes]
    if sum(sizes) <= most:
        return fitting
    logger.warning(
        "The packs of %d nodes have %d tokens; %d fit beside a question and its answer. From %d on they go as text, "
        "which LlamaIndex divides. Ask for fewer (similarity_top_k), or take an LLM with composer='select', and "
        "divide=False.",
        *(len(nodes), sum(sizes), most, least),
    )
    for at, (size, total) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        if size and total > least:
            fitting[at] = NodeWithScore(node=PackNode.from_node(nodes[at].node), score=nodes[at].score)
    return fitting


def _pack_tokens(node: BaseNode, store: Packs) -> int:
    """The tokens of the pack whose handle the model gets for `node`; 0 for text."""
    pack = store.peek(Handle.parse(node.handle)) if isinstance(node, PackNode) and node.is_intact else None
    return 0 if pack is None else len(pack.token_ids)


class KnowledgePackRetriever(BaseRetriever):
    """Finds facts of `namespace` in `fact_store`. Returns each as a `PackNode` with the handle of its pack in `store`.

    The model gets the handle; everybody else (rerankers, evaluators, citations, people) reads the text. With
    `content="text"` the nodes have no handle.

    `filters` selects facts by the metadata of their nodes. `probes` and `score_cutoff` (its `score_threshold`)
    are those of `Delivery.search`. Scores are cosines. `packing`, with its defaults: `engine=None` compiles,
    `namespace="default"`, `unit="fact"` (or `bank`, `document`), `compiled_for="user"` (the start of a user message;
    `system`, or `pack_place(prompt, llm)`), `lazy=False` (`True`: packs without KV, which is computed in the prompt),
    `precompile="idle"` (KV when the engine is idle; `now`: before a search returns) and `compress="none"`.

    Packs that do not fit into one prompt go as text from a quarter of the window on, with a logged warning, so
    that LlamaIndex divides them among several. With `divide=False` they do not, for an LLM that reads some of the packs
    that it gets (`composer="select"`).

    Raises `OptionError` for options that do not exist, and the errors of `FactStore.search`.
    """

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        fact_store: FactStore,
        store: Packs,
        *,
        similarity_top_k: int = 4,
        probes: int | None = None,
        filters: MetadataFilters | None = None,
        score_cutoff: float | None = None,
        content: Literal["handle", "text"] = "handle",
        divide: bool = True,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
        **packing: Any,
    ) -> None:
        refuse_unknown(packing, (*_PACKING, *inspect.signature(type(self)).parameters), type(self).__name__)
        if content not in ("handle", "text"):
            raise FactError(f"Got content={content!r}; expected 'handle' or 'text'.")
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.delivery = _delivery_of(open_facts(fact_store), store, **packing)
        self.similarity_top_k, self.probes, self.filters = similarity_top_k, probes, filters
        self.score_cutoff, self.content, self.divide = score_cutoff, content, divide

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        results = self.delivery.search(
            query_bundle.query_str,
            self.similarity_top_k,
            probes=self.probes,
            where=None if self.filters is None else to_where(self.filters),
            score_threshold=self.score_cutoff,
        )
        nodes = []
        for result in results:
            handle = "" if result.handle is None or self.content == "text" else str(result.handle)
            nodes.append(NodeWithScore(node=to_node(result.unit, handle), score=result.hit.score))
        return _divided(nodes, self.delivery) if self.divide else nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


class KnowledgePackPostprocessor(BaseNodePostprocessor):
    """Turns the nodes of any retriever into `PackNode`s of packs in `store`. Text, metadata, scores and order stay.

    A new node is compiled by `engine` for the position `compiled_for`, by default that of the first node in
    LlamaIndex's own question prompt: when the engine is idle, or with `precompile="now"` before the query goes on.
    `divide` and `packing` are as for `KnowledgePackRetriever`. Nodes of images and nodes without text stay as
    they are. Put it last, behind rerankers and whatever rewrites nodes.

        engine = index.as_query_engine(llm=llm, node_postprocessors=[KnowledgePackPostprocessor(engine=..., store=...)])
    """

    delivery: Delivery = Field(exclude=True, repr=False)
    divide: bool = True

    def __init__(
        self,
        *,
        engine: Session,
        store: Packs,
        compiled_for: CompiledFor | None = None,
        divide: bool = True,
        **packing: Any,
    ) -> None:
        if compiled_for is None:
            compiled_for = pack_place(DEFAULT_TEXT_QA_PROMPT_SEL, KnowledgePackLLM(engine=engine))
        delivery = _delivery_of(None, store, engine=engine, compiled_for=compiled_for, **packing)
        super().__init__(delivery=delivery, divide=divide)  # type: ignore[call-arg]

    def __getstate__(self) -> dict[str, Any]:
        # LlamaIndex would leave out what cannot be pickled, and say so only in the log.
        pickle.dumps(self.delivery)
        return super().__getstate__()

    def discard(self, ref_doc_id: str) -> list[str]:
        """Remove the packs of a document's nodes and return their handles; none that waits to be compiled is written.

        Call it when the document is deleted: `index.delete_ref_doc(id, delete_from_docstore=True)`, then
        `postprocessor.discard(id)`. By default LlamaIndex keeps the node, and a later `compile` or `sync` finds it. A
        node of no document is its own, by its id. A warning is logged for an id without packs. A text that another
        document has, too, gets its pack again when it is found.
        """
        return list(map(str, self.delivery.discard(ref_doc_id)))

    def compile(self, nodes: Iterable[BaseNode], *, progress: bool = True) -> list[str]:
        """Compile the packs of `nodes` that have none for this place, before anybody asks; returns all handles."""
        nodes = _listed(nodes)
        if not nodes:
            logger.warning("Got no nodes, so no packs were compiled. %s", _NODES_ELSEWHERE)
        facts = (_fact_of(PackNode.from_node(node), self.delivery.namespace) for node in nodes if not _stays(node))
        return [str(handle) for handle in self.delivery.compile(facts, progress=progress) if handle is not None]

    def sync(self, nodes: Iterable[BaseNode]) -> list[str]:
        """Remove the packs of nodes that are not among `nodes`, all that the index has now; returns their handles.

        `nodes` are those of a docstore (`index.docstore.docs.values()`) or of a vector store that lists them
        (`vector_store.get_nodes(None)` of Chroma). Keep one namespace for one index. Raises `FactError` for no nodes.
        """
        nodes = _listed(nodes)
        if not nodes:
            raise FactError(f"Got no nodes; nothing was removed. {_NODES_ELSEWHERE}")
        removed = self.delivery.sync(lambda _: (PackNode.from_node(node).llm_text() for node in nodes))
        return [str(handle) for handle in removed]

    def _postprocess_nodes(
        self, nodes: Sequence[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        packed = list(nodes)
        todo = {at: PackNode.from_node(scored.node) for at, scored in enumerate(nodes) if not _stays(scored.node)}
        results = self.delivery.deliver([Hit(_fact_of(node, self.delivery.namespace), 0.0) for node in todo.values()])
        for (at, node), result in zip(todo.items(), results, strict=True):
            packed[at] = NodeWithScore(node=PackNode.from_node(node, str(result.handle or "")), score=nodes[at].score)
        return _divided(packed, self.delivery) if self.divide else packed


def _listed(nodes: Iterable[BaseNode]) -> list[BaseNode]:
    """All nodes; raises `FactError` for anything else, such as their ids."""
    nodes = list(nodes)
    if other := next((each for each in nodes if not isinstance(each, BaseNode)), None):
        raise FactError(f"Got {str(other)[:60]!r} for a node; expected nodes, e.g. `index.docstore.docs.values()`.")
    return nodes


def _fact_of(node: PackNode, namespace: str | None) -> Fact:
    return Fact(node.llm_text(), source=node.ref_doc_id or node.node_id, id=node.node_id).moved(namespace)


def _stays(node: BaseNode) -> bool:
    """Whether a node already has its pack, or has no text."""
    if isinstance(node, PackNode):
        return node.is_intact
    return isinstance(node, ImageNode | IndexNode) or not node.get_content().strip()
