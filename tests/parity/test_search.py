"""Either adapter finds what the store's own search finds, in its order."""

import json
from pathlib import Path

import pytest
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters

from kp_core import Fact, MemoryFactStore, PackStore
from kp_core.banks.delivery import Delivery
from kp_core.errors import OptionError
from kp_langchain import KnowledgePackRetriever
from kp_llamaindex import KnowledgePackRetriever as NodeRetriever
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import LetterEmbedder

DEMO = Path(__file__).parents[2] / "cookbooks" / "demo"
QUESTIONS = [
    "What is the name of the parrot aboard the Marigold Debt?",
    "What is the dovedrum filled with?",
    "Which tower is higher, Tallow Tower or Gullwatch Tower?",
]


@pytest.fixture(scope="module")
def facts():
    with (DEMO / "facts.jsonl").open() as lines:
        read = [json.loads(line) for line in lines][:60]
    store = MemoryFactStore(LetterEmbedder(), bank_size=5)
    store.add(
        Fact(row["text"], title=row["title"], id=row["id"], metadata={"number": number})
        for number, row in enumerate(read)
    )
    return store


@pytest.fixture
def store(tmp_path):
    return PackStore(tmp_path / "packs")


def documents(facts, store, question, **settings):
    retriever = KnowledgePackRetriever(fact_store=facts, store=store, content="text", **settings)
    return [(document.id, document.metadata["score"]) for document in retriever.invoke(question)]


def nodes(facts, store, question, k, *, score_threshold=None, **settings):
    retriever = NodeRetriever(
        facts, store, content="text", similarity_top_k=k, score_cutoff=score_threshold, **settings
    )
    return [(hit.node_id, hit.score) for hit in retriever.retrieve(question)]


def ids(hits):
    return [(hit.fact.id, hit.score) for hit in hits]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("adapter", [documents, nodes])
@pytest.mark.parametrize(("k", "probes"), [(3, None), (3, 2), (20, 2)])
def test_the_order_is_that_of_the_store(facts, store, adapter, question, k, probes):
    assert adapter(facts, store, question, k=k, probes=probes) == ids(facts.search(question, k, probes=probes))


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("adapter", [documents, nodes])
def test_what_is_not_similar_enough_is_left_out(facts, store, adapter, question):
    order = facts.search(question, 12)
    least = order[6].score
    kept = [hit for hit in order if hit.score >= least]
    assert adapter(facts, store, question, k=3, score_threshold=least) == ids(kept[:3])
    assert len(adapter(facts, store, question, k=12, score_threshold=least)) == len(kept) < 12


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("least", [48, 20])
def test_filters_choose_what_is_found(facts, store, question, least):
    filters = MetadataFilters(filters=[MetadataFilter(key="number", operator=FilterOperator.GTE, value=least)])
    where = {"number": {"$gte": least}}
    expected = ids(facts.search(question, 4, where=where))
    assert nodes(facts, store, question, 4, filters=filters) == expected
    assert documents(facts, store, question, k=4, where=where) == expected


@pytest.mark.parametrize("question", QUESTIONS)
def test_whole_banks_stand_where_their_first_fact_does(facts, store, question):
    hits = facts.search(question, 12)
    expected = list(dict.fromkeys(facts.bank_of([hit.fact for hit in hits])))[:3]
    retriever = KnowledgePackRetriever(fact_store=facts, store=store, content="text", unit="bank", k=3)
    assert [document.metadata["title"] for document in retriever.invoke(question)] == expected
    found = Delivery(facts, tiny_engine(), store, unit="bank", kv="lazy").search(question, 3)
    assert [unit.unit.title for unit in found] == expected


def test_banks_whose_best_fact_is_not_similar_enough_are_left_out(facts, store):
    [question, *_] = QUESTIONS
    hits = facts.search(question, 60)
    banks = facts.bank_of([hit.fact for hit in hits])
    scores = dict(reversed([(bank, hit.score) for bank, hit in zip(banks, hits, strict=True)]))
    least = sorted(scores.values())[-3]
    retriever = KnowledgePackRetriever(fact_store=facts, store=store, content="text", unit="bank", k=5)
    found = retriever.invoke(question, score_threshold=least)
    assert {document.metadata["title"] for document in found} == {at for at, score in scores.items() if score >= least}
    assert len(found) == 3


def test_a_reranker_of_ours_is_refused_by_name(facts, store):
    for made in (KnowledgePackRetriever, NodeRetriever):
        with pytest.raises(OptionError, match=r"It is gone in 0\.3; LangChain and LlamaIndex have rerankers"):
            made(fact_store=facts, store=store, rerank=len)
