"""LlamaIndex's metadata filters: what they find, and that they mean what LlamaIndex says."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from kp_core import Fact, MemoryFactStore
from kp_core.banks.filters import predicate
from kp_core.errors import FactError
from kp_llamaindex import KnowledgePackRetriever
from kp_llamaindex.nodes import to_where
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
        (only(("number", FilterOperator.LT, 20), condition=FilterCondition.NOT), {20, 21, 22, 23}),
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
        (only(("number", FilterOperator.GT, "x")), set()),
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


def test_numbers_that_banks_keep_as_strings(store, embedder):
    facts = [Fact(f"Fact of {year}.", metadata={"year": str(year)}) for year in (1980, 1990, 2000)]
    retriever = KnowledgePackRetriever(
        MemoryFactStore(embedder),
        store,
        engine=tiny_engine(),
        lazy=True,
        filters=only(("year", FilterOperator.GTE, 1990)),
    )
    retriever.delivery.add(facts, progress=False)
    assert {hit.metadata["year"] for hit in retriever.retrieve("fact")} == {"1990", "2000"}


def fact_of(text, metadata):
    """A fact has a list as JSON."""
    fields = {name: json.dumps(value) if isinstance(value, list) else value for name, value in metadata.items()}
    return Fact(text, metadata=fields)


WORDS = st.sampled_from(["a", "b", "ab", "A", "", "3", "3.0", "-1", "nine"])
NUMBERS = st.integers(-1, 3) | st.sampled_from([0.5, 3.0])
FIELDS = {
    "word": WORDS,
    "number": NUMBERS,
    "flag": st.booleans(),
    "list": st.lists(WORDS, max_size=3) | st.lists(st.integers(-1, 3), max_size=3),
}
ORDERED = [FilterOperator.GT, FilterOperator.GTE, FilterOperator.LT, FilterOperator.LTE]
EQUAL = [FilterOperator.EQ, FilterOperator.NE]
MEMBERS = [FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL]
WITHIN = [FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE]


@st.composite
def metadata_filters(draw):
    key = draw(st.sampled_from([*FIELDS, "absent"]))
    # Nothing is before or inside a list as a string is; those are told from JSON by no operator.
    kinds = [*EQUAL, *MEMBERS, FilterOperator.IS_EMPTY, FilterOperator.CONTAINS]
    how = draw(st.sampled_from(kinds if key == "list" else [*kinds, *ORDERED, *WITHIN]))
    single = WORDS if how in WITHIN else WORDS | NUMBERS
    several = st.lists(WORDS, max_size=3) | st.lists(st.integers(-1, 3), max_size=3)
    value = draw(several if how in MEMBERS or (how in EQUAL and draw(st.integers(0, 5)) == 0) else single)
    return MetadataFilter(key=key, operator=how, value=value)


def as_llama_index_does(wanted, metadata):
    """Its own evaluation; a string that spells a number is one, and what cannot be compared does not match."""
    found = metadata.get(wanted.key)
    samples = wanted.value if isinstance(wanted.value, list) else [wanted.value]
    if isinstance(found, str) and samples and all(isinstance(sample, int | float) for sample in samples):
        with suppress(ValueError):
            found = float(found)
    try:
        return build_metadata_filter_fn(lambda _: {wanted.key: found}, MetadataFilters(filters=[wanted]))("")
    except TypeError:
        return False


@settings(max_examples=600, deadline=None)
@given(
    st.fixed_dictionaries({}, optional=FIELDS),
    st.lists(metadata_filters(), max_size=3),
    st.sampled_from([*FilterCondition, None]),
)
def test_filters_mean_what_llama_index_says(metadata, wanted, condition):
    fact = fact_of("Four sails.", metadata)
    each = [as_llama_index_does(one, metadata) for one in wanted]
    expected = {
        FilterCondition.OR: any(each) or not each,
        FilterCondition.NOT: not any(each),
    }.get(condition, all(each))
    assert predicate(to_where(MetadataFilters(filters=wanted, condition=condition)))(fact) is expected


def test_filters_that_say_nothing_are_refused(retriever_of):
    for how, value in ((FilterOperator.IN, "abc"), (FilterOperator.GT, [1]), (FilterOperator.EQ, None)):
        with pytest.raises(FactError, match=r"Got the filter 'number' .* expected"):
            retriever_of(filters=only(("number", how, value))).retrieve(QUESTION)


def test_lists_and_flags(store, embedder):
    facts = MemoryFactStore(embedder)
    tagged = enumerate((["sea", "red"], ["red"], ["seal"], []))
    facts.add(fact_of(f"House {number}.", {"tags": tags, "open": number % 2 == 0}) for number, tags in tagged)

    def found(*filters, **options):
        filters = only(*filters, **options)
        hits = KnowledgePackRetriever(
            facts, store, engine=tiny_engine(), lazy=True, similarity_top_k=9, filters=filters
        ).retrieve("house")
        return sorted(hit.text for hit in hits)

    assert found(("tags", FilterOperator.CONTAINS, "sea")) == ["House 0."]
    assert found(("tags", FilterOperator.ANY, ["sea", "seal"])) == ["House 0.", "House 2."]
    assert found(("tags", FilterOperator.IS_EMPTY, None)) == ["House 3."]
    assert found(("open", FilterOperator.EQ, 1), ("tags", FilterOperator.NE, ["seal"])) == ["House 0."]
