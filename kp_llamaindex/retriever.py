"""`KnowledgePackRetriever`: a fact store as a LlamaIndex retriever. Its nodes are handles to the model."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self

from llama_index.core import MockEmbedding, Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from kp_core import Embedder, Fact, FactStore, Session
from kp_core.compiling import open_facts
from kp_core.delivery import Delivery, Precompile, Unit
from kp_core.engines.request import CompiledFor, refuse_unknown
from kp_core.errors import FactError
from kp_core.facts import Reranker
from kp_core.packs.codec import Compression
from kp_core.packs.view import Packs
from kp_llamaindex.filters import to_where
from kp_llamaindex.nodes import to_node

__all__ = ["KnowledgePackRetriever", "open_settled", "settled_model"]


class KnowledgePackRetriever(BaseRetriever):
    """Finds facts of `namespace` in `fact_store`. Returns each as a `PackNode` with the handle of its pack in `store`.

    The model gets the handle; everybody else (rerankers, evaluators, citations, people) reads the text. With
    `content="text"` the nodes have no handle, for comparison and for models that do not resolve handles. With
    `unit="bank"` a node is a whole bank of about twenty facts, one per line, under one handle: the banks with the best
    facts are returned. With `unit="document"` it is all facts of a source.

    A fact found without a pack is compiled at once by `engine`, for the position `compiled_for`. Its KV is stored
    unless `lazy`, as `compress` says (see `kp_core.delivery`). With `precompile="background"` the fact goes as text
    this time, and is compiled when the engine is idle. Without an engine it goes as text, with a logged warning.

    All facts are searched; with `probes`, only those of this many nearest banks (of more, if these hold too few).
    `filters` selects facts by the metadata of their nodes. `score_cutoff` drops less similar facts (cosine, in [-1,
    1]). `rerank` orders the facts that pass the filters; the first `similarity_top_k` that `score_cutoff` keeps are
    returned. Scores stay cosines.

    Raises `OptionError` for options that do not exist, and the errors of `FactStore.search`.
    """

    def __init__(  # noqa: PLR0913 - one keyword per choice
        self,
        fact_store: FactStore,
        store: Packs,
        *,
        engine: Session | None = None,
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        precompile: Precompile = "use",
        compress: Compression = "none",
        namespace: str = "default",
        unit: Unit = "fact",
        similarity_top_k: int = 4,
        probes: int | None = None,
        filters: MetadataFilters | None = None,
        score_cutoff: float | None = None,
        rerank: Reranker | None = None,
        content: Literal["handle", "text"] = "handle",
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
        **unknown: Any,  # noqa: ANN401 - refused
    ) -> None:
        refuse_unknown(unknown, _known(type(self)), type(self).__name__)
        if content not in ("handle", "text"):
            raise FactError(f"Got content={content!r}; expected 'handle' or 'text'.")
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.fact_store, self.store, self.namespace, self.unit = open_facts(fact_store), store, namespace, unit
        self.engine, self.compiled_for, self.lazy = engine, compiled_for, lazy
        self.precompile, self.compress = precompile, compress
        self.similarity_top_k, self.probes = similarity_top_k, probes
        self.filters, self.score_cutoff, self.rerank, self.content = filters, score_cutoff, rerank, content
        self.delivery  # noqa: B018 - it refuses what is no unit and no namespace

    @classmethod
    def from_facts(  # noqa: PLR0913 - one keyword per part it is made of
        cls,
        facts: Iterable[Fact],
        *,
        engine: Session,
        store: Packs,
        fact_store: FactStore | None = None,
        embedder: Embedder | BaseEmbedding | None = None,
        path: str | os.PathLike[str] | None = None,
        progress: bool = True,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """A retriever over `facts`: adds them to the fact store, and compiles their packs into `store`.

        Without `fact_store`, one is made, in Chroma at `path` or in memory. Its embedder is `embedder` (ours or
        LlamaIndex's), else the `embed_model` set in LlamaIndex's settings, else the bundled MiniLM. Facts go into the
        retriever's namespace. A fact that has a namespace of its own stays there, where this retriever does not find
        it.
        """
        refuse_unknown(settings, (*_known(cls), *_known(cls.from_facts)), cls.__name__)
        retriever = cls(open_settled(fact_store, embedder, path), store, engine=engine, **settings)
        retriever.delivery.add(facts, progress=progress)
        return retriever

    @property
    def delivery(self) -> Delivery:
        """The `Delivery` that finds, compiles, adds and removes facts."""
        return Delivery(
            self.fact_store,
            self.engine,
            self.store,
            unit=self.unit,
            kv="lazy" if self.lazy else "stored",
            compiled_for=self.compiled_for,
            namespace=self.namespace,
            precompile=self.precompile,
            compress=self.compress,
        )

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        results = self.delivery.search(
            query_bundle.query_str,
            self.similarity_top_k,
            probes=self.probes,
            where=None if self.filters is None else to_where(self.filters),
            score_threshold=self.score_cutoff,
            rerank=self.rerank,
        )
        handles = ["" if result.handle is None or self.content == "text" else str(result.handle) for result in results]
        pairs = zip(results, handles, strict=True)
        return [NodeWithScore(node=to_node(result.unit, handle), score=result.hit.score) for result, handle in pairs]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def settled_model() -> BaseEmbedding | None:
    """The `embed_model` set in LlamaIndex's settings, if any. The public attribute would create one of OpenAI's."""
    model: BaseEmbedding | None = Settings._embed_model  # noqa: SLF001
    return None if isinstance(model, MockEmbedding) else model


def open_settled(
    fact_store: FactStore | None, embedder: Embedder | BaseEmbedding | None, path: str | os.PathLike[str] | None
) -> FactStore:
    """As `open_facts`; the default embedder is that of LlamaIndex's settings."""
    return open_facts(fact_store, settled_model() if fact_store is None and embedder is None else embedder, path)


def _known(make: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
