"""Steering behind LlamaIndex's interface: the same tokens as from the engine, for an LLM or a call."""

import pytest
from llama_index.core.base.llms.types import ChatMessage
from pydantic import ValidationError

from kp_llamaindex import KnowledgePackLLM
from tests.conftest import tiny_engine

PAIRS = [("The formal one.\n", "an 7 er"), ("the other, formal", "er er er 42")]
ASKED = "Who is the 7th er?"


@pytest.fixture
def engine():
    return tiny_engine()


@pytest.fixture
def steering(engine):
    # Strong enough to change what a model of random weights says.
    return engine.make_steering(PAIRS, layers=(0.0, 1.0), progress=False).at_strength(3)


def said(engine, **request):
    return engine.generate(ASKED, max_tokens=8, **request).text


def test_a_steered_llm_says_what_the_steered_engine_says(engine, tiny, steering):
    steered = KnowledgePackLLM(engine=engine, max_tokens=8, steering=steering)
    plain, expected = said(engine), said(engine, steering=steering)
    assert tiny.complete(ASKED).text == plain != expected
    assert steered.complete(ASKED).text == expected
    assert steered.chat([ChatMessage(ASKED)]).message.content == expected
    assert list(steered.stream_complete(ASKED))[-1].text == expected
    scoped = KnowledgePackLLM(engine=engine, max_tokens=8, steering=(steering, -1), scope="prompt")
    assert scoped.complete(ASKED).text == said(engine, steering=(steering, -1), scope="prompt")
    assert tiny.complete(ASKED).text == plain  # Nothing leaked.


async def test_async_is_the_same(engine, tiny, steering):
    expected = said(engine, steering=steering)
    assert (await tiny.acomplete(ASKED, steering=steering)).text == expected
    pieces = [piece async for piece in await tiny.astream_complete(ASKED, steering=steering)]
    assert pieces[-1].text == expected


def test_a_call_overrides_the_llm(engine, tiny, steering):
    steered = KnowledgePackLLM(engine=engine, max_tokens=8, steering=steering)
    assert tiny.complete(ASKED, steering=(steering, 0.5)).text == said(engine, steering=(steering, 0.5))
    assert steered.complete(ASKED, steering=-steering).text == said(engine, steering=-steering)
    assert steered.complete(ASKED, steering=None).text == said(engine)
    found = tiny.complete(ASKED, steering=steering, scope="prompt")
    assert found.text == said(engine, steering=steering, scope="prompt")


def test_the_default_strength_is_lower_beside_packs(engine, store, steering):
    pack = engine.build_pack("A fact of the 42 words.", compiled_for="system")
    handle = str(store.put(pack))
    llm = KnowledgePackLLM(engine=engine, store=store, namespaces=["default"], steering=(steering, None), max_tokens=8)
    assert llm.complete(ASKED).text == said(engine, steering=steering)
    assert llm.complete(ASKED, packs=[handle]).text == said(engine, packs=[pack], steering=(steering, 0.7))
    assert llm.complete(ASKED, packs=[handle], steering=None).text == said(engine, packs=[pack])


def test_a_restored_llm_does_not_lose_its_steering_unseen(engine, steering):
    made = KnowledgePackLLM(engine=engine, steering=steering)
    data = made.to_dict()
    assert data["steering"] == "given"
    with pytest.raises(ValidationError, match="expected that steering"):
        KnowledgePackLLM.from_dict(data, engine=engine)
    assert KnowledgePackLLM.from_json(made.to_json(), engine=engine, steering=steering).steering == steering
    assert KnowledgePackLLM.from_dict(data, engine=engine, steering=None).steering is None
    assert KnowledgePackLLM.from_dict(KnowledgePackLLM(model="a").to_dict()).steering is None
