"""What happened to packs, as events of LlamaIndex's instrumentation."""

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import TextNode

from kp_core import Fact, Hit, PackStore, load_engine
from kp_core.delivery import Delivery
from kp_core.testing import tiny_model, tiny_tokenizer
from kp_llamaindex import KnowledgePackLLM, PackEvent
from tests.conftest import tiny_engine, until


@pytest.fixture
def events():
    seen = []

    class Listener(BaseEventHandler):
        def handle(self, event, **_):
            if isinstance(event, PackEvent):
                seen.append(event)
                raise RuntimeError("of a handler")  # noqa: TRY004

    listener, dispatcher = Listener(), get_dispatcher()
    dispatcher.add_event_handler(listener)
    yield seen
    dispatcher.event_handlers.remove(listener)


def counts(events):
    return {event.name: event.counts for event in events}


def test_packs_found_compiled_and_read_are_events_and_a_handler_that_raises_loses_nothing(tiny_index, store, events):
    [found] = tiny_index.as_retriever(similarity_top_k=1).retrieve("bird on the flag")
    assert counts(events)["packs found"] == {"units": 1, "packs": 1}
    llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["default"], max_tokens=2)
    usage = llm.complete(found.get_content("llm")).raw["usage"]
    assert counts(events)["packs read"]["pack_tokens"] == usage["pack_tokens"] > 0
    before = len(list(store))
    tiny_index.insert_nodes([TextNode(text="The coin of Orrelay is a ninth.")])
    assert counts(events)["packs compiled"]["packs"] == 1
    assert len(list(store)) == before + 1
    assert PackEvent(**events[0].model_dump()).class_name() == "PackEvent"


def test_what_happens_in_the_background_is_an_event_too(tmp_path, events):
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    delivery = Delivery(None, engine, PackStore(tmp_path), precompile="idle", namespace="default")
    delivery.deliver([Hit(Fact("The ferry leaves Veyl at dawn."), 1.0)])
    until(lambda: "packs compiled" in counts(events))
    engine.clear_cache()
    assert counts(events)["KV evicted from memory"]["nbytes"] > 0
    engine.close()
