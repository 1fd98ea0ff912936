"""Composers and orders by name, through both adapters."""

import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage

from kp_core import PackStore
from kp_core.errors import OptionError
from kp_langchain import ChatKnowledgePacks
from kp_llamaindex import KnowledgePackLLM
from tests.composers import Firsts
from tests.conftest import tiny_engine
from tests.kits import NaiveComposer

TEXTS = ["The first island is green and flat. " * 5, "The second island is blue. " * 5]
NAMED = ["splice", NaiveComposer(), Firsts(0.5)]


def usage_of(adapter, store, question, **options):
    """The counts of one answer, as the framework passes them on."""
    if adapter == "langchain":
        model = ChatKnowledgePacks(engine=tiny_engine(), store=store, namespaces=["isles"], max_tokens=2, **options)
        return model.invoke([HumanMessage(question)]).response_metadata["kp"]
    llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["isles"], max_tokens=2, **options)
    return llm.chat([ChatMessage(role="user", content=question)]).raw["kp"]


@pytest.fixture
def isles(tmp_path):
    """A store of two packs, and a question about both."""
    store = PackStore(tmp_path)
    handles = [str(store.put(tiny_engine().build_pack(text, namespace="isles"))) for text in TEXTS]
    return store, handles


@pytest.mark.parametrize("composer", NAMED, ids=str)
@pytest.mark.parametrize("adapter", ["langchain", "llamaindex"])
def test_a_composer_by_name(adapter, composer, isles):
    store, handles = isles
    question = "\n\n".join((*handles, f"{adapter}?"))
    assert usage_of(adapter, store, question)["approximate_tokens"] == 0
    assert usage_of(adapter, store, question, composer=composer)["approximate_tokens"] > 0
    with pytest.raises((OptionError, ValueError), match="expected one of auto, exact, packet, select, splice"):
        usage_of(adapter, store, question, composer="mend")
