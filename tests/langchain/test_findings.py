"""What handles must not do in LangChain: reach other namespaces, mix engines in a cache, or stop an agent for good."""

import logging

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage

from kp_core import Fact, MemoryFactStore, PackStore, find_handles, load_engine
from kp_langchain import (
    ChatKnowledgePacks,
    KnowledgePackRetriever,
    create_pack_search_tool,
    resolve_documents,
    to_handles,
)
from kp_langchain.middleware import KnowledgePackMiddleware
from tests.conftest import roomy_engine, tiny_engine
from tests.kits import tiny_model, tiny_tokenizer
from tests.llamaindex.conftest import LetterEmbedder


@pytest.fixture
def store(tmp_path):
    return PackStore(tmp_path / "packs")


def put(store, text, namespace="mine"):
    return str(store.put(tiny_engine().build_pack(text, namespace=namespace, lazy=True)))


def chat(store, **fields):
    given = {"engine": tiny_engine(), "store": store, "namespaces": ["mine"], "max_tokens": 2}
    return ChatKnowledgePacks(**(given | fields))


@pytest.mark.parametrize("content", ["text", "handle"])
@pytest.mark.parametrize("engine", [None, "tiny"])
def test_a_handle_inside_a_fact_is_not_followed_when_the_fact_goes_as_text(engine, content, store):
    inner = put(store, "The inner secret.")
    fact = Fact(f"See {inner}.", namespace="mine")
    held = MemoryFactStore(LetterEmbedder())
    held.add([fact])
    retriever = KnowledgePackRetriever(
        fact_store=held,
        store=store,
        engine=engine and tiny_engine(),
        namespace="mine",
        content=content,
        kv="lazy",
        precompile="now",
    )
    [document] = retriever.invoke("inner?")
    usage = chat(store).invoke([HumanMessage(document.page_content)]).response_metadata["kp"]
    own = "" if engine is None or content == "text" else fact.text
    assert usage["pack_tokens"] == (len(store.peek(find_handles(put(store, own))[0][2]).token_ids) if own else 0)
    # Whoever reads it reads what it says.
    assert document.metadata["text"] == fact.text
    if engine:
        assert [each.page_content for each in resolve_documents([document], store.view("mine"))] == [fact.text]
        assert [each.page_content for each in to_handles([document], store)] == [put(store, fact.text)]


def test_documents_are_resolved_through_a_view(store):
    mine, theirs = put(store, "My fact."), put(store, "Their fact.", "theirs")
    forged = Document("Their fact.", metadata={"kp": {"handle": theirs}})
    view = store.view("mine")
    read = resolve_documents([mine, theirs, Document(theirs)], view)
    assert [each.page_content for each in read] == ["My fact.", theirs, theirs]
    assert [each.page_content for each in to_handles([forged], view)] == ["Their fact."]


def test_a_search_tool_reads_the_namespace_of_its_retriever_alone(store):
    theirs = put(store, "Their secret.", "theirs")
    held = MemoryFactStore(LetterEmbedder())
    retriever = KnowledgePackRetriever.from_facts(
        [Fact("A gate.")], engine=tiny_engine(), store=store, fact_store=held, namespace="mine", kv="lazy"
    )
    tool = create_pack_search_tool(retriever, store)
    smuggled = retriever.model_copy(update={"fact_store": held})
    object.__setattr__(smuggled, "_get_relevant_documents", lambda *_, **__: [Document(theirs)])
    for each in (tool, create_pack_search_tool(smuggled, store), create_pack_search_tool(smuggled, store.view("mine"))):
        message = each.invoke({"name": each.name, "args": {"query": "secret?"}, "id": "1", "type": "tool_call"})
        assert "secret" not in str(message.artifact)


def test_a_cache_of_answers_tells_models_of_one_name_apart(store):
    cache = InMemoryCache()
    engines = [load_engine(tiny_model("llama", seed=seed), tokenizer=tiny_tokenizer()) for seed in (1, 2)]
    models = [chat(store, engine=engine, cache=cache, max_tokens=8) for engine in engines]
    assert models[0].model_name == models[1].model_name
    said = [model.invoke("Hi").text for model in models]
    assert said == [engine.generate("Hi", max_tokens=8).text for engine in engines]
    assert said[0] != said[1]


async def test_a_cached_answer_is_that_of_the_packs_in_the_store(store, caplog):
    handle, cache = put(store, "The gate of the harbour is green."), InMemoryCache()
    model = chat(store, cache=cache)
    store.remove(find_handles(handle)[0][2])
    with caplog.at_level(logging.ERROR):
        for asked in (model.invoke(handle), await model.ainvoke(handle)):
            assert asked.response_metadata["kp"]["pack_tokens"] == 0
    assert len(cache._cache) == 1
    assert put(store, "The gate of the harbour is green.") == handle
    for asked in (model.invoke(handle), await model.ainvoke(handle)):
        assert asked.response_metadata["kp"]["pack_tokens"] > 0
    assert len(cache._cache) == 2
    # What was answered with a pack is not told to one who may not read it any more.
    store.remove(find_handles(handle)[0][2])
    assert model.invoke(handle).response_metadata["kp"]["pack_tokens"] == 0


@pytest.mark.parametrize("junk", ["no handle", "kp:mine/short", "kp:mine/" + "a" * 21, " ", 7, None])
def test_junk_in_the_state_of_an_agent_does_not_stop_it(junk, store):
    handle = put(store, "The gate of the harbour is green.")
    facts = MemoryFactStore(LetterEmbedder())
    facts.add([Fact("The gate of the harbour is green.", namespace="mine")])
    model = chat(store, engine=roomy_engine(), mismatch="rebuild", max_tokens=4)
    agent = create_agent(model, [], middleware=[KnowledgePackMiddleware(memory="search", facts=facts)])
    state = agent.invoke({"messages": [HumanMessage("Which?")], "packs": [junk, f"{handle} {handle}", handle]})
    assert isinstance(state["messages"][-1], AIMessage)
    assert state["messages"][-1].response_metadata["kp"]["pack_tokens"] > 0
