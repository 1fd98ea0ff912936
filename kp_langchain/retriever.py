"""`KnowledgePackRetriever`: a fact bank as a LangChain retriever whose documents are handles."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Iterable
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

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
from kp_core.facts import Filter, Reranker
from kp_core.facts.rerank import hits_wanted

__all__ = ["KnowledgePackRetriever"]

logger = logging.getLogger(__name__)

_PER_CALL = ("k", "probes", "where", "score_threshold", "rerank")
_FACTS_PER_BANK = 4  # Facts looked at per bank wanted, at first.


class KnowledgePackRetriever(BaseRetriever):
    """Finds facts in `bank` and returns, for each, the handle of its pack in `store`.

    A document's `page_content` is the handle (with `content="text"` the text, for comparison and for models that
    resolve no handles), its `id` that of the fact, and its metadata holds `text`, `handle`, `title`, `source`, `score`,
    `bank` and the fact's own. A fact whose pack is not in the store comes as text, with a logged warning.

    With `unit="bank"` a document is a whole bank of about twenty facts, one per line, under one handle: the `k` banks
    with the best facts.

    `probes` banks are searched; by default as many as the bank's calibration says. `where` keeps facts by metadata
    (`{"year": {"$gte": 1900}}`, see `kp_core.facts.filters`), `score_threshold` by their cosine. `rerank` puts what was
    found into its order, e.g. `kp_core.facts.LexicalReranker()`: the first `k` of it that `score_threshold` keeps are
    returned, a bank standing where its first fact does. Scores stay cosines. `k`, `probes`, `where`, `score_threshold`
    and `rerank` may also be given to `invoke`.

    `compiled_for` is the position that packs were compiled for (see `from_facts`). Raises `BankError` for a blank
    question, and for a bank that was not built.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    bank: FactBank = Field(exclude=True)
    store: PackStore = Field(exclude=True)
    namespace: str = "default"
    k: int = Field(default=4, ge=1)
    probes: int | None = Field(default=None, ge=1)
    where: dict[str, Any] | None = None
    score_threshold: float | None = None
    rerank: Reranker | None = Field(default=None, exclude=True)
    content: Literal["handle", "text"] = "handle"
    unit: Literal["fact", "bank"] = "fact"
    compiled_for: Any = Field(default="user", exclude=True)
    """`"user"`, `"system"`, or messages that hold `{pack}`."""

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
        **fields: Any,  # noqa: ANN401
    ) -> Self:
        """A retriever over `facts`: adds them to the bank, and compiles their packs into `store`.

        Without `bank`, one is made with `embedder` (by default the bundled MiniLM): in Chroma at `path`, or in memory.
        Packs are compiled for the place `compiled_for`; for a prompt of LangChain that is `pack_place(prompt)`. Each is
        stored as soon as it is made, and what is stored already for this model and place is not made again: an
        interrupted run goes on where it stopped. `lazy` packs are computed on first use instead. `fields` are those of
        the retriever.

        With `unit="bank"`, adding facts to a bank that has some regroups them: its packs are then compiled anew.
        """
        if bank is None:
            embedder = embedder or SentenceTransformerEmbedder()
            bank = MemoryFactBank(embedder) if path is None else ChromaFactBank(path, embedder)
        elif embedder is not None or path is not None:
            raise BankError("Got a bank together with an embedder or a path; a bank brings its own.")
        facts = list(facts)
        bank.build(facts)
        retriever = cls(bank=bank, store=store, namespace=namespace, compiled_for=compiled_for, **fields)
        if retriever.unit == "bank":
            facts = [retriever._whole(number) for number in range(bank.banks)]
        compile_facts(
            facts, engine, store, namespace=namespace, compiled_for=compiled_for, lazy=lazy, progress=progress
        )
        return retriever

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,  # noqa: ARG002 - LangChain's signature
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        unknown = sorted(set(options) - set(_PER_CALL))
        if unknown:
            raise TypeError(f"Got the options {', '.join(unknown)}; expected some of {', '.join(_PER_CALL)}.")
        wanted = {name: options.get(name, getattr(self, name)) for name in _PER_CALL}
        return [self._document(hit) for hit in self._hits(query, **wanted)]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun | None = None,  # noqa: ARG002 - LangChain's signature
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        return await asyncio.to_thread(self._get_relevant_documents, query, **options)

    def _hits(  # noqa: PLR0913 - what may be asked for
        self,
        query: str,
        k: int,
        probes: int | None,
        where: Filter | None,
        score_threshold: float | None,
        rerank: Reranker | None,
    ) -> list[Hit]:
        least = -math.inf if score_threshold is None else score_threshold
        asked = hits_wanted(k, rerank)
        if self.unit == "fact":
            hits = self.bank.search(query, asked, probes=probes, where=where, rerank=rerank)
            return [hit for hit in hits if hit.score >= least][:k]
        asked = max(_FACTS_PER_BANK * k, asked)
        while True:
            best: dict[int, Hit] = {}
            hits = self.bank.search(query, asked, probes=probes and max(k, probes), where=where, rerank=rerank)
            kept = [hit for hit in hits if hit.score >= least]
            for hit in kept:
                best.setdefault(hit.bank, hit)
            # Behind a hit that is not similar enough there is none that is.
            if len(best) >= k or len(kept) < len(hits) or asked >= len(self.bank):
                found = list(best.values())[:k]
                return [Hit(self._whole(hit.bank), hit.score, hit.bank) for hit in found]
            asked *= _FACTS_PER_BANK

    def _whole(self, number: int) -> Fact:
        """One bank as a fact."""
        facts = self.bank.bank_facts(number)
        sources = dict.fromkeys(fact.source for fact in facts if fact.source)
        return Fact(
            "\n".join(fact.text for fact in facts),
            title=f"bank {number}",
            source=next(iter(sources)) if len(sources) == 1 else "",
            metadata={"facts": " ".join(fact.id for fact in facts)},
        )

    def _document(self, hit: Hit) -> Document:
        fact = hit.fact
        handle = stored_handle(self.store, fact.text, self.namespace, self.compiled_for)
        if handle is None:
            logger.warning("There is no pack of fact %s in %s; it goes as text.", fact.id, self.store.path)
        about = {
            **fact.metadata,
            "text": fact.text,
            "handle": None if handle is None else str(handle),
            "title": fact.title,
            "source": fact.source,
            "score": hit.score,
            "bank": hit.bank,
        }
        as_text = handle is None or self.content == "text"
        return Document(fact.text if as_text else str(handle), id=fact.id, metadata=about)
