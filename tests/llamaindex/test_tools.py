"""Tool calls and structured output of `KnowledgePackLLM`."""

import json
from itertools import pairwise
from typing import Literal

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from kp_core import Delta, ToolCallDelta, load_engine
from kp_core.errors import PromptError
from kp_llamaindex import KnowledgePackLLM, to_messages
from kp_llamaindex.messages import PartialAnswer, to_completion
from tests.conftest import tiny_engine
from tests.kits import CHATML, tiny_model, tiny_tokenizer


class Bird(BaseModel):
    """A bird."""

    kind: Literal["heron", "gull", "crow"]
    legs: int = Field(ge=0, le=9)


def search(query: Literal["flag", "coin", "ferry"], limit: Literal[2, 3] = 3) -> str:
    """Search the library."""
    return f"{limit} books on {query}"


def fetch(number: Literal[1, 2]) -> str:
    """Fetch a book."""
    return f"book {number}"


SEARCH, FETCH = FunctionTool.from_defaults(search), FunctionTool.from_defaults(fetch)
PROMPT = PromptTemplate("Name a bird of {place}.")


@pytest.fixture
def tiny():
    return KnowledgePackLLM(engine=tiny_engine(), max_tokens=120)


def calls_of(response):
    return [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]


@pytest.mark.parametrize(
    "choice",
    [
        {"tool_required": True},
        {"tool_choice": "any"},
        {"tool_choice": "required"},
        {"tool_choice": "search"},
        {"tool_choice": {"type": "function", "function": {"name": "search"}}},
        {"tool_required": True, "tool_choice": "search"},
    ],
)
def test_a_required_call_comes(choice, tiny):
    tools = [SEARCH] if "search" not in str(choice) else [SEARCH, FETCH]
    response = tiny.chat_with_tools(tools, "What is on the flag?", **choice)
    [call] = calls_of(response)
    assert call.tool_name == "search"
    assert call.tool_kwargs["query"] in {"flag", "coin", "ferry"}
    assert response.raw["finish_reason"] == "tool_calls"
    [selection] = tiny.get_tool_calls_from_response(response)
    assert (selection.tool_id, selection.tool_kwargs) == (call.tool_call_id, call.tool_kwargs)
    [told] = response.message.additional_kwargs["tool_calls"]
    assert json.loads(told["function"]["arguments"]) == call.tool_kwargs


def test_a_forbidden_call_does_not_come(tiny):
    response = tiny.chat_with_tools([SEARCH], "Hi", tool_choice="none")
    assert response.message.content is not None
    with pytest.raises(ValueError, match="Expected at least one tool call, got none"):
        tiny.get_tool_calls_from_response(response)
    assert tiny.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []


def test_bad_choices_and_tools(tiny):
    with pytest.raises(PromptError, match="tool_choice='fetch'"):
        tiny.chat_with_tools([SEARCH], "Hi", tool_choice="fetch")
    with pytest.raises(PromptError, match="expected 'auto', 'any', 'none' or the name of a tool"):
        tiny.chat_with_tools([SEARCH], "Hi", tool_choice={"type": "function"})
    with pytest.raises(PromptError, match="different name"):
        tiny.chat_with_tools([SEARCH, SEARCH], "Hi")
    assert tiny.chat_with_tools([], "Hi", tool_required=True).message.content is not None


def test_tools_of_a_plain_chat(tiny):
    openai = SEARCH.metadata.to_openai_tool()
    asked = [ChatMessage("Hi")]
    first, second = (tiny.chat(asked, tools=[tool], tool_choice="search") for tool in (SEARCH, openai))
    assert calls_of(first)[0].tool_kwargs == calls_of(second)[0].tool_kwargs


def test_a_streamed_call_grows_and_ends_as_the_whole_one(tiny):
    parts = list(tiny.stream_chat_with_tools([SEARCH], "Hi", tool_required=True))
    written = [calls_of(part)[0].tool_kwargs for part in parts[:-1] if calls_of(part)]
    assert len(written) > 2
    assert all(isinstance(text, str) and later.startswith(text) for text, later in pairwise(written))
    assert json.loads(written[-1]) == calls_of(parts[-1])[0].tool_kwargs
    # Agents ask every chunk.
    assert all(tiny.get_tool_calls_from_response(part, error_on_no_tool_call=False) is not None for part in parts)
    whole = tiny.chat_with_tools([SEARCH], "Hi", tool_required=True)
    assert calls_of(whole)[0].tool_kwargs == calls_of(parts[-1])[0].tool_kwargs
    assert len({calls_of(part)[0].tool_call_id for part in parts if calls_of(part)}) == 1


async def test_async_calls_equal_sync_ones(tiny):
    whole = calls_of(tiny.chat_with_tools([SEARCH], "Hi", tool_required=True))[0].tool_kwargs
    assert calls_of(await tiny.achat_with_tools([SEARCH], "Hi", tool_required=True))[0].tool_kwargs == whole
    stream = await tiny.astream_chat_with_tools([SEARCH], "Hi", tool_required=True)
    assert calls_of([part async for part in stream][-1])[0].tool_kwargs == whole


