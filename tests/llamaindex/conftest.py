"""A small world for LlamaIndex: nodes, their packs, and engines over them."""

import json
from functools import partial
from pathlib import Path

import llama_index.core
import numpy as np
import pytest
from llama_index.core import Settings
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.schema import TextNode

from kp_core import Fact, MemoryFactStore, PackStore
from kp_llamaindex import KnowledgePackLLM, KnowledgePackRetriever
from tests.conftest import tiny_engine

DEMO = Path(__file__).parents[2] / "cookbooks" / "demo"
QUESTION = "What bird is shown on the flag of the Orrelay Isles?"


class CountingEmbedding(BaseEmbedding):
    """LlamaIndex's face of `LetterEmbedder`, which keeps the texts that it embeds."""

    model_name: str = "letters"
    _texts: list = PrivateAttr(default_factory=list)

    @property
    def texts(self):
        return self._texts

    def _get_query_embedding(self, query):
        return LetterEmbedder().embed_query(query).tolist()

    async def _aget_query_embedding(self, query):
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text):
        self._texts.append(text)
        return self._get_query_embedding(text)


class LetterEmbedder:
    """Counts letters and pairs of letters: fast, and texts that share words are near each other."""

    name, dimensions = "letters", 256

    def embed(self, texts):
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text):
        vector = np.full(self.dimensions, 1e-3, np.float32)
        for left, right in zip(text.lower(), text.lower()[1:], strict=False):
            vector[(ord(left) * 31 + ord(right)) % self.dimensions] += 1
        return vector / np.linalg.norm(vector)


@pytest.fixture(scope="session")
def nodes():
    with (DEMO / "facts.jsonl").open() as lines:
        read = [json.loads(line) for line in lines][:24]
    return [
        TextNode(
            id_=fact["id"],
            text=fact["text"],
            metadata={"title": fact["title"], "number": number},
            excluded_llm_metadata_keys=["title", "number"],
        )
        for number, fact in enumerate(read)
    ]


@pytest.fixture
def embedder():
    return LetterEmbedder()


@pytest.fixture
def store(tmp_path):
    return PackStore(tmp_path / "packs")


@pytest.fixture
def retriever_of(nodes, store, embedder):
    """Makes retrievers over the texts of the nodes as facts, by the tiny engine; packs are compiled, and lazy."""
    facts = [Fact(node.text, id=node.node_id, metadata=node.metadata) for node in nodes]
    make = partial(KnowledgePackRetriever, MemoryFactStore(embedder), store, engine=tiny_engine(), lazy=True)
    make().delivery.add(facts, progress=False)
    return make


@pytest.fixture
def llm(store):
    return KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["default"], max_tokens=4)


@pytest.fixture
def tiny():
    return KnowledgePackLLM(engine=tiny_engine(), max_tokens=8)


@pytest.fixture
def usages():
    """The usage of every chat that ends, as LlamaIndex's events tell it."""
    seen = []

    class Listener(BaseEventHandler):
        def handle(self, event, **_):
            if isinstance(event, LLMChatEndEvent) and event.response is not None:
                seen.append(event.response.raw["kp"])

    listener, dispatcher = Listener(), get_dispatcher()
    dispatcher.add_event_handler(listener)
    yield seen
    dispatcher.event_handlers.remove(listener)


@pytest.fixture
def clean_settings():
    """LlamaIndex's settings, put back as they were."""
    kept = {name: getattr(Settings, name) for name in ("_llm", "_tokenizer", "_embed_model")}
    tokenizer = llama_index.core.global_tokenizer
    yield
    for name, value in kept.items():
        setattr(Settings, name, value)
    llama_index.core.global_tokenizer = tokenizer
