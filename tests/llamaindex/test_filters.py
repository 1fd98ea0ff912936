"""LlamaIndex's metadata filters: what they find, and that they mean what LlamaIndex says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from kp_core import Fact, MemoryFactStore
from kp_core.banks.filters import predicate
from kp_core.errors import FactError
from kp_llamaindex import KnowledgePackRetriever
from kp_llamaindex.retriever import to_where
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import QUESTION


def only(*filters, condition=FilterCondition.AND):
    return MetadataFilters(
        filters=[MetadataFilter(key=key, operator=operator, value=value) for key, operator, value in filters],
        condition=condition,
    )


def test_metadata_filters(retriever_of):
    for filters, expected in [
        (only(("number", FilterOperator.EQ, 3)), {3}),
        (only(("number", FilterOperator.NE, 3)), set(range(24)) - {3}),
        (only(("number", FilterOperator.IN, [1, 2, 99])), {1, 2}),
        (only(("number", FilterOperator.NIN, list(range(20)))), {20, 21, 22, 23}),
        (only(("number", FilterOperator.GT, 21)), {22, 23}),
        (only(("number", FilterOperator.GTE, 21)), {21, 22, 23}),
        (only(("number", FilterOperator.LT, 2)), {0, 1}),
        (only(("number", FilterOperator.LTE, 2)), {0, 1, 2}),
        (only(("number", FilterOperator.GT, 3), ("number", FilterOperator.LT, 6)), {4, 5}),
        (
            only(("number", FilterOperator.LT, 1), ("number", FilterOperator.GT, 22), condition=FilterCondition.OR),
            {0, 23},
        ),
        (
            MetadataFilters(
                filters=[
                    MetadataFilters(filters=[MetadataFilter(key="number", operator=FilterOperator.LT, value=8)]),
                    only(
                        ("number", FilterOperator.EQ, 7), ("number", FilterOperator.EQ, 9), condition=FilterCondition.OR
                    ),
                ]
            ),
            {7},
        ),
        (only(("absent", FilterOperator.EQ, 1)), set()),
        (MetadataFilters(filters=[]), set(range(24))),
    ]:
        found = retriever_of(similarity_top_k=24, filters=filters).retrieve(QUESTION)
        assert {hit.metadata["number"] for hit in found} == expected, filters


def test_filters_look_beyond_the_nearest(retriever_of):
    everything = [hit.metadata["number"] for hit in retriever_of(similarity_top_k=24).retrieve(QUESTION)]
    farthest = only(("number", FilterOperator.EQ, everything[-1]))
    [hit] = retriever_of(similarity_top_k=1, filters=farthest).retrieve(QUESTION)
    assert hit.metadata["number"] == everything[-1]


WORDS = st.sampled_from(["a", "b", "ab", "A", "", "3", "3.0", "-1", "nine"])
NUMBERS = st.integers(-1, 3) | st.sampled_from([0.5, 3.0])
LISTS = st.lists(WORDS, max_size=3) | st.lists(st.integers(-1, 3), max_size=3)
FIELDS = {"word": WORDS, "number": NUMBERS, "list": LISTS}
ORDERED = [FilterOperator.GT, FilterOperator.GTE, FilterOperator.LT, FilterOperator.LTE]
EQUAL = [FilterOperator.EQ, FilterOperator.NE]
AMONG = [FilterOperator.IN, FilterOperator.NIN]
WITHIN = [FilterOperator.ANY, FilterOperator.ALL, FilterOperator.CONTAINS]


@st.composite
def metadata_filters(draw):
    key = draw(st.sampled_from([*FIELDS, "absent"]))
    kinds = {"word": EQUAL + AMONG, "number": EQUAL + AMONG + ORDERED, "list": WITHIN}
    how = draw(st.sampled_from(kinds.get(key, EQUAL + AMONG + ORDERED + WITHIN)))
    values = NUMBERS if how in ORDERED else WORDS | NUMBERS
    if how in {*AMONG, FilterOperator.ANY, FilterOperator.ALL}:
        values = LISTS.filter(bool)
    return MetadataFilter(key=key, operator=how, value=draw(values))


@settings(max_examples=600, deadline=None)
@given(
    st.fixed_dictionaries({}, optional=FIELDS),
    st.lists(metadata_filters(), max_size=3),
    st.sampled_from([FilterCondition.AND, FilterCondition.OR, None]),
)
def test_filters_mean_what_llama_index_says(metadata, wanted, condition):
    filters = MetadataFilters(filters=wanted, condition=condition)
    expected = build_metadata_filter_fn(lambda _: metadata, filters)("")
    assert predicate(to_where(filters))(Fact("Four sails.", metadata=metadata)) is expected


@pytest.mark.parametrize(
    "wanted",
    [
        only(("number", FilterOperator.IN, "abc")),
        only(("number", FilterOperator.GT, [1])),
        only(("number", FilterOperator.GT, "x")),
        only(("number", FilterOperator.EQ, None)),
        only(("number", FilterOperator.ANY, [])),
        only(("number", FilterOperator.TEXT_MATCH, "x")),
        only(("number", FilterOperator.IS_EMPTY, None)),
        only(("number", FilterOperator.LT, 20), condition=FilterCondition.NOT),
    ],
)
def test_filters_that_no_fact_store_evaluates_are_refused(retriever_of, wanted):
    with pytest.raises(FactError, match=r"Got .*; expected"):
        retriever_of(filters=wanted).retrieve(QUESTION)


def test_lists(store, embedder):
    facts = MemoryFactStore(embedder)
    tagged = enumerate((["sea", "red"], ["red"], ["seal"], []))
    facts.add(Fact(f"House {at}.", metadata={"tags": tags}) for at, tags in tagged)

    def found(*filters):
        hits = KnowledgePackRetriever(
            facts, store, engine=tiny_engine(), lazy=True, similarity_top_k=9, filters=only(*filters)
        ).retrieve("house")
        return sorted(hit.text for hit in hits)

    assert found(("tags", FilterOperator.CONTAINS, "sea")) == ["House 0."]
    assert found(("tags", FilterOperator.ANY, ["sea", "seal"])) == ["House 0.", "House 2."]
    assert found(("tags", FilterOperator.ALL, ["sea", "red"])) == ["House 0."]
