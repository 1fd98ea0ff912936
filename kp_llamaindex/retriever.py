"""`KnowledgePackRetriever`: a fact bank as a LlamaIndex retriever whose nodes are handles to the model."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from kp_core import Embedder, Fact, FactBank, Session
from kp_core.delivery import Delivery, Found, Unit, open_bank
from kp_core.engines.request import CompiledFor, refuse_unknown
from kp_core.errors import BankError
from kp_core.facts import Reranker
from kp_core.packs.view import Packs
from kp_llamaindex.filters import to_where
from kp_llamaindex.nodes import PackNode, to_node

__all__ = ["KnowledgePackRetriever"]


class KnowledgePackRetriever(BaseRetriever):
    """Finds facts of `namespace` in `bank` and returns each as a `PackNode` with the handle of its pack in `store`.

    The model is sent the handle; everyone else (rerankers, evaluators, citations, people) reads the text. With
    `content="text"` the nodes have no handle, for comparison and for models that resolve none. A fact whose pack is not
    in the store comes as text, with a logged warning. With `unit="bank"` a node is a whole bank of about twenty facts,
    one per line, under one handle: the banks with the best facts; with `unit="document"`, all facts of a source.

    `filters` keeps facts by the metadata of their nodes; with filters every bank is searched, else `probes` of them
    (more where those hold too few facts). `score_cutoff` drops what is less similar (cosine, in [-1, 1]). `rerank` puts
    what passes the filters into its order: the first `similarity_top_k` of it that `score_cutoff` keeps are returned.
    Scores stay cosines.

    Raises `OptionError` for options that do not exist, and as `FactBank.search` does.
    """

    def __init__(  # noqa: PLR0913 - one keyword per choice
        self,
        bank: FactBank,
        store: Packs,
        *,
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
            raise BankError(f"Got content={content!r}; expected 'handle' or 'text'.")
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.bank, self.store, self.namespace, self.unit = open_bank(bank), store, namespace, unit
        self.similarity_top_k, self.probes = similarity_top_k, probes
        self.filters, self.score_cutoff, self.rerank, self.content = filters, score_cutoff, rerank, content
        self._delivery()  # It refuses what is no unit and no namespace.

    @classmethod
    def from_facts(  # noqa: PLR0913 - one keyword per part it is made of
        cls,
        facts: Iterable[Fact],
        *,
        engine: Session,
        store: Packs,
        bank: FactBank | None = None,
        embedder: Embedder | None = None,
        path: str | os.PathLike[str] | None = None,
        compiled_for: CompiledFor = "user",
        lazy: bool = False,
        progress: bool = True,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """A retriever over `facts`: adds them to the bank, and compiles their packs into `store`.

        Without `bank`, one is made with `embedder` (by default the bundled MiniLM): in Chroma at `path`, or in memory.
        Facts go into the retriever's namespace; one that has its own stays there, where this retriever does not see it.
        Packs are compiled for the position `compiled_for`, `lazy` ones on first use (see `kp_core.delivery`).
        """
        refuse_unknown(settings, (*_known(cls), *_known(cls.from_facts)), cls.__name__)
        made = cls(open_bank(bank, embedder, path), store, **settings)
        delivery = made._delivery(engine, kv="lazy" if lazy else "stored", compiled_for=compiled_for)
        delivery.add(facts, progress=progress)
        return made

    def _delivery(self, engine: Session | None = None, **options: Any) -> Delivery:  # noqa: ANN401
        return Delivery(self.bank, engine, self.store, unit=self.unit, namespace=self.namespace, **options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._delivery().search(
            query_bundle.query_str,
            self.similarity_top_k,
            # A filter may leave any bank empty, so no number of nearest banks is enough.
            probes=self.probes if self.filters is None else max(1, self.bank.banks),
            where=None if self.filters is None else to_where(self.filters),
            score_threshold=self.score_cutoff,
            rerank=self.rerank,
        )
        return [NodeWithScore(node=self._node(each), score=each.hit.score) for each in found]

    def _node(self, found: Found) -> PackNode:
        return to_node(found.unit, "" if found.handle is None or self.content == "text" else str(found.handle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _known(make: Callable[..., Any]) -> list[str]:
    return [name for name, each in inspect.signature(make).parameters.items() if each.kind is not each.VAR_KEYWORD]
