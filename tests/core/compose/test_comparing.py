"""Approximate composers are measured, warned about, and made good when there is time."""

import logging

import pytest

from kp_core import PackStore
from tests.composers import Firsts
from tests.conftest import tiny_engine

TEXTS = ["The first island is green and flat. " * 5, "The second island is blue. " * 5, "The third one is red. " * 5]


@pytest.fixture
def isles(tmp_path):
    """An engine that has said nothing, its options, and how a question about all packs is asked."""
    engine, store = tiny_engine(chunk_tokens=1024), PackStore(tmp_path)
    engine.clear_cache()
    engine.host.cautioned.clear()
    handles = [str(store.put(engine.build_pack(text, namespace="isles"))) for text in TEXTS]
    return engine, {"view": store.view("isles")}, lambda question: "\n\n".join((*handles, question))


def test_exact_composition_warns_of_nothing(isles, caplog):
    engine, request, ask = isles
    caplog.set_level(logging.WARNING)
    engine.prefill(ask("What?"), **request)
    engine.prefill(ask("What?"), **request, composer=Firsts(1))
    assert not caplog.text
