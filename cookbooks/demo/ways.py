"""The chains that are compared, and what they answer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from cookbooks.demo.corpus import Corpus, Question
from kp_core import ChromaFactStore, PackStore, Session
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever, pack_place

__all__ = ["ALONE", "PROMPT", "Way", "World", "accumulate", "ask"]

MAX_TOKENS = 16
FACTS = 3
SEARCHES = 5
# Whole banks take the most time, so every second question has to do for them.
_BANK_EVERY = 2
_NAMESPACE = "demo"
_ASK = "Using the context, answer in a few words: {question}"
# The documents come first in their message, so that what precedes them is the same in every call.
PROMPT = ChatPromptTemplate([("human", "Context:\n{context}\n\n" + _ASK)])
ALONE = ChatPromptTemplate([("human", "Answer in a few words: {question}")])

Tick = Callable[[], None]


def join(documents: Sequence[Document]) -> str:
    """What goes into the prompt for the documents found."""
    return "\n".join(document.page_content for document in documents)


class World:
    """A corpus in Chroma, its packs in a store, and a chat model that resolves their handles."""

    def __init__(self, corpus: Corpus, engine: Session, facts: ChromaFactStore, folder: Path) -> None:
        self.corpus, self.engine = corpus, engine
        self.store = PackStore(folder / "packs")
        self.model = ChatKnowledgePacks(engine=engine, store=self.store, namespaces=[_NAMESPACE], max_tokens=MAX_TOKENS)
        # Every pack is known at once; which are also computed beforehand, `compile` says.
        self.place = pack_place(PROMPT)
        common = {
            "engine": engine,
            "store": self.store,
            "fact_store": facts,
            "namespace": _NAMESPACE,
            "compiled_for": self.place,
            "content": "handle",
        }
        self.facts = KnowledgePackRetriever.from_facts(corpus.facts, **common, lazy=True, k=FACTS)
        self.banks = KnowledgePackRetriever.from_facts((), **common, lazy=True, k=1, unit="bank")

    def compile(self, questions: Sequence[Question]) -> int:
        """Compute and store the KV of the packs that `questions` will use from the store; how many there are.

        That is the first document of each: the KV of any other would have to be computed behind it anyway.
        """
        asked = [(self.facts, _texts(questions)), (self.banks, _texts(questions[::_BANK_EVERY]))]
        first = [retriever.invoke(text)[0] for retriever, texts in asked for text in texts]
        texts = list(dict.fromkeys(document.metadata["text"] for document in first))
        todo = [text for text in texts if self.store.get(self.store.handle(text, _NAMESPACE)).is_lazy]
        for pack in self.engine.build_packs(todo, namespace=_NAMESPACE, compiled_for=self.place):
            self.store.put(pack)
        return len(texts)

    def ways(self) -> tuple[Way, ...]:
        """The five chains of the first table."""
        return (
            Way("no knowledge", ALONE | self.model),
            Way(f"text, {FACTS} facts", self._chain(self.facts, as_text=True)),
            Way(f"packs, {FACTS} facts", self._chain(self.facts), like=f"text, {FACTS} facts"),
            Way("text, one bank", self._chain(self.banks, as_text=True), every=_BANK_EVERY),
            Way("packs, one bank", self._chain(self.banks), like="text, one bank", every=_BANK_EVERY),
        )

    def _chain(self, retriever: KnowledgePackRetriever, *, as_text: bool = False) -> Runnable[object, AIMessage]:
        retriever = retriever.model_copy(update={"content": "text" if as_text else "handle"})
        return {"context": _question | retriever | join, "question": _question} | PROMPT | self.model


_question = RunnablePassthrough() | (lambda asked: asked["question"])


@dataclass(frozen=True)
class Way:
    """One way of answering; `like` names the way it must agree with, `every` says which questions it is asked."""

    name: str
    chain: Runnable[object, AIMessage]
    like: str = ""
    every: int = 1


@dataclass(frozen=True)
class Result:
    """What one way answered, and what it cost: one entry per question."""

    way: Way
    replies: tuple[AIMessage, ...]
    right: int

    @property
    def texts(self) -> list[str]:
        """The answers."""
        return [reply.text for reply in self.replies]

    def median(self, field: str) -> float:
        """The median of one field of `kp_core.Usage`."""
        return median(self.replies, field)


def median(replies: Sequence[AIMessage], field: str) -> float:
    """The median of one field of `kp_core.Usage`."""
    return statistics.median(reply.response_metadata["kp"][field] for reply in replies)


def ask(world: World, way: Way, tick: Tick) -> Result:
    """The questions of one way, each as if it were the first of this process: nothing in the engine's memory."""
    replies = []
    questions = world.corpus.questions[:: way.every]
    for question in questions:
        world.engine.clear_cache()
        replies.append(way.chain.invoke({"question": question.text}))
        tick()
    right = sum(question.is_answered_by(reply.text) for question, reply in zip(questions, replies, strict=True))
    return Result(way, tuple(replies), right)


def _texts(questions: Sequence[Question]) -> list[str]:
    return [question.text for question in questions]


@dataclass(frozen=True)
class Turn:
    """An agent's state after so many searches: the same question, asked over all that was found so far."""

    searches: int
    text: AIMessage
    packs: AIMessage


def accumulate(world: World, tick: Tick) -> list[Turn]:
    """A conversation of `SEARCHES` searches, each of which finds a bank: once as messages and once as memory.

    Both agents keep the engine's memory from turn to turn, so neither computes again what it has computed.
    """
    # One search for each of the first banks that the questions lead to, so that every search finds something new.
    texts = _texts(world.corpus.questions)
    first = [world.banks.invoke(text)[0] for text in texts]
    found = list({document.id: document for document in first}.values())[:SEARCHES]
    packs_model = world.model.model_copy(update={"placement": "system"})
    question = HumanMessage(_ASK.format(question=texts[0]))

    def with_text(searches: int) -> AIMessage:
        results = [HumanMessage(document.metadata["text"]) for document in found[:searches]]
        return world.model.invoke([*results, question])

    def with_packs(searches: int) -> AIMessage:
        handles = [document.page_content for document in found[:searches]]
        return packs_model.invoke([question], packs=handles)

    replies: list[list[AIMessage]] = []
    for run in (with_text, with_packs):
        world.engine.clear_cache()
        replies.append([])
        for searches in range(1, len(found) + 1):
            replies[-1].append(run(searches))
            tick()
    return [Turn(number, text, packs) for number, (text, packs) in enumerate(zip(*replies, strict=True), 1)]
