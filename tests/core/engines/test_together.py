"""Packs that are often found together are compiled together, within a budget, and read behind one another."""

import pytest
import torch

from kp_core import PackStore, Session
from kp_core.errors import OptionError, UnsupportedRequestError
from tests.cli.engines import Bare
from tests.core.engines.test_keeping import fresh_engine

# Two that are found together, larger ones that each question finds besides, and a smaller one.
SIZES = {"a": 6, "b": 5, "c": 8, "d": 9, "e": 10, "f": 2}
TEXTS = {name: f"Isle {name} has a harbour, and boats of {name} lie in it. " * size for name, size in SIZES.items()}
FOUND = ("cab", "bda", "eba")


@pytest.fixture
def isles(tmp_path):
    """A new engine, its store, how a question about some islands is asked, and which were sent in which order."""
    engine, store = fresh_engine(1024), PackStore(tmp_path)
    handles = {name: str(store.put(engine.build_pack(text, namespace="isles"))) for name, text in TEXTS.items()}

    def ask(names, engine=engine, question="Which?", **options):
        messages = "\n\n".join((*(handles[name] for name in names), question))
        options = {"view": PackStore(tmp_path).view("isles"), "order": "free", **options}
        found = engine.prefill(messages, **options)
        return found, "".join(name for span in found.prompt.spans for name in handles if handles[name] == span.handle)

    return engine, store, ask


def learn(engine, ask, **options):
    for at, names in enumerate(FOUND):
        ask(names, question=f"Question {at}?", **options)
    engine.when_idle(lambda: None).result(60)  # Jobs are done in order.


def test_what_is_often_found_together_is_read_together(isles):
    engine, store, ask = isles
    learn(engine, ask, co_compile=10**8)
    (entry,) = store.kept
    assert len(entry.packs) == 2
    found, sent = ask("ba", question="And now?")
    assert sent == "ab", "the larger one was compiled for the place"
    assert found.usage.computed_tokens <= len(found.prompt) - found.prompt.spans[-1].stop
    # With another pack, that one alone is computed.
    found, sent = ask("fba", question="And with it?")
    assert sent == "abf"
    assert found.usage.computed_tokens <= len(found.prompt) - found.prompt.spans[1].stop
    oracle, _ = ask("abf", question="And with it?", order="given", reuse=False)
    assert torch.equal(found.logits, oracle.logits)


def test_it_is_there_after_a_restart(isles):
    engine, _, ask = isles
    learn(engine, ask, co_compile=10**8)
    found, sent = ask("ba", fresh_engine(1024), "And now?")
    assert sent == "ab"
    assert found.usage.reused_tokens >= found.usage.pack_tokens
    assert found.usage.computed_tokens <= found.usage.prompt_tokens
    oracle, _ = ask("ab", fresh_engine(1024), "And now?", order="given", reuse=False)
    assert torch.equal(found.logits, oracle.logits)


@pytest.mark.parametrize("options", [{"co_compile": 1000}, {}, {"co_compile": 10**8, "order": "given"}])
def test_nothing_is_compiled_beyond_the_budget_or_unasked(isles, options):
    engine, store, ask = isles
    learn(engine, ask, **options)
    assert list(store.kept) == []


def test_a_question_asked_again_teaches_nothing(isles):
    engine, store, ask = isles
    for at in range(4):
        ask("ab", question=f"Question {at}?", co_compile=10**8, keep="never")
    engine.when_idle(lambda: None).result(60)
    assert list(store.kept) == []


def test_a_budget_is_a_number_and_needs_a_memory(isles):
    ask = isles[2]
    with pytest.raises(OptionError, match="Got co_compile=-1; expected a number of bytes"):
        ask("a", co_compile=-1)
    with pytest.raises(UnsupportedRequestError, match="co_compile"):
        Session(Bare()).generate("Which?", co_compile=10)
