"""Routers of LlamaIndex select by probabilities."""

import math

import pytest
from llama_index.core.query_engine import CustomQueryEngine, RouterQueryEngine
from llama_index.core.retrievers import BaseRetriever, RouterRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata

from kp_core import PackStore, Question
from kp_core.errors import OptionError
from kp_llamaindex import KnowledgePackLLM, KnowledgePackSelector
from tests.conftest import tiny_engine

ABOUT = {"ferries": "Times of ferries to Veyl", "lamps": "Who keeps the lamps", "boats": "Colours of boats"}
QUERY = "When does the ferry leave?"


@pytest.fixture(scope="module")
def llm():
    return KnowledgePackLLM(engine=tiny_engine())


def choices():
    return [ToolMetadata(about, name) for name, about in ABOUT.items()]


async def test_a_single_selection_is_the_choice_that_the_question_follows(llm):
    selector = KnowledgePackSelector(llm)
    asked = [f"{name}: {about}\n\nAsk a question about this." for name, about in ABOUT.items()]
    nats = llm.engine.log_likelihoods(asked, QUERY)
    found = selector.select(choices(), QUERY)
    assert found.ind == nats.index(max(nats))
    assert found.reason == f"probability {1 / sum(math.exp(each - max(nats)) for each in nats):.3f}"
    turned = selector.select(choices()[::-1], QUERY)
    assert (2 - turned.ind, turned.reason) == (found.ind, found.reason)
    assert await selector.aselect(choices(), QUERY) == found
    assert selector.select(["Only this"], QUERY).ind == 0
    with pytest.raises(OptionError):
        selector.select([], QUERY)


async def test_several_selections_are_those_above_the_threshold_or_the_best(llm):
    shares = []
    for name, about in ABOUT.items():
        question = Question(f"Can this help to answer the question above?\n\n{name}: {about}")
        decided = llm.engine.decide(QUERY, {0: question}, rotations="all")
        shares.append(decided.answers[0].probabilities["yes"])
    order = sorted(range(3), key=lambda at: -shares[at])
    for threshold, count in ((0.0, 3), (shares[order[1]], 2), (1.1, 1)):
        selector = KnowledgePackSelector(llm, multi=True, threshold=threshold)
        found = selector.select(choices(), QUERY)
        assert found.inds == order[:count]
        assert found.reasons == [f"probability {shares[at]:.3f}" for at in order[:count]]
        assert await selector.aselect(choices(), QUERY) == found
    with pytest.raises(OptionError):
        selector.select([], QUERY)


@pytest.mark.slow
def test_the_bundled_model_routes_to_what_a_question_is_about(smol):
    selector = KnowledgePackSelector(KnowledgePackLLM(engine=smol))
    people = "vacation, sick leave, travel, parking, canteen, new colleagues"
    computers = "computers, VPN, backups, printers, passwords, wifi, tickets"
    questions = {
        "How many days of vacation are there?": people,
        "Who cooks in the canteen?": people,
        "When are travel receipts handed in?": people,
        "How often are servers backed up?": computers,
        "Who keeps the master password?": computers,
        "What is the colour printer called?": computers,
    }
    for both in ([people, computers], [computers, people]):
        assert [both[selector.select(both, question).ind] for question in questions] == [*questions.values()]


def test_packs_of_the_llm_are_read(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    handle = str(store.put(engine.build_pack("The harbour has seven red boats.", namespace="isles")))
    llm = KnowledgePackLLM(engine=engine, store=store, namespaces=["isles"], packs=[handle])
    found = KnowledgePackSelector(llm).select(choices(), QUERY)
    assert [0, 1, 2].count(found.ind) == 1
    plain = KnowledgePackSelector(KnowledgePackLLM(engine=engine)).select(choices(), QUERY)
    assert found.reason != plain.reason


class Says(CustomQueryEngine):
    what: str

    def custom_query(self, query_str):
        return self.what


class Finds(BaseRetriever):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=TextNode(text=self.what), score=1.0)]


async def test_the_routers_of_llama_index_ask_it(llm):
    best = [*ABOUT][KnowledgePackSelector(llm).select(choices(), QUERY).ind]
    tools = [QueryEngineTool(Says(what=metadata.name), metadata) for metadata in choices()]
    router = RouterQueryEngine(KnowledgePackSelector(llm), tools, llm=llm)
    assert str(router.query(QUERY)) == str(await router.aquery(QUERY)) == best
    tools = [RetrieverTool(Finds(metadata.name), metadata) for metadata in choices()]
    one = RouterRetriever(KnowledgePackSelector(llm), tools, llm=llm)
    assert [node.text for node in one.retrieve(QUERY)] == [best]
    several = RouterRetriever(KnowledgePackSelector(llm, multi=True, threshold=0), tools, llm=llm)
    assert sorted(node.text for node in several.retrieve(QUERY)) == sorted(ABOUT)
