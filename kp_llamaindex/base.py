"""`PackIndex`, base of the indexes over packs: documents that change, query engines, chat engines."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from llama_index.core import Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.ingestion import run_transformations
from llama_index.core.llms import LLM
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE, CITATION_REFINE_TEMPLATE
from llama_index.core.schema import BaseNode, Document, TransformComponent

from kp_core import Session
from kp_core.delivery import Precompile
from kp_core.engines.request import CompiledFor, refuse_unknown
from kp_core.errors import PromptError
from kp_core.packs.codec import Compression
from kp_core.packs.view import Packs
from kp_llamaindex.llm import KnowledgePackLLM
from kp_llamaindex.nodes import NumberSources
from kp_llamaindex.place import pack_place

__all__ = ["PackIndex"]

logger = logging.getLogger(__name__)


class PackIndex(ABC):
    """An index whose nodes come as packs of `store`, in `namespace`. `KnowledgePackIndex` makes them.

    `compiled_for` is the position packs are compiled for; by default that of the first node in LlamaIndex's own
    question prompt. There a pack is read straight from the store; anywhere else its KV is computed once (see
    `pack_place`). `lazy` packs get their KV on first use; others store it as `compress` says (see `kp_core.delivery`).
    A node found without a pack is compiled at once. With `precompile="background"` it goes as text this time, and is
    compiled when the engine is idle.

    `llm` is the default LLM of the engines: a `KnowledgePackLLM` on the same engine, store and namespace unless given.
    An LLM of another class cannot resolve handles, so it gets nodes as text. `transformations` cut documents into
    nodes; by default they are those of LlamaIndex's settings.
    """

    _RETRIEVAL: ClassVar[Sequence[str]] = ()

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        engine: Session,
        store: Packs,
        *,
        namespace: str = "default",
        compiled_for: CompiledFor | None = None,
        lazy: bool = False,
        precompile: Precompile = "use",
        compress: Compression = "none",
        llm: LLM | None = None,
        transformations: Sequence[TransformComponent] | None = None,
    ) -> None:
        self.engine, self.store, self.namespace = engine, store, namespace
        self.lazy, self.precompile, self.compress, self.transformations = lazy, precompile, compress, transformations
        self.llm: LLM = llm or KnowledgePackLLM(engine=engine, store=store, namespaces=(namespace,))
        self.compiled_for = pack_place(DEFAULT_TEXT_QA_PROMPT_SEL, self.llm) if compiled_for is None else compiled_for

    @abstractmethod
    def insert_nodes(self, nodes: Sequence[BaseNode]) -> None:
        """Add nodes."""

    @abstractmethod
    def delete_ref_doc(self, ref_doc_id: str) -> None:
        """Remove the nodes of a document, and their packs."""

    @abstractmethod
    def as_retriever(self, **settings: Any) -> BaseRetriever:  # noqa: ANN401
        """A retriever."""

    @abstractmethod
    def _hashes(self, ref_doc_ids: Sequence[str]) -> Mapping[str, str | None]:
        """The hashes that these documents had when their nodes were made; missing or `None` for unknown documents."""

    def insert(self, document: Document) -> None:
        """Cut `document` into nodes and add them."""
        steps = Settings.transformations if self.transformations is None else self.transformations
        self.insert_nodes(run_transformations([document], steps))

    def update_ref_doc(self, document: Document) -> None:
        """Replace the stored document of the same id by `document`. Its old nodes and their packs are removed."""
        self.delete_ref_doc(document.id_)
        self.insert(document)

    def refresh_ref_docs(self, documents: Sequence[Document]) -> list[bool]:
        """Insert new documents and update changed ones. Returns for each of `documents` whether it was either."""
        hashes = self._hashes([document.id_ for document in documents])
        changed = [hashes.get(document.id_) != document.hash for document in documents]
        for document, is_changed in zip(documents, changed, strict=True):
            if is_changed:
                self.update_ref_doc(document)
        return changed

    def as_query_engine(
        self,
        llm: LLM | None = None,
        *,
        citations: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> BaseQueryEngine:
        """A `RetrieverQueryEngine`; `settings` are those of the retriever and of `RetrieverQueryEngine.from_args`.

        With `citations` the prompt asks for sources by number: `response.source_nodes[n - 1]` is source n.
        """
        llm = llm or self.llm
        retriever = self._retriever(llm, settings)
        if citations:
            settings.setdefault("text_qa_template", CITATION_QA_TEMPLATE)
            settings.setdefault("refine_template", CITATION_REFINE_TEMPLATE)
            settings["node_postprocessors"] = [*settings.get("node_postprocessors", ()), NumberSources()]
        query_engine: BaseQueryEngine = _made(
            RetrieverQueryEngine.from_args, settings, self._RETRIEVAL, retriever=retriever, llm=llm
        )
        return query_engine

    def as_chat_engine(
        self,
        chat_mode: ChatMode = ChatMode.BEST,
        llm: LLM | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> BaseChatEngine:
        """A chat engine over the index; `ChatMode.BEST` is `CONDENSE_PLUS_CONTEXT`, as in LlamaIndex.

        Raises `PromptError` for modes that LlamaIndex no longer has.
        """
        llm = llm or self.llm
        engines: dict[ChatMode, Any] = {
            ChatMode.BEST: CondensePlusContextChatEngine,
            ChatMode.CONDENSE_PLUS_CONTEXT: CondensePlusContextChatEngine,
            ChatMode.CONTEXT: ContextChatEngine,
            ChatMode.CONDENSE_QUESTION: CondenseQuestionChatEngine,
            ChatMode.SIMPLE: SimpleChatEngine,
        }
        if chat_mode not in engines:
            raise PromptError(
                f"Got chat_mode={chat_mode!r}; expected one of {', '.join(mode.value for mode in engines)}."
            )
        parts: dict[str, Any] = {}
        if chat_mode == ChatMode.CONDENSE_QUESTION:
            retrieval = {name: settings.pop(name) for name in self._RETRIEVAL if name in settings}
            parts = {"query_engine": self.as_query_engine(llm, **retrieval)}
        elif chat_mode != ChatMode.SIMPLE:
            parts = {"retriever": self._retriever(llm, settings)}
        chat_engine: BaseChatEngine = _made(
            engines[chat_mode].from_defaults, settings, self._RETRIEVAL, llm=llm, **parts
        )
        return chat_engine

    @property
    def _packing(self) -> dict[str, Any]:
        """The settings of retrievers and postprocessors."""
        names = ("engine", "store", "namespace", "compiled_for", "lazy", "precompile", "compress")
        return {name: getattr(self, name) for name in names}

    def _retriever(self, llm: LLM, settings: dict[str, Any]) -> BaseRetriever:
        """The retriever for `llm`. Removes the retriever's settings from `settings`."""
        retrieval = {name: settings.pop(name) for name in self._RETRIEVAL if name in settings}
        if not isinstance(llm, KnowledgePackLLM) and retrieval.get("content") != "text":
            logger.warning("%s resolves no handles; nodes go to it as text.", type(llm).__name__)
            retrieval["content"] = "text"
        return self.as_retriever(**retrieval)


def _made(make: Callable[..., Any], settings: Mapping[str, Any], known: Sequence[str], **parts: Any) -> Any:  # noqa: ANN401 - an engine
    """Call `make` with `parts` and `settings`. Refuses unknown settings, which LlamaIndex would ignore."""
    refuse_unknown(settings, (*inspect.signature(make).parameters, *known), make.__qualname__)
    return make(**parts, **settings)
