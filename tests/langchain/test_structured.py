"""Tools and structured output through LangChain's own interfaces."""

import itertools
from typing import Literal, TypedDict

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import StructuredTool, tool
from pydantic import BaseModel, Field

from kp_core.errors import PromptError
from kp_langchain import ChatKnowledgePacks
from kp_langchain.chat_model import response_schema
from tests.conftest import tiny_engine
from tests.kits import CHATML


class Person(BaseModel):
    """A person."""

    name: str = Field(description="The name.")
    age: int


class Place(TypedDict):
    """A place."""

    city: str


@tool
def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


@pytest.fixture
def chat(chat_engine, call_tokens):
    return ChatKnowledgePacks(engine=chat_engine, max_tokens=call_tokens + 24)


METHODS = ("json_schema", "function_calling", "json_mode")
KINDS = {"class": Person, "typed dictionary": Place, "schema": {**Person.model_json_schema(), "title": "person"}}


def kinds():
    """Each kind by one method with every change, and by each method nightly."""
    for method, (at, kind) in itertools.product(METHODS, enumerate(KINDS)):
        yield pytest.param(method, kind, marks=() if METHODS[at] == method else pytest.mark.nightly)


@pytest.mark.parametrize(("method", "kind"), kinds())
@pytest.mark.bundled
def test_schemas_of_every_kind_come_back_as_asked(method, kind, chat):
    found = chat.with_structured_output(KINDS[kind], method=method).invoke("Ana is 30, and lives in Rome.")
    if kind == "class":
        assert isinstance(found, Person)
    else:
        assert set(found) == ({"city"} if kind == "typed dictionary" else {"name", "age"})


def test_raw_is_included_when_asked(chat):
    found = chat.with_structured_output(Person, include_raw=True).invoke("Ana is 30.")
    assert isinstance(found["raw"], AIMessage)
    assert isinstance(found["parsed"], Person)
    assert found["parsing_error"] is None


@pytest.mark.parametrize(
    ("choice", "calls"),
    [("any", 1), ("required", 1), (True, 1), ("add", 1), ("none", 0), ({"function": {"name": "add"}}, 1)],
)
@pytest.mark.bundled
def test_tool_choices(choice, calls, chat):
    answer = chat.bind_tools([add], tool_choice=choice).invoke("What is 2 + 3? Add them.")
    assert len(answer.tool_calls) == calls
    for call in answer.tool_calls:
        assert call["name"] == "add"
        assert set(call["args"]) == {"left", "right"}


def test_streamed_calls_join_to_the_call(chat):
    model = chat.bind_tools([add, Person], tool_choice="add")
    chunks = list(model.stream("What is 2 + 3?"))
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    assert len(chunks) > 4
    answer = model.invoke("What is 2 + 3?")
    [call], [expected] = whole.tool_calls, answer.tool_calls
    assert (call["name"], call["args"]) == (expected["name"], expected["args"])
    assert whole.response_metadata["finish_reason"] == answer.response_metadata["finish_reason"]
    assert whole.chunk_position == "last"


def test_reasoning_becomes_a_block():
    engine = tiny_engine(
        template="{% if false %}</think>{% endif %}" + CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'")
    )
    chat = ChatKnowledgePacks(engine=engine, max_tokens=120, output_version="v1")
    answer = chat.with_structured_output(Place, include_raw=True).invoke("Where?")["raw"]
    kinds = [block["type"] for block in answer.content_blocks]
    assert kinds == ["reasoning", "text"]


def test_any_object_and_openai_forms_are_schemas():
    assert response_schema({"type": "json_object"}) is True
    schema = {"title": "x", "type": "object", "properties": {}}
    assert response_schema({"type": "json_schema", "json_schema": {"schema": schema}}) == schema
    with pytest.raises(PromptError, match="expected a Pydantic class"):
        response_schema(3)


def test_a_model_says_what_it_can(chat):
    assert chat.profile["tool_calling"]
    assert chat.profile["structured_output"]
    assert chat.profile["max_input_tokens"] == chat.engine.max_positions


class Tree(BaseModel):
    """A tree."""

    kind: Literal["oak", "ash"]
    children: list["Tree"] = []


@pytest.mark.slow
def test_a_class_that_holds_itself_is_enforced_at_every_depth():
    def plant(tree: Tree) -> str:
        """Plants a tree."""
        return tree.kind

    part = {"$ref": "#/$defs/Tree"}
    assert response_schema(Tree)["properties"]["children"]["items"] == part
    model = ChatKnowledgePacks(engine=tiny_engine())
    for each in (Tree, plant, StructuredTool.from_function(plant)):
        [offered] = model.bind_tools([each]).kwargs["tools"]
        parameters = offered["function"]["parameters"]
        assert parameters["$defs"]["Tree"]["properties"]["children"]["items"] == part
    for method in ("json_schema", "function_calling"):
        for seed in range(3):
            options = {"temperature": 1.5, "seed": seed, "max_tokens": 250}
            tree = ChatKnowledgePacks(engine=tiny_engine(), **options).with_structured_output(Tree, method=method)
            assert isinstance(tree.invoke("Go."), Tree)