def test_predict_and_call(tiny):
    answer = tiny.predict_and_call([SEARCH], "Hi", tool_required=True)
    assert " books on " in str(answer)
    assert answer.sources[0].tool_name == "search"


async def test_apredict_and_call(tiny):
    assert str(await tiny.apredict_and_call([SEARCH], "Hi", tool_required=True)) == str(
        tiny.predict_and_call([SEARCH], "Hi", tool_required=True)
    )


def test_structured_predict(tiny):
    bird = tiny.structured_predict(Bird, PROMPT, place="Veyl")
    assert isinstance(bird, Bird)
    *partial, last = tiny.stream_structured_predict(Bird, PROMPT, place="Veyl")
    assert last == bird
    assert partial


async def test_astructured_predict(tiny):
    bird = await tiny.astructured_predict(Bird, PROMPT, place="Veyl")
    parts = [part async for part in await tiny.astream_structured_predict(Bird, PROMPT, place="Veyl")]
    assert parts[-1] == bird == tiny.structured_predict(Bird, PROMPT, place="Veyl")


def test_structured_predict_with_options_of_the_call(tiny):
    warm = {"temperature": 1.5, "seed": 3}
    bird = tiny.structured_predict(Bird, PROMPT, llm_kwargs=dict(warm), place="Veyl")
    assert bird == tiny.structured_predict(Bird, PROMPT, llm_kwargs=dict(warm), place="Veyl")
    with pytest.raises(TypeError, match="wibble"):
        tiny.structured_predict(Bird, PROMPT, llm_kwargs={"wibble": 1}, place="Veyl")


def test_as_structured_llm(tiny):
    structured = tiny.as_structured_llm(Bird)
    assert isinstance(structured.complete("Name a bird.").raw, Bird)
    assert isinstance(structured.chat([ChatMessage("Name a bird.")]).raw, Bird)
    assert isinstance(list(structured.stream_chat([ChatMessage("Name a bird.")]))[-1].raw, Bird)


@pytest.mark.parametrize("schema", [Bird, Bird.model_json_schema()], ids=["class", "schema"])
def test_a_response_schema(tiny, schema):
    said = tiny.complete("Name a bird.", response_schema=schema).text
    assert isinstance(Bird.model_validate_json(said), Bird)


def test_calls_and_results_go_back_to_the_model(tiny):
    asked = tiny.chat_with_tools([SEARCH], "What is on the flag?", tool_required=True).message
    history = [ChatMessage("What is on the flag?"), asked]
    call_id = calls_of(ChatResponse(message=asked))[0].tool_call_id
    result = ChatMessage("A heron.", role="tool", additional_kwargs={"tool_call_id": call_id})
    said = tiny.engine.template.text(tiny.engine.template.render(to_messages([*history, result])))
    assert '"name": "search"' in said
    assert "A heron." in said


def test_reasoning_becomes_a_thinking_block():
    answer = PartialAnswer()
    parts = [
        answer.add(Delta(reasoning="Hm")),
        answer.add(Delta(reasoning=".")),
        answer.add(Delta(text="Yes.")),
        answer.add(Delta(tool_call=ToolCallDelta(0, "a", "f", ""))),
        answer.add(Delta(tool_call=ToolCallDelta(0, arguments='{"x": 1}'))),
        answer.add(Delta(tool_call=ToolCallDelta(1, "b", "g", "{}"))),
    ]
    assert [part.additional_kwargs.get("thinking_delta") for part in parts[:3]] == ["Hm", ".", None]
    assert parts[1].message.blocks == [ThinkingBlock(content="Hm."), TextBlock(text="")]
    assert parts[-1].message.blocks == [
        ThinkingBlock(content="Hm."),
        TextBlock(text="Yes."),
        ToolCallBlock(tool_call_id="a", tool_name="f", tool_kwargs='{"x": 1}'),
        ToolCallBlock(tool_call_id="b", tool_name="g", tool_kwargs="{}"),
    ]
    assert to_completion(parts[2]).text == "Yes."
    assert [part.delta for part in parts] == ["", "", "Yes.", "", "", ""]


THINKING = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}") + "{# ends with </think> #}"


def test_thinking_comes_apart_from_the_text():
    engine = load_engine(tiny_model("qwen3"), tokenizer=tiny_tokenizer(THINKING))
    llm = KnowledgePackLLM(engine=engine, max_tokens=24)
    # A random model never ends its thoughts.
    whole = llm.complete("Name a bird.")
    assert whole.text == ""
    thinking, said = llm.chat([ChatMessage("Name a bird.")]).message.blocks
    assert isinstance(thinking, ThinkingBlock)
    assert (said.text, bool(thinking.content)) == ("", True)
    parts = list(llm.stream_chat([ChatMessage("Name a bird.")]))
    thought = "".join(part.additional_kwargs.get("thinking_delta", "") for part in parts)
    assert thought.strip() == thinking.content.strip()
    [sent] = to_messages([parts[-1].message])
    assert sent == {"role": "assistant", "content": ""}
