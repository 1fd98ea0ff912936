"""`KnowledgePackRetriever`: a fact bank as a LlamaIndex retriever whose nodes are handles to the model."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from typing import Any, Literal, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from kp_core import (
    ChromaFactBank,
    Embedder,
    Fact,
    FactBank,
    Hit,
    MemoryFactBank,
    PackStore,
    SentenceTransformerEmbedder,
    Session,
)
from kp_core.compiling import compile_facts, stored_handle
from kp_core.engines.request import CompiledFor
from kp_core.errors import BankError
from kp_core.facts import Reranker
from kp_core.facts.rerank import hits_wanted, reranked
from kp_llamaindex.filters import passes
from kp_llamaindex.nodes import PackNode, to_node

__all__ = ["KnowledgePackRetriever", "open_bank"]

logger = logging.getLogger(__name__)

_GROWTH = 4  # How many times more facts are asked for when filters left too few.


class KnowledgePackRetriever(BaseRetriever):
    """Finds facts in `bank` and returns, for each, a `PackNode` with the handle of its pack in `store`.

    The model is sent the handle; everyone else (rerankers, evaluators, citations, people) reads the text. With
    `content="text"` the nodes have no handle, for comparison and for models that resolve none. A fact whose pack is not
    in the store comes as text, with a logged warning.

    `filters` keeps facts by the metadata of their nodes; with filters every bank is searched, else `probes` of them
    (more where those hold too few facts). `score_cutoff` drops what is less similar (cosine, in [-1, 1]). `rerank` puts
    what was found and passes the filters into its order, e.g. `kp_core.facts.LexicalReranker()`: the first
    `similarity_top_k` of it that `score_cutoff` keeps are returned. Scores stay cosines.

    Raises `BankError` for a blank question, for `similarity_top_k` or `probes` below 1, for a `rerank` that is no
    `Reranker`, and for a bank that was not built.
    """

    def __init__(  # noqa: PLR0913 - one keyword per choice
        self,
        bank: FactBank,
        store: PackStore,
        *,
        namespace: str = "default",
        similarity_top_k: int = 4,
        probes: int | None = None,
        filters: MetadataFilters | None = None,
        score_cutoff: float | None = None,
        rerank: Reranker | None = None,
        content: Literal["handle", "text"] = "handle",
        compiled_for: CompiledFor = "user",
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
    ) -> None:
        if content not in ("handle", "text"):
            raise BankError(f"Got content={content!r}; expected 'handle' or 'text'.")
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.bank, self.store, self.namespace = bank, store, namespace
        self.similarity_top_k, self.probes = similarity_top_k, probes
        self.filters, self.score_cutoff, self.rerank = filters, score_cutoff, rerank
        self.content, self.compiled_for = content, compiled_for

    @classmethod
    def from_facts(  # noqa: PLR0913 - one keyword per part it is made of
        cls,
        facts: Iterable[Fact],
        *,
        engine: Session,
        store: PackStore,
        bank: FactBank | None = None,
        embedder: Embedder | None = None,
        path: str | os.PathLike[str] | None = None,
        namespace: str = "default",
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        progress: bool = True,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """A retriever over `facts`: adds them to the bank, and compiles their packs into `store`.

        Without `bank`, one is made with `embedder` (by default the bundled MiniLM): in Chroma at `path`, or in memory.
        Packs are compiled for the position `compiled_for`. Each is stored as soon as it is made, and what is stored
        already for this model and position is not made again. `lazy` packs are computed on first use instead.
        `settings` are those of the retriever.
        """
        bank = open_bank(bank, embedder, path)
        facts = list(facts)
        bank.build(facts)
        compile_facts(
            facts, engine, store, namespace=namespace, compiled_for=compiled_for, lazy=lazy, progress=progress
        )
        return cls(bank, store, namespace=namespace, compiled_for=compiled_for, **settings)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=score) for node, score in self._found(query_bundle.query_str)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _found(self, question: str) -> list[tuple[PackNode, float]]:
        hits = self._hits(question)
        if self.score_cutoff is not None:
            hits = [hit for hit in hits if hit.score >= self.score_cutoff]
        return [(self._node(hit.fact), hit.score) for hit in hits[: self.similarity_top_k]]

    def _hits(self, question: str) -> list[Hit]:
        """The hits to choose from, best first."""
        asked = wanted = hits_wanted(self.similarity_top_k, self.rerank)
        if self.filters is None:
            return self.bank.search(question, asked, probes=self.probes, rerank=self.rerank)
        while True:
            # The filter may leave any bank empty, so no number of nearest banks is enough.
            hits = self.bank.search(question, asked, probes=max(1, self.bank.banks))
            kept = [hit for hit in hits if passes(self.filters, to_node(hit.fact).metadata)]
            if len(kept) >= wanted or asked >= len(self.bank):
                return reranked(question, kept[:wanted], self.rerank)
            asked *= _GROWTH

    def _node(self, fact: Fact) -> PackNode:
        if self.content == "text":
            return to_node(fact)
        handle = stored_handle(self.store, fact.text, self.namespace, self.compiled_for)
        if handle is None:
            logger.warning("There is no pack of fact %s in %s; it goes as text.", fact.id, self.store.path)
        return to_node(fact, "" if handle is None else str(handle))


def open_bank(
    bank: FactBank | None = None,
    embedder: Embedder | None = None,
    path: str | os.PathLike[str] | None = None,
) -> FactBank:
    """`bank`, or one made with `embedder` (by default the bundled MiniLM): in Chroma at `path`, or in memory.

    Raises `BankError` for a bank together with what only a new one takes.
    """
    if bank is None:
        embedder = embedder or SentenceTransformerEmbedder()
        return MemoryFactBank(embedder) if path is None else ChromaFactBank(path, embedder)
    if embedder is not None or path is not None:
        raise BankError("Got a bank together with an embedder or a path; a bank brings its own.")
    return bank
