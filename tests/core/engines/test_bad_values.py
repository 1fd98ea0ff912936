"""Values of the wrong kind, size or depth: a result, or an error of ours, before anything is computed."""

import pytest

from kp_core import Fact, MemoryFactStore
from kp_core.errors import FactError, OptionError, PromptError
from tests.conftest import tiny_engine
from tests.kits import HashEmbedder


def nested(depth, around, inner):
    for _ in range(depth):
        inner = around(inner)
    return inner


DEEP = nested(3000, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}, {"type": "object"})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1, "top_p": 1, "repetition_penalty": 1, "seed": 1},
        {"temperature": 1, "seed": 2**64 - 1},
        # Numbers behind which scores are infinite.
        {"temperature": 1e-300, "seed": 1},
        {"temperature": 1e-30, "top_p": 0.5, "top_k": 3},
        {"temperature": 1, "repetition_penalty": 1e-300},
        {"repetition_penalty": 1e-300},
        {"stop": None, "packs": None, "timeout": 60},
    ],
    ids=str,
)
def test_integers_and_none_are_taken(options):
    assert tiny_engine().generate("Hi", max_tokens=3, **options).usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"seed": 2**64}, OptionError, "64 bits"),
        ({"temperature": 10**400}, OptionError, "temperature"),
        ({"temperature": True}, OptionError, "expected a number"),
        ({"repetition_penalty": 10**400}, OptionError, "repetition_penalty"),
        ({"top_k": 2.5, "temperature": 1}, OptionError, "top_k=2.5"),
        ({"max_tokens": 3.0}, OptionError, "max_tokens=3.0"),
        ({"stop": [1]}, OptionError, "stop"),
        ({"timeout": "3"}, OptionError, "timeout"),
        ({"view": "x"}, OptionError, "view='x'"),
        ({"cancel": 3}, OptionError, "cancel=3"),
        ({"packs": 0.5}, OptionError, "packs=0.5; expected a list"),
        ({"packs": [0.5]}, PromptError, "0.5; expected a handle"),
        ({"tools": 0.5}, OptionError, "tools=0.5; expected a list"),
        ({"response_schema": {"enum": {1}}}, PromptError, "response_schema that is no JSON"),
        ({"response_schema": DEEP}, PromptError, "100 levels"),
        ({"tools": [{"name": "f", "parameters": DEEP}]}, PromptError, "100 levels"),
    ],
    ids=range(16),
)
def test_what_no_option_can_be_is_refused_by_name(options, error, said):
    with pytest.raises(error, match=said):
        tiny_engine().generate("Hi", **{"max_tokens": 3, **options})


@pytest.mark.parametrize("messages", [3, 1.5, "a\ud800b", [{"role": "user", "content": "\udfff"}]], ids=repr)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(PromptError):
        tiny_engine().generate(messages, max_tokens=3)


@pytest.mark.parametrize("text", [3, None, b"bytes", "a\ud800"], ids=repr)
def test_what_is_no_text_of_a_pack_is_refused(text):
    with pytest.raises(PromptError):
        tiny_engine().build_pack(text)


def test_searches_and_facts_refuse_what_they_cannot_hold():
    store = MemoryFactStore(HashEmbedder())
    store.add([Fact("A ship.", metadata={"n": 10**400})])
    assert store.search("ship", where={"n": {"$gt": 10**399}})[0].fact.metadata["n"] == 10**400
    deep = nested(3000, lambda inner: {"$and": [inner, {"b": 1}]}, {"a": 1})
    with pytest.raises(FactError, match="100 levels"):
        store.search("ship", where=deep)
    with pytest.raises(FactError, match="k='3'"):
        store.search("ship", "3")
    with pytest.raises(FactError, match=r"probes=1\.5"):
        store.search("ship", probes=1.5)
    with pytest.raises(FactError, match="Unicode"):
        store.search("\ud800")
    with pytest.raises(FactError, match="4096"):
        Fact("A boat.", metadata={"n": 10**5000})
