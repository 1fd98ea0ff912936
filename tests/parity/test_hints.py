"""A store by its path, and hints that name what the class has, wherever either may be given."""

import re
from functools import partial

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from llama_index.core.schema import TextNode

from kp_core import Fact, MemoryFactStore
from kp_core.errors import FactError, ModelError, OptionError, PackError, PromptError
from kp_langchain import (
    ChatKnowledgePacks,
    KnowledgePackRetriever,
    create_pack_search_tool,
    resolve_documents,
    to_handles,
)
from kp_langchain.middleware import PackSummarizer
from kp_langchain.store import KnowledgePackStore
from kp_llamaindex import KnowledgePackLLM, KnowledgePackMemoryBlock, KnowledgePackPostprocessor
from kp_llamaindex import KnowledgePackRetriever as LlamaRetriever
from tests.conftest import tiny_engine
from tests.kits import HashEmbedder

TEXT = "The mill of Veyl has four sails."


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "packs")


@pytest.fixture
def retriever(path):
    documents = [Document(TEXT, id="mill")]
    facts = MemoryFactStore(HashEmbedder())
    settings = {"engine": tiny_engine(), "store": path, "fact_store": facts, "k": 1}
    return KnowledgePackRetriever.from_documents(documents, **settings)


@pytest.fixture
def nodes_of(path):
    """Makes retrievers of nodes over one fact."""
    make = partial(LlamaRetriever, MemoryFactStore(HashEmbedder()), path, engine=tiny_engine())
    make().delivery.add([Fact(TEXT)], progress=False)
    return make


def test_a_store_may_be_a_path_in_langchain(path, retriever):
    message = create_pack_search_tool(retriever, path).invoke(
        {"type": "tool_call", "id": "1", "name": "search_knowledge", "args": {"query": "mill"}}
    )
    assert message.content.startswith("kp:default/")
    assert [document.page_content for document in message.artifact] == [message.content]
    assert [document.page_content for document in resolve_documents(message.artifact, path)] == [TEXT]
    assert [document.page_content for document in resolve_documents([message.content], path)] == [TEXT]
    assert [document.page_content for document in to_handles(retriever.invoke("mill"), path)] == [message.content]
    summary = PackSummarizer(tiny_engine(), path)([HumanMessage(TEXT)])
    assert TEXT in resolve_documents([summary], path)[0].page_content
    memory = KnowledgePackStore(tiny_engine(), path, embedder=HashEmbedder())
    memory.put(("a",), "mill", {"text": TEXT})
    assert memory.get(("a",), "mill").handle.startswith("kp:lg-a/")


def test_a_store_may_be_a_path_in_llamaindex(path, nodes_of):
    [found] = nodes_of(similarity_top_k=1).retrieve("mill")
    llm = KnowledgePackLLM(engine=tiny_engine(), store=path, namespaces="default", max_tokens=1)
    assert llm.complete(found.get_content("llm")).raw["kp"]["pack_tokens"] > 0
    packing = KnowledgePackPostprocessor(engine=tiny_engine(), store=path, precompile="now")
    [packed] = packing.postprocess_nodes([found.model_copy(update={"node": TextNode(text=TEXT)})])
    assert packed.get_content("llm").startswith("kp:default/")
    assert KnowledgePackMemoryBlock(engine=tiny_engine(), store=path).text() == ""


@pytest.mark.parametrize("store", [7, object()])
def test_what_is_no_store_is_refused_at_once(store, retriever):
    calls = [
        lambda: create_pack_search_tool(retriever, store),
        lambda: resolve_documents([], store),
        lambda: to_handles([], store),
        lambda: PackSummarizer(tiny_engine(), store),
        lambda: KnowledgePackStore(tiny_engine(), store, embedder=HashEmbedder()),
        lambda: LlamaRetriever(retriever.fact_store, store),
        lambda: KnowledgePackPostprocessor(engine=tiny_engine(), store=store),
    ]
    for call in calls:
        with pytest.raises(PackError, match=r"expected a `kp_core.PackStore`, its path"):
            call()


def test_a_summarizer_refuses_what_is_no_engine_and_no_namespace(path):
    with pytest.raises(ModelError, match="Got a str as engine"):
        PackSummarizer("bundled", path)
    with pytest.raises(PromptError, match="namespace"):
        PackSummarizer(tiny_engine(), path, namespace="Not one")


def test_content_that_is_none_is_refused_where_it_is_given(nodes_of, path, retriever):
    with pytest.raises(FactError, match="Got content='handles'; expected 'handle' or 'text'"):
        nodes_of(content="handles")
    with pytest.raises(OptionError, match=r"has no option 'content'"):
        KnowledgePackPostprocessor(engine=tiny_engine(), store=path, content="handles")
    with pytest.raises(ValueError, match="'text' or 'handle'"):
        KnowledgePackRetriever(fact_store=retriever.fact_store, store=path, content="handles")


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda r, _: KnowledgePackRetriever.from_retriever(r, store=r.store, k=4), 'search_kwargs={"k": 4}'),
        (lambda r, _: KnowledgePackRetriever(fact_store=r.fact_store, store=r.store, top_k=4), "Did you mean 'k'?"),
        (lambda r, _: KnowledgePackRetriever.from_facts([], store=r.store, engine=None, search_kwargs={}), "`k=4`"),
        (lambda _, make: make(top_k=4), "Did you mean 'similarity_top_k'?"),
        (lambda r, _: ChatKnowledgePacks(view=r.store.view("default")), "`store=` and `namespaces=`"),
        (lambda r, _: KnowledgePackLLM(view=r.store.view("default")), "`store=` and `namespaces=`"),
        (lambda *_: ChatKnowledgePacks().bind(view=None), "`store=` and `namespaces=`"),
        (lambda *_: ChatKnowledgePacks(n=2), "A call gives one answer"),
        (lambda r, _: KnowledgePackMemoryBlock(store=r.store, memory_token=2), "Did you mean 'memory_tokens'?"),
        (lambda r, _: KnowledgePackMemoryBlock(store=r.store, content="text"), "no option 'content'"),
    ],
)
def test_a_hint_names_what_the_class_has(call, hint, retriever, nodes_of):
    with pytest.raises(OptionError, match=re.escape(hint)):
        call(retriever, nodes_of)
