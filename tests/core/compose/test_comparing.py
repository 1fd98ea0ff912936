"""Approximate composers are measured, warned about, and made good when there is time."""

import logging

import pytest

from kp_core import PackStore, compare_composers
from tests.composers import Firsts
from tests.conftest import tiny_engine

TEXTS = ["The first island is green and flat. " * 5, "The second island is blue. " * 5, "The third one is red. " * 5]


@pytest.fixture
def isles(tmp_path):
    """An engine that has said nothing, its options, and how a question about all packs is asked."""
    engine, store = tiny_engine(chunk_tokens=1024), PackStore(tmp_path)
    engine.clear_cache()
    engine.calibrations.warned.clear()
    handles = [str(store.put(engine.build_pack(text, namespace="isles"))) for text in TEXTS]
    return engine, {"view": store.view("isles")}, lambda question: "\n\n".join((*handles, question))


def test_comparing(isles):
    engine, request, ask = isles
    for _ in range(2):
        engine.clear_cache()
        whole = engine.prefill(ask("Which?"), **request).usage.computed_tokens
    engine.when_idle(lambda: None).result()  # By now it is kept in the store.
    rows = compare_composers(engine, ask("Which?"), ["exact", "splice", Firsts(0.5)], max_tokens=8, **request)
    assert [row.composer for row in rows] == ["exact", "splice", "firsts:0.5"]
    exact, splice, firsts = rows
    assert (exact.kl, exact.same, exact.agreement, exact.approximate_tokens) == (0, True, 1, 0)
    assert splice.kl > 0
    assert splice.approximate_tokens == firsts.approximate_tokens > 0
    assert splice.computed_tokens < firsts.computed_tokens < exact.computed_tokens == whole
    assert all(row.ttft_s > 0 and row.exact_ttft_s > 0 for row in rows)
    by_default = compare_composers(engine, ask("Which?"), max_tokens=2, **request)
    assert [row.composer for row in by_default] == ["splice", "select"]


def test_exact_composition_warns_of_nothing(isles, caplog):
    engine, request, ask = isles
    caplog.set_level(logging.WARNING)
    engine.prefill(ask("What?"), **request)
    engine.prefill(ask("What?"), **request, composer=Firsts(1))
    assert not caplog.text
