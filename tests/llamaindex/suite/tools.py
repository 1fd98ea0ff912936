"""Checks of tool calls and structured output."""

from __future__ import annotations

from typing import Any, Literal, cast

from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from tests.llamaindex.suite.suite import Check, Subject, expect, read

__all__ = ["TOOL_CHECKS"]

_ENDPOINTS = ("chat_with_tools", "achat_with_tools", "stream_chat_with_tools", "astream_chat_with_tools")
_TASK = "Set the lamp to a colour."


class _Lamp(BaseModel):
    """The colour of a lamp."""

    colour: Literal["red", "green", "blue"]
    bright: bool


class _Bell(BaseModel):
    """How often to ring."""

    times: Literal[1, 2, 3]


def _set_lamp(colour: str, bright: bool) -> str:  # noqa: FBT001
    return f"The lamp is {'bright' if bright else 'dark'} {colour}."


def _ring_bell(times: int) -> str:
    return f"Rang {times} times."


_LAMP = FunctionTool.from_defaults(_set_lamp, name="set_lamp", description="Set the lamp.", fn_schema=_Lamp)
_BELL = FunctionTool.from_defaults(_ring_bell, name="ring_bell", description="Ring the bell.", fn_schema=_Bell)
_PROMPT = PromptTemplate("Set the lamp for {occasion}.")


def _llm(subject: Subject) -> FunctionCallingLLM:
    llm = subject.make()
    kind = type(llm).__name__
    expect(isinstance(llm, FunctionCallingLLM), f"{kind} is no FunctionCallingLLM; FunctionAgent refuses it")
    expect(llm.metadata.is_function_calling_model, "metadata.is_function_calling_model is false")
    return cast("FunctionCallingLLM", llm)


async def _ask(llm: FunctionCallingLLM, endpoint: str, **options: Any) -> list[ChatResponse]:
    answer = getattr(llm, endpoint)(**{"user_msg": _TASK, "tools": [_LAMP, _BELL], **options})
    if endpoint.startswith("a"):
        answer = await answer
    return await read(answer) if "stream" in endpoint else [answer]


def _requires(endpoint: str) -> Check:
    async def run(subject: Subject) -> None:
        llm = _llm(subject)
        responses = await _ask(llm, endpoint, tool_required=True)
        for response in responses:
            llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        calls = llm.get_tool_calls_from_response(responses[-1], error_on_no_tool_call=False)
        expect(len(calls) == 1, f"got {len(calls)} calls; expected one")
        expect(calls[0].tool_name in ("set_lamp", "ring_bell"), f"called {calls[0].tool_name!r}, which is not on offer")
        blocks = [block for block in responses[-1].message.blocks if isinstance(block, ToolCallBlock)]
        expect(len(blocks) == 1, f"the message holds {len(blocks)} ToolCallBlocks; expected one")
        expect(bool(calls[0].tool_id), "the call has no id, so its result cannot be told from others")

    return Check(f"{endpoint} calls a tool when one is required", run)


def _chooses(endpoint: str) -> Check:
    async def run(subject: Subject) -> None:
        llm = _llm(subject)
        for tool, allowed in ((_BELL, {"times": {1, 2, 3}}), (_LAMP, {"colour": {"red", "green", "blue"}})):
            responses = await _ask(llm, endpoint, tool_choice=tool.metadata.name)
            calls = llm.get_tool_calls_from_response(responses[-1], error_on_no_tool_call=False)
            expect([call.tool_name for call in calls] == [tool.metadata.name], f"got the calls {calls}")
            for name, values in allowed.items():
                given = calls[0].tool_kwargs.get(name)
                expect(given in values, f"{name} is {given!r}; the schema allows {values}")

    return Check(f"{endpoint} calls the tool that is chosen, by its schema", run)


async def _refrains(subject: Subject) -> None:
    llm = _llm(subject)
    [response] = await _ask(llm, "chat_with_tools", tool_choice="none")
    calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    expect(not calls, f"got the calls {calls} although none was allowed")
    try:
        llm.get_tool_calls_from_response(response)
    except ValueError:
        return
    expect(holds=False, otherwise="a missing call was not reported as ValueError")


async def _goes_on(subject: Subject) -> None:
    """The calls of an answer, and their results, can be sent back."""
    llm = _llm(subject)
    [asked] = await _ask(llm, "chat_with_tools", tool_choice="set_lamp")
    [call] = llm.get_tool_calls_from_response(asked)
    result = ChatMessage(
        _LAMP(**call.tool_kwargs).content, role="tool", additional_kwargs={"tool_call_id": call.tool_id}
    )
    history = [ChatMessage(_TASK), asked.message, result]
    again = ChatMessage(**asked.message.model_dump())
    expect(again == asked.message, "the message does not survive model_dump")
    expect(llm.chat(history).message is not None, "no answer to a tool result")
    expect((await llm.achat(history)).message is not None, "no answer to a tool result")


async def _calls(subject: Subject) -> None:
    llm = _llm(subject)
    options: dict[str, Any] = {"user_msg": _TASK, "tool_choice": "set_lamp"}
    said = str(llm.predict_and_call([_LAMP, _BELL], **options))
    expect(said.startswith("The lamp is "), f"predict_and_call gave {said!r}")
    later = str(await llm.apredict_and_call([_LAMP, _BELL], **options))
    expect(later == said, f"apredict_and_call gave {later!r}; predict_and_call {said!r}")


async def _structures(subject: Subject) -> None:
    llm: LLM = subject.make()
    lamp = llm.structured_predict(_Lamp, _PROMPT, occasion="a feast")
    expect(isinstance(lamp, _Lamp), f"got {lamp!r}")
    later = await llm.astructured_predict(_Lamp, _PROMPT, occasion="a feast")
    expect(later == lamp, f"astructured_predict gave {later!r}; structured_predict {lamp!r}")


async def _structures_streams(subject: Subject) -> None:
    llm: LLM = subject.make()
    lamp = llm.structured_predict(_Lamp, _PROMPT, occasion="a feast")
    for stream in (
        llm.stream_structured_predict(_Lamp, _PROMPT, occasion="a feast"),
        await llm.astream_structured_predict(_Lamp, _PROMPT, occasion="a feast"),
    ):
        parts = await read(stream)
        expect(bool(parts) and parts[-1] == lamp, f"the stream ends with {parts[-1:]}; expected {lamp!r}")


async def _is_structured(subject: Subject) -> None:
    structured = subject.make().as_structured_llm(_Lamp)
    for response in (structured.complete(_TASK), structured.chat([ChatMessage(_TASK)])):
        expect(isinstance(response.raw, _Lamp), f"raw is {response.raw!r}; expected a lamp")


TOOL_CHECKS: tuple[Check, ...] = (
    *(_requires(endpoint) for endpoint in _ENDPOINTS),
    *(_chooses(endpoint) for endpoint in _ENDPOINTS),
    Check("chat_with_tools refrains when told to", _refrains),
    Check("tool results can be sent back", _goes_on),
    Check("predict_and_call calls", _calls),
    Check("structured_predict gives the class", _structures),
    Check("stream_structured_predict ends with the class", _structures_streams),
    Check("as_structured_llm gives the class", _is_structured),
)
"""Every check of tools and structured output."""
