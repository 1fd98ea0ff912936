"""`KnowledgePackRetriever`: a fact bank as a LangChain retriever whose documents have packs."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterable
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, model_validator

from kp_core import Embedder, Fact, FactBank, Session
from kp_core.delivery import Delivery, Found, Unit, open_bank
from kp_core.engines.request import CompiledFor, refuse_unknown
from kp_core.facts import Reranker
from kp_core.packs.view import Packs

__all__ = ["KnowledgePackRetriever"]

_PER_CALL = ("k", "probes", "where", "score_threshold", "rerank")


class KnowledgePackRetriever(BaseRetriever):
    """Finds facts of `namespace` in `bank` and returns each as a document, with the handle of its pack in `store`.

    A document's `page_content` is its text, which everyone reads; with `content="handle"` it is the handle alone, for
    models that resolve it. A fact whose pack is not in the store comes as text either way, with a logged warning. The
    `id` is the fact's. The metadata is the fact's own, with `handle`, `score`, `bank`, `title`, `source` and `text`
    added where it has no such field and ours is not empty; `kp` always holds `handle`, `score`, `bank` and `id`.

    With `unit="bank"` a document is a whole bank of about twenty facts, one per line, under one handle: the `k` banks
    with the best facts; with `unit="document"`, all facts of a source.

    `probes` banks are searched; by default as many as the bank's calibration says. `where` keeps facts by metadata (see
    `kp_core.facts.filters`), `score_threshold` by their cosine. `rerank`, e.g. `kp_core.facts.LexicalReranker()`, puts
    what was found into its order: the first `k` of it that `score_threshold` keeps are returned. Scores stay cosines.
    These five may also be given to `invoke`.

    Raises `OptionError` for options that do not exist, `BankError` for a blank question and a bank that was not built.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    bank: FactBank = Field(exclude=True)
    store: Packs = Field(exclude=True)
    namespace: str = "default"
    k: int = Field(default=4, ge=1)
    probes: int | None = Field(default=None, ge=1)
    where: dict[str, Any] | None = None
    score_threshold: float | None = None
    rerank: Reranker | None = Field(default=None, exclude=True)
    content: Literal["text", "handle"] = "text"
    unit: Unit = "fact"

    @model_validator(mode="before")
    @classmethod
    def _check_given(cls, given: Any) -> Any:  # noqa: ANN401 - what a caller gave
        refuse_unknown(given, cls.model_fields, cls.__name__)
        if given.get("bank") is not None:
            open_bank(given["bank"])
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._delivery()  # It refuses what is no namespace.
        return self

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
        **fields: Any,  # noqa: ANN401
    ) -> Self:
        """A retriever over `facts`: adds them to the bank, and compiles their packs into `store`.

        Without `bank`, one is made with `embedder` (by default the bundled MiniLM): in Chroma at `path`, or in memory.
        Facts go into the retriever's namespace; one that has a namespace of its own stays there, where this retriever
        does not see it. Packs are compiled for the position `compiled_for` (of a prompt: `pack_place(prompt)`), `lazy`
        ones on first use (see `kp_core.delivery`). Facts that come regroup banks, whose packs are then compiled anew.
        """
        refuse_unknown(fields, (*cls.model_fields, *inspect.signature(cls.from_facts).parameters), cls.__name__)
        retriever = cls(bank=open_bank(bank, embedder, path), store=store, **fields)
        kv = "lazy" if lazy else "stored"
        retriever._delivery(engine, kv=kv, compiled_for=compiled_for).add(facts, progress=progress)
        return retriever

    def _delivery(self, engine: Session | None = None, **options: Any) -> Delivery:  # noqa: ANN401
        return Delivery(self.bank, engine, self.store, unit=self.unit, namespace=self.namespace, **options)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,  # noqa: ARG002 - LangChain's signature
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        refuse_unknown(options, _PER_CALL, "A call of the retriever")
        asked = {name: options.get(name, getattr(self, name)) for name in _PER_CALL}
        return [self._document(each) for each in self._delivery().search(query, **asked)]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun | None = None,  # noqa: ARG002 - LangChain's signature
        **options: Any,  # noqa: ANN401
    ) -> list[Document]:
        return await asyncio.to_thread(self._get_relevant_documents, query, **options)

    def _document(self, found: Found) -> Document:
        fact, handle = found.unit, None if found.handle is None else str(found.handle)
        record = {"handle": handle, "score": found.hit.score, "bank": found.hit.bank}
        ours = {**record, "title": fact.title, "source": fact.source, "text": fact.text}
        kept = {name: value for name, value in ours.items() if value not in (None, "")}
        content = found.content if self.content == "handle" else fact.text
        return Document(content, id=fact.id, metadata={**kept, **fact.metadata, "kp": {**record, "id": fact.id}})
