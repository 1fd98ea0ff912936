"""What happened to packs, as LangChain's custom events."""

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.runnables import RunnablePassthrough

from kp_core import Fact, MemoryFactStore, PackStore
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever
from tests.conftest import tiny_engine
from tests.kits import HashEmbedder

TEXT = "The mill of Veyl has four sails."


class Listener(BaseCallbackHandler):
    """Keeps custom events, with the runs that they are of."""

    def __init__(self):
        self.events, self.runs = [], set()

    def on_custom_event(self, name, data, *, run_id, **_):
        self.events.append((name, data))
        self.runs.add(run_id)

    def on_retriever_start(self, *_, run_id, **__):
        self.runs.add(run_id)

    @property
    def names(self):
        return [name for name, _ in self.events]


class Raises(BaseCallbackHandler):
    raise_error = True

    def on_custom_event(self, *_, **__):
        raise RuntimeError("of a callback")


@pytest.fixture
def retriever(tmp_path):
    facts = MemoryFactStore(HashEmbedder())
    facts.add([Fact(TEXT)])
    settings = {"store": PackStore(tmp_path), "engine": tiny_engine(), "precompile": "now", "content": "handle", "k": 1}
    return KnowledgePackRetriever(fact_store=facts, **settings)


@pytest.fixture
def model(retriever):
    return ChatKnowledgePacks(engine=tiny_engine(), store=retriever.store, namespaces=["default"], max_tokens=3)


async def test_a_search_tells_what_it_found_and_compiled(retriever):
    listener = Listener()
    [document] = retriever.invoke("mill", {"callbacks": [listener]})
    assert listener.names == ["packs compiled", "packs found"]
    assert listener.events[1] == ("packs found", {"units": 1, "packs": 1})
    assert len(listener.runs) == 1
    assert await retriever.ainvoke("mill", {"callbacks": [listener]}) == [document]
    assert listener.names.count("packs found") == 2
    wrapped = KnowledgePackRetriever.from_retriever(
        retriever.model_copy(update={"content": "text"}), store=retriever.store
    )
    wrapped.invoke("mill", {"callbacks": [wrapper := Listener()]})
    await wrapped.ainvoke("mill", {"callbacks": [wrapper]})
    assert wrapper.names == ["packs found"] * 4  # The one inside tells, too.


async def test_the_end_of_an_answer_tells_what_it_read(model, retriever):
    ends = []

    class End(BaseCallbackHandler):
        def on_llm_end(self, response, **_):
            ends.append(response.generations[0][0].message.response_metadata["kp"])

    question, config = retriever.invoke("mill")[0].page_content, {"callbacks": [End()]}
    model.invoke(question, config)
    list(model.stream(question, config))
    [_ async for _ in model.astream(question, config)]
    assert [end["pack_tokens"] > 0 for end in ends] == [True] * 3


async def test_they_are_among_the_events_of_a_stream(retriever):
    events = [event async for event in retriever.astream_events("mill") if event["event"] == "on_custom_event"]
    assert [event["name"] for event in events] == ["packs compiled", "packs found"]


async def test_async_callbacks_hear_them(retriever):
    heard = []

    class Async(AsyncCallbackHandler):
        async def on_custom_event(self, name, data, **_):
            heard.append(name)

    await retriever.ainvoke("mill", {"callbacks": [Async()]})
    retriever.invoke("mill", {"callbacks": [Async()]})
    assert heard == ["packs compiled", "packs found", "packs found"]


def test_a_callback_that_raises_loses_nothing(retriever, caplog):
    quiet = retriever.invoke("mill")
    retriever.store.remove(next(iter(retriever.store)))
    assert retriever.invoke("mill", {"callbacks": [Raises()]}) == quiet
    assert len(list(retriever.store)) == 1
    assert "of a callback" in caplog.text


def test_events_outside_of_a_run_reach_no_callback(retriever):
    retriever.invoke("mill", {"callbacks": [listener := Listener()]})
    told = list(listener.events)
    retriever._delivery().search("mill", 1)
    retriever.invoke("mill")
    assert listener.events == told


async def test_a_chain_hears_what_its_model_read(model, retriever):
    question = retriever.invoke("mill")[0].page_content
    (RunnablePassthrough() | model).invoke(question, {"callbacks": [listener := Listener()]})
    assert listener.names == ["packs read"]
    await (RunnablePassthrough() | model).ainvoke(question, {"callbacks": [listener]})
    assert listener.names == ["packs read"] * 2
