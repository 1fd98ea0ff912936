"""Bad input in both adapters: the same error of the core, with the same words."""

import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage, ImageBlock
from pydantic import ValidationError

from kp_core import MemoryFactStore, PackStore
from kp_core.errors import (
    ContextOverflowError,
    FactError,
    GenerationTimeoutError,
    OptionError,
    PackError,
    PackNotFoundError,
    PromptError,
)
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever
from kp_llamaindex import KnowledgePackLLM
from kp_llamaindex import KnowledgePackRetriever as NodeRetriever
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import LetterEmbedder

UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
TOOL = {"name": "f", "description": "A tool.", "parameters": UNIQUE}
PICTURE = "https://example.com/a.png"


@pytest.fixture
def store(tmp_path):
    store = PackStore(tmp_path / "packs")
    store.put(tiny_engine("qwen3").build_pack("Of another model.", namespace="open"))
    store.put(tiny_engine().build_pack("Behind a closed door.", namespace="closed"))
    return store


def langchain(engine, store, messages, **options):
    model = ChatKnowledgePacks(engine=engine, store=store, namespaces=["open"], max_tokens=8)
    if tools := options.pop("tools", None):
        model = model.bind_tools(tools, tool_choice="any")
    model.invoke([HumanMessage(message) for message in messages], **options)


def llamaindex(engine, store, messages, **options):
    model = KnowledgePackLLM(engine=engine, store=store, namespaces=["open"], max_tokens=8)
    options |= {"tool_choice": "any"} if "tools" in options else {}
    model.chat([ChatMessage(content=message) for message in messages], **options)


CASES = {
    "no messages": (lambda _: ([], {}), PromptError, "expected at least one message"),
    "no handle": (lambda _: (["Hi"], {"packs": ["open"]}), PromptError, "expected a handle of the form"),
    "a forged handle": (
        lambda _: (["Hi"], {"packs": ["kp:open/" + "a" * 21]}),
        PackNotFoundError,
        "does not resolve",
    ),
    "a namespace that is not allowed": (
        lambda store: (["Hi"], {"packs": [str(store.handle("Behind a closed door.", "closed"))]}),
        PackNotFoundError,
        "does not resolve",
    ),
    "a pack of another model": (
        lambda store: (["Hi"], {"packs": [str(store.handle("Of another model.", "open"))]}),
        PackError,
        "config: pack has",
    ),
    "a handle in a message to a pack of another model": (
        lambda store: ([str(store.handle("Of another model.", "open"))], {}),
        PackError,
        "config: pack has",
    ),
    "a handle that brings nothing": (
        lambda store: ([str(store.handle("Behind a closed door.", "closed"))], {"unresolved": "error"}),
        PackNotFoundError,
        "namespace 'closed' is not allowed, only open",
    ),
    "a schema that no grammar expresses": (
        lambda _: (["Hi"], {"tools": [{"type": "function", "function": TOOL}]}),
        PromptError,
        "cannot be enforced",
    ),
    "more than fits": (lambda _: (["Hi"], {"max_tokens": 10**6}), ContextOverflowError, "has 2048 positions"),
    "no time": (lambda _: (["Hi"], {"timeout": 1e-9}), GenerationTimeoutError, "after 1e-09 s"),
}


@pytest.mark.parametrize("case", CASES)
def test_both_adapters_say_the_same(case, store):
    asked, kind, complaint = CASES[case]
    said = []
    for ask in (langchain, llamaindex):
        messages, options = asked(store)
        with pytest.raises(kind, match=complaint) as caught:
            ask(tiny_engine(), store, messages, **options)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("model", [ChatKnowledgePacks, KnowledgePackLLM])
def test_what_is_no_steering_is_refused_where_it_is_given(model):
    engine, foreign = tiny_engine(), tiny_engine("qwen3")
    steering, other = (each.make_steering([("an 7 er", "er 42")], progress=False) for each in (engine, foreign))

    def ask(settings, **options):
        made = model(engine=engine, max_tokens=8, **settings)
        return (made.invoke if model is ChatKnowledgePacks else made.complete)("Who?", **options)

    for wrong, says in (("formal", "type str"), ((steering, float("nan")), "alpha=nan"), ((steering,), "alpha")):
        with pytest.raises(ValidationError, match=says):
            ask({"steering": wrong})
        with pytest.raises(OptionError, match=says):
            ask({}, steering=wrong)
    for settings, options in (({"steering": other}, {}), ({}, {"steering": other})):
        with pytest.raises(PackError, match="was not made by this model"):
            ask(settings, **options)
    with pytest.raises(OptionError, match="without packs"):
        ask({}, steering=steering, scope="pack")
    assert ask({}).text == engine.generate("Who?", max_tokens=8).text


def test_pictures_are_refused(store):
    engine = tiny_engine()
    with pytest.raises(PromptError, match="image_url"):
        langchain(engine, store, [[{"type": "image_url", "image_url": {"url": PICTURE}}]])
    with pytest.raises(PromptError, match="image"):
        KnowledgePackLLM(engine=engine).chat([ChatMessage(blocks=[ImageBlock(url=PICTURE)])])


def test_a_store_without_facts(store):
    facts, engine = MemoryFactStore(LetterEmbedder()), tiny_engine()
    settings = {"engine": engine, "store": store, "namespace": "open", "fact_store": facts}
    said = []
    for ask in (
        lambda: KnowledgePackRetriever.from_facts([], **settings).invoke("Who?"),
        lambda: NodeRetriever(facts, store, engine=engine, namespace="open").retrieve("Who?"),
    ):
        with pytest.raises(FactError, match="no facts yet") as caught:
            ask()
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("adapter", ["langchain", "llamaindex"])
def test_a_stream_that_fails_midway_gives_its_memory_back(adapter, store, monkeypatch):
    engine = tiny_engine()
    engine.clear_cache()
    left = iter(range(3))

    def forward(*arguments, **options):
        if next(left, None) is None:
            raise MemoryError("in the middle")
        return plain(*arguments, **options)

    if adapter == "langchain":
        chat = ChatKnowledgePacks(engine=engine, max_tokens=200)
        start = lambda: chat.stream("Tell me more.")  # noqa: E731
    else:
        llm = KnowledgePackLLM(engine=engine, max_tokens=200)
        start = lambda: llm.stream_chat([ChatMessage(content="Tell me more.")])  # noqa: E731
    plain = engine.engine.model.forward
    monkeypatch.setattr(engine.engine.model, "forward", forward)
    with pytest.raises(MemoryError, match="in the middle"):
        list(start())
    monkeypatch.undo()
    assert engine.engine.pool.nbytes > 0
    engine.clear_cache()
    assert (engine.engine.pool.nbytes, engine.cached_bytes) == (0, 0)
