"""A reranker behind either adapter: the order of the bank's own search."""

import json
from pathlib import Path

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters
from pydantic import ValidationError

from kp_core import Fact, MemoryFactStore, PackStore
from kp_core.banks import LexicalReranker
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError
from kp_langchain import KnowledgePackRetriever
from kp_llamaindex import KnowledgePackLLM
from kp_llamaindex import KnowledgePackRetriever as NodeRetriever
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import LetterEmbedder

DEMO = Path(__file__).parents[2] / "cookbooks" / "demo"
QUESTIONS = [
    "What is the name of the parrot aboard the Marigold Debt?",
    "What is the dovedrum filled with?",
    "Which tower is higher, Tallow Tower or Gullwatch Tower?",
]
RERANK = LexicalReranker(depth=12)


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
    expected = facts.search(question, k, probes=probes, rerank=RERANK)
    assert adapter(facts, store, question, k=k, probes=probes, rerank=RERANK) == ids(expected)
    assert expected != facts.search(question, k, probes=probes)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("adapter", [documents, nodes])
def test_what_is_not_similar_enough_makes_room_for_the_next(facts, store, adapter, question):
    order = facts.search(question, 12, rerank=RERANK)
    least = sorted(hit.score for hit in order)[6]
    kept = [hit for hit in order if hit.score >= least]
    assert kept[:3] != order[:3]
    assert adapter(facts, store, question, k=3, score_threshold=least, rerank=RERANK) == ids(kept[:3])
    assert len(adapter(facts, store, question, k=12, score_threshold=least, rerank=RERANK)) == len(kept)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("least", [48, 20])
def test_filters_choose_what_is_reranked(facts, store, question, least):
    filters = MetadataFilters(filters=[MetadataFilter(key="number", operator=FilterOperator.GTE, value=least)])
    where = {"number": {"$gte": least}}
    expected = ids(facts.search(question, 4, where=where, rerank=RERANK))
    assert nodes(facts, store, question, 4, filters=filters, rerank=RERANK) == expected
    assert documents(facts, store, question, k=4, where=where, rerank=RERANK) == expected


@pytest.mark.parametrize("question", QUESTIONS)
def test_whole_banks_stand_where_their_first_fact_does(facts, store, question):
    hits = facts.search(question, 12, rerank=RERANK)
    expected = list(dict.fromkeys(facts.bank_of([hit.fact for hit in hits])))[:3]
    retriever = KnowledgePackRetriever(fact_store=facts, store=store, content="text", unit="bank", k=3, rerank=RERANK)
    assert [document.metadata["title"] for document in retriever.invoke(question)] == expected
    found = Delivery(facts, tiny_engine(), store, unit="bank", kv="lazy").search(question, 3, rerank=RERANK)
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


def test_one_call_and_one_engine_may_have_their_own(facts, store):
    [question, *_] = QUESTIONS
    expected = [hit.fact.id for hit in facts.search(question, 3, rerank=RERANK)]
    retriever = KnowledgePackRetriever(fact_store=facts, store=store, k=3)
    assert [document.id for document in retriever.invoke(question, rerank=RERANK)] == expected
    reranking = retriever.model_copy(update={"rerank": RERANK})
    assert [document.id for document in reranking.invoke(question)] == expected
    assert reranking.invoke(question, rerank=None) == retriever.invoke(question)
    nodes = NodeRetriever(facts, store, engine=tiny_engine(), lazy=True, similarity_top_k=3, rerank=RERANK)
    llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["default"], max_tokens=1)
    answer = RetrieverQueryEngine.from_args(nodes, llm).query(question)
    assert [hit.node_id for hit in answer.source_nodes] == expected


@pytest.mark.parametrize("wrong", ["lexical", LexicalReranker])
def test_what_is_no_reranker_is_refused(facts, store, wrong):
    said = []
    filters = MetadataFilters(filters=[])
    for ask in (
        lambda: KnowledgePackRetriever(fact_store=facts, store=store).invoke("Who?", rerank=wrong),
        lambda: NodeRetriever(facts, store, rerank=wrong).retrieve("Who?"),
        lambda: NodeRetriever(facts, store, rerank=wrong, filters=filters).retrieve("Who?"),
        lambda: facts.search("Who?", rerank=wrong),
    ):
        with pytest.raises(FactError, match=r"expected a Reranker, e\.g\. `LexicalReranker\(\)`") as caught:
            ask()
        said.append(str(caught.value))
    assert len(set(said)) == 1
    with pytest.raises(ValidationError, match="Reranker"):
        KnowledgePackRetriever(fact_store=facts, store=store, rerank=wrong)
    with pytest.raises(FactError, match="k=0"):
        nodes(facts, store, "Who?", 0, rerank=RERANK, filters=filters)
