"""`KnowledgePackIndex`: documents in, query engines and chat engines over packs out."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.ingestion import run_transformations
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE, CITATION_REFINE_TEMPLATE
from llama_index.core.schema import BaseNode, Document, TransformComponent

from kp_core import Embedder, FactBank, Message, Session
from kp_core.delivery import Delivery, Unit, open_bank
from kp_core.engines.request import CompiledFor, refuse_unknown
from kp_core.errors import BankError, PromptError
from kp_core.packs.view import Packs
from kp_llamaindex.llm import KnowledgePackLLM
from kp_llamaindex.messages import to_messages
from kp_llamaindex.nodes import NumberSources, to_fact
from kp_llamaindex.retriever import KnowledgePackRetriever

__all__ = ["KnowledgePackIndex", "KnowledgePackSink", "pack_place"]

logger = logging.getLogger(__name__)

_SLOT = "{pack}"
_RETRIEVAL = ("similarity_top_k", "probes", "filters", "score_cutoff", "rerank", "content", "unit")


class KnowledgePackIndex:
    """A fact bank and a pack store, filled from LlamaIndex's nodes, with the faces of an index.

    The pack of a node holds what a text node would have given the model: its text, and the metadata that is not in its
    `excluded_llm_metadata_keys`; that is also what is embedded. With `unit="bank"` it
    holds a bank of about twenty nodes. `compiled_for` is the place packs are compiled for, by default that of the first
    node in LlamaIndex's own question prompt: there the pack comes straight from the store, and anywhere else its tokens
    are computed once (see `pack_place`).

    `llm` is what the engines use unless they are given one: by default a `KnowledgePackLLM` on the same engine, store
    and namespace. An LLM of another class cannot resolve handles, so its engines get nodes as text.
    """

    def __init__(  # noqa: PLR0913 - one keyword per part it is made of
        self,
        engine: Session,
        store: Packs,
        bank: FactBank,
        *,
        namespace: str = "default",
        unit: Unit = "fact",
        compiled_for: CompiledFor | None = None,
        lazy: bool = False,
        progress: bool = True,
        llm: LLM | None = None,
    ) -> None:
        self.engine, self.store, self.bank = engine, store, open_bank(bank)
        self.namespace, self.unit, self.lazy, self.progress = namespace, unit, lazy, progress
        self.llm: LLM = llm or KnowledgePackLLM(engine=engine, store=store, namespaces=(namespace,))
        self.compiled_for = pack_place(DEFAULT_TEXT_QA_PROMPT_SEL, self.llm) if compiled_for is None else compiled_for

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
        return cls.from_nodes(run_transformations(list(documents), steps), **settings)

    @classmethod
    def from_nodes(  # noqa: PLR0913 - one keyword per part it is made of
        cls,
        nodes: Sequence[BaseNode],
        *,
        engine: Session,
        store: Packs,
        bank: FactBank | None = None,
        embedder: Embedder | None = None,
        path: str | os.PathLike[str] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """An index over `nodes`. Without `bank`, one is made with `embedder`: in Chroma at `path`, or in memory."""
        index = cls(engine, store, open_bank(bank, embedder, path), **settings)
        index.insert_nodes(nodes)
        return index

    @classmethod
    def from_vector_index(cls, index: VectorStoreIndex, **settings: Any) -> Self:  # noqa: ANN401
        """An index over the nodes of `index`; `settings` are those of `from_nodes`.

        Raises `BankError` when the vector store keeps the nodes to itself.
        """
        nodes = list(index.docstore.docs.values())
        if not nodes:
            try:
                nodes = list(index.vector_store.get_nodes(None))
            except NotImplementedError as error:
                raise BankError(
                    f"{type(index.vector_store).__name__} cannot list its nodes. Pass them: `from_nodes(nodes, ...)`."
                ) from error
        return cls.from_nodes(nodes, **settings)

    def insert_nodes(self, nodes: Sequence[BaseNode]) -> None:
        """Add `nodes` to the bank and compile their packs; blank ones are left out, known ones cost nothing."""
        facts = [to_fact(node) for node in nodes if node.get_content().strip()]
        if len(facts) < len(nodes):
            logger.warning("%d of %d nodes are blank and were left out.", len(nodes) - len(facts), len(nodes))
        delivery = Delivery(
            self.bank,
            self.engine,
            self.store,
            unit=self.unit,
            kv="lazy" if self.lazy else "stored",
            compiled_for=self.compiled_for,
            namespace=self.namespace,
        )
        delivery.add(facts, progress=self.progress)

    def insert(self, document: Document) -> None:
        """Cut `document` into nodes as LlamaIndex's settings say, and add them."""
        self.insert_nodes(run_transformations([document], Settings.transformations))

    def as_sink(self) -> KnowledgePackSink:
        """The index as the last step of an `IngestionPipeline`."""
        return KnowledgePackSink(index=self, path=str(getattr(self.store, "path", "")), namespace=self.namespace)

    def as_retriever(self, **settings: Any) -> KnowledgePackRetriever:  # noqa: ANN401
        """A retriever; `settings` are those of `KnowledgePackRetriever`."""
        return KnowledgePackRetriever(
            self.bank, self.store, **{"namespace": self.namespace, "unit": self.unit, **settings}
        )

    def as_query_engine(
        self,
        llm: LLM | None = None,
        *,
        citations: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> BaseQueryEngine:
        """A `RetrieverQueryEngine`; `settings` are those of the retriever and of `RetrieverQueryEngine.from_args`.

        With `citations` the answer is asked to cite sources by number: `response.source_nodes[n - 1]` is source n.
        """
        llm = llm or self.llm
        retriever = self._retriever(llm, settings)
        if citations:
            settings.setdefault("text_qa_template", CITATION_QA_TEMPLATE)
            settings.setdefault("refine_template", CITATION_REFINE_TEMPLATE)
            settings["node_postprocessors"] = [*settings.get("node_postprocessors", ()), NumberSources()]
        made: BaseQueryEngine = _made(RetrieverQueryEngine.from_args, settings, retriever=retriever, llm=llm)
        return made

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
            asked = {name: settings.pop(name) for name in _RETRIEVAL if name in settings}
            parts = {"query_engine": self.as_query_engine(llm, **asked)}
        elif chat_mode != ChatMode.SIMPLE:
            parts = {"retriever": self._retriever(llm, settings)}
        made: BaseChatEngine = _made(engines[chat_mode].from_defaults, settings, llm=llm, **parts)
        return made

    def _retriever(self, llm: LLM, settings: dict[str, Any]) -> KnowledgePackRetriever:
        """The retriever for `llm`; takes its own out of `settings`."""
        asked = {name: settings.pop(name) for name in _RETRIEVAL if name in settings}
        if not isinstance(llm, KnowledgePackLLM) and asked.get("content") != "text":
            logger.warning("%s resolves no handles; nodes go to it as text.", type(llm).__name__)
            asked["content"] = "text"
        return self.as_retriever(**asked)


def _made(make: Callable[..., Any], settings: Mapping[str, Any], **parts: Any) -> Any:  # noqa: ANN401 - an engine
    """What `make` makes of both; LlamaIndex passes over settings that it does not know."""
    refuse_unknown(settings, (*inspect.signature(make).parameters, *_RETRIEVAL), make.__qualname__)
    return make(**parts, **settings)


class KnowledgePackSink(TransformComponent):
    """The last step of an `IngestionPipeline`: puts its nodes into an index, and hands them on as they are.

    A pipeline with a cache skips steps that it has seen with the same nodes; the store's path and the namespace are
    part of what it compares.
    """

    index: Any = Field(exclude=True, repr=False)
    path: str
    namespace: str

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "KnowledgePackSink"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:  # noqa: ANN401, ARG002
        """Insert `nodes`."""
        self.index.insert_nodes(nodes)
        return nodes


def pack_place(template: BasePromptTemplate, llm: LLM | None = None, variable: str = "context_str") -> list[Message]:
    """Where the first node will stand in a prompt of `template`, as messages for `compiled_for`.

    A pack compiled for this place is used straight from the store when its node is the first one. `llm` selects among
    the variants of a template and brings its system prompt. Raises `PromptError` when another variable stands before
    `variable`, as what precedes the nodes then changes from call to call, or when `variable` is not in the template.
    """
    names = [name for name in template.template_vars if name != variable]
    marks = {name: f"\0{number}\0" for number, name in enumerate(names)}
    messages = template.format_messages(llm=llm, **{variable: _SLOT}, **marks)
    if llm is not None and llm.system_prompt:
        messages = [ChatMessage(role="system", content=llm.system_prompt), *messages]
    made = to_messages(messages)
    before = ""
    for message in made:
        before += message["content"].partition(_SLOT)[0]
        if _SLOT in message["content"]:
            break
    else:
        raise PromptError(f"Got the variable {variable!r}; the variables of the prompt are: {', '.join(names)}.")
    moving = next((name for name, mark in marks.items() if mark in before), None)
    if moving is not None:
        raise PromptError(
            f"{moving!r} stands before {variable!r} in the prompt, so what precedes the nodes changes from call to "
            f"call, and no KV computed beforehand can be exact there. Put {variable!r} first."
        )
    for message in made:
        for mark in marks.values():
            message["content"] = message["content"].replace(mark, "?")
    return list(made)
