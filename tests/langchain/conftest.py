"""A small world, its packs, and a chain over them."""

import json
from pathlib import Path

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from kp_core import ChromaFactStore, Fact, PackStore, SentenceTransformerEmbedder
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever, pack_place

DEMO = Path(__file__).parents[2] / "cookbooks" / "demo"
QUESTIONS = [
    "What bird is shown on the flag of the Orrelay Isles?",
    "What was Nan Orrel's boat moored with at the First Anchoring?",
    "What is the coin of the Orrelay Isles called?",
]

PROMPT = ChatPromptTemplate(
    [("system", "Answer the question in a few words, using the facts."), ("human", "{context}\n\nQuestion: {question}")]
)


def join(documents):
    return "\n".join(document.page_content for document in documents)


def chain_of(retriever, model):
    inputs = {"context": retriever | join, "question": RunnablePassthrough()}
    return inputs | PROMPT | model


def answers_of(retriever, model):
    return chain_of(retriever, model) | StrOutputParser()


@pytest.fixture(scope="session")
def facts():
    with (DEMO / "facts.jsonl").open() as lines:
        read = [json.loads(line) for line in lines]
    return [Fact(fact["text"], title=fact["title"], source="demo", id=fact["id"]) for fact in read[:40]]


@pytest.fixture(scope="session")
def embedder():
    return SentenceTransformerEmbedder()


@pytest.fixture(scope="session")
def store(tmp_path_factory, chat_engine):
    return PackStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def fact_store(tmp_path_factory, embedder, chat_engine):
    with ChromaFactStore(tmp_path_factory.mktemp("facts"), embedder) as fact_store:
        yield fact_store


@pytest.fixture(scope="session")
def isles(facts, chat_engine, store, fact_store):
    return KnowledgePackRetriever.from_facts(
        facts,
        engine=chat_engine,
        store=store,
        fact_store=fact_store,
        namespace="isles",
        compiled_for=pack_place(PROMPT),
        k=3,
        content="handle",
        progress=False,
    )


@pytest.fixture
def retriever(isles):
    return isles


@pytest.fixture
def text_retriever(retriever):
    return retriever.model_copy(update={"content": "text"})


@pytest.fixture
def chat(chat_engine, store):
    return ChatKnowledgePacks(engine=chat_engine, store=store, namespaces=["isles"], max_tokens=12)
