"""Steering behind LangChain's interface: the same tokens as from the engine, for a model, a call or an agent."""

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from kp_core import PackStore
from kp_langchain import ChatKnowledgePacks
from tests.conftest import tiny_engine

PAIRS = [("The formal one.\n", "an 7 er"), ("the other, formal", "er er er 42")]
ASKED = "Who is the 7th er?"


@pytest.fixture
def engine():
    return tiny_engine()


@pytest.fixture
def steering(engine):
    # Strong enough to change what a model of random weights says.
    return engine.make_steering(PAIRS, layers=(0.0, 1.0), progress=False).at_strength(3)


@pytest.fixture
def chat(engine):
    return ChatKnowledgePacks(engine=engine, max_tokens=8)


def said(engine, **request):
    return engine.generate(ASKED, max_tokens=8, **request).text


def test_a_steered_model_says_what_the_steered_engine_says(engine, chat, steering):
    steered = chat.model_copy(update={"steering": steering})
    plain = chat.invoke(ASKED).text
    assert plain == said(engine)
    assert steered.invoke(ASKED).text == said(engine, steering=steering) != plain
    assert "".join(chunk.text for chunk in steered.stream(ASKED)) == said(engine, steering=steering)
    half = ChatKnowledgePacks(engine=engine, max_tokens=8, steering=(steering, -1), scope="prompt")
    assert half.invoke(ASKED).text == said(engine, steering=(steering, -1), scope="prompt") != plain
    assert chat.invoke(ASKED).text == plain  # Nothing leaked.


async def test_async_is_the_same(engine, chat, steering):
    answer = await chat.ainvoke(ASKED, steering=steering)
    assert answer.text == said(engine, steering=steering)
    assert "".join([chunk.text async for chunk in chat.astream(ASKED, steering=steering)]) == answer.text


def test_a_call_overrides_the_model(engine, chat, steering):
    steered = ChatKnowledgePacks(engine=engine, max_tokens=8, steering=steering)
    assert chat.bind(steering=(steering, 0.5)).invoke(ASKED).text == said(engine, steering=(steering, 0.5))
    assert steered.bind(steering=-steering).invoke(ASKED).text == said(engine, steering=-steering)
    assert steered.bind(steering=None).invoke(ASKED).text == said(engine)
    assert chat.invoke(ASKED, steering=steering, scope="prompt").text == said(engine, steering=steering, scope="prompt")


def test_the_default_strength_is_lower_beside_packs(engine, steering, tmp_path):
    store = PackStore(tmp_path)
    pack = engine.build_pack("A fact of the 42 words.", compiled_for="system")
    chat = ChatKnowledgePacks(
        engine=engine, store=store, namespaces=["default"], steering=(steering, None), max_tokens=8
    )
    assert chat.invoke(ASKED).text == said(engine, steering=steering)
    handle = str(store.put(pack))
    answer = chat.invoke(ASKED, packs=[handle])
    assert answer.text == said(engine, packs=[pack], steering=(steering, 0.7))
    assert answer.response_metadata["kp"]["pack_tokens"] > 0
    plain = chat.invoke(ASKED, packs=[handle], steering=None)
    assert plain.text == said(engine, packs=[pack])
    assert [stored.steering for stored in map(store.get, store)] == [None]


def test_middleware_steers_an_agent_per_call(engine, chat, steering):
    class Mood(AgentMiddleware):
        def wrap_model_call(self, request, handler):
            settings = {**request.model_settings, "steering": steering}
            return handler(request.override(model_settings=settings))

    plain = create_agent(chat).invoke({"messages": [HumanMessage(ASKED)]})["messages"][-1].text
    found = create_agent(chat, middleware=[Mood()]).invoke({"messages": [HumanMessage(ASKED)]})["messages"][-1].text
    assert plain == said(engine)
    assert found == said(engine, steering=steering) != plain


def test_two_agents_of_one_graph_speak_each_in_its_way(engine, chat, steering):
    heard: dict[str, Any] = {}

    def speaker(name, model):
        def node(state):
            heard[name] = model.invoke(state["messages"][:1])
            return {"messages": [heard[name]]}

        return node

    graph = StateGraph(MessagesState)
    graph.add_node("plain", speaker("plain", chat))
    graph.add_node("formal", speaker("formal", chat.bind(steering=steering)))
    graph.add_edge(START, "plain")
    graph.add_edge("plain", "formal")
    graph.add_edge("formal", END)
    graph.compile().invoke({"messages": [HumanMessage(ASKED)]})
    assert {name: answer.text for name, answer in heard.items()} == {
        "plain": said(engine),
        "formal": said(engine, steering=steering),
    }


def test_a_cached_answer_is_that_of_its_steering(engine, steering):
    cache = InMemoryCache()
    models = {
        kind: ChatKnowledgePacks(engine=engine, max_tokens=8, cache=cache, steering=kind and (steering, kind))
        for kind in (None, 1, -1)
    }
    for _ in range(2):
        for kind, model in models.items():
            assert model.invoke(ASKED).text == said(engine, steering=kind and (steering, kind))
        assert models[None].invoke(ASKED, steering=-steering).text == said(engine, steering=-steering)


def test_a_description_names_the_steering_and_holds_no_tensor(engine, steering):
    chat = ChatKnowledgePacks(engine=engine, steering=(steering, 0.5))
    assert steering.id in json.dumps(chat._identifying_params)
    assert "steering" not in chat.model_dump()
