"""Tools and structured output: LlamaIndex's tools for the core, and the core's calls for LlamaIndex."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.program.function_program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.types import PydanticProgramMode

__all__ = ["ToolCallingLLM", "to_tools"]

_BY_CALL = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)


class ToolCallingLLM(FunctionCallingLLM):
    """Additions of `KnowledgePackLLM` to LlamaIndex's own tool calling, which does the rest through `chat`.

    A grammar holds calls to the schemas of their tools, so a required call always comes and always parses.
    """

    def _prepare_chat_with_tools(  # noqa: PLR0913 - LlamaIndex's signature
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002, FBT001, FBT002
        allow_parallel_tool_calls: bool = False,  # noqa: FBT001, FBT002
        tool_required: bool = False,  # noqa: FBT001, FBT002
        tool_choice: str | Mapping[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """The arguments of `chat` for a conversation with tools."""
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        if tool_required and tool_choice in (None, "auto"):
            tool_choice = "any"
        tool_options = {
            "tools": list(tools),
            "tool_choice": tool_choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
        }
        return {"messages": messages, **(tool_options if tools else {}), **kwargs}

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,  # noqa: FBT001, FBT002
        **kwargs: Any,  # noqa: ANN401, ARG002 - LlamaIndex's signature
    ) -> list[ToolSelection]:
        """The tool calls of `response`; of a streamed one, those that have come so far.

        Raises `ValueError` if there are none, unless `error_on_no_tool_call` is false.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise ValueError(f"Expected at least one tool call, got none in: {response.message.content!r}")
        return [
            ToolSelection(
                tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=_arguments(block.tool_kwargs)
            )
            for block in blocks
        ]

    def _structured_stream_call(
        self,
        output_cls: Any,  # noqa: ANN401 - a pydantic model class
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,  # noqa: ANN401
    ) -> Generator[Any, None, None]:
        # LlamaIndex does not require the call when it streams, so small models answer in prose.
        if self.pydantic_program_mode not in _BY_CALL:
            return super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        return self._program(output_cls, prompt).stream_call(llm_kwargs=llm_kwargs, **prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: Any,  # noqa: ANN401 - a pydantic model class
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,  # noqa: ANN401
    ) -> AsyncGenerator[Any, None]:
        if self.pydantic_program_mode not in _BY_CALL:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        return await self._program(output_cls, prompt).astream_call(llm_kwargs=llm_kwargs, **prompt_args)

    def _program(self, output_cls: Any, prompt: PromptTemplate) -> FunctionCallingProgram[Any]:  # noqa: ANN401
        return FunctionCallingProgram.from_defaults(output_cls=output_cls, llm=self, prompt=prompt, tool_choice="any")


def to_tools(tools: Sequence[BaseTool | Mapping[str, Any]]) -> list[Any]:
    """LlamaIndex's tools as OpenAI's mappings. Mappings among them stay as they are."""
    return [
        tool.metadata.to_openai_tool(skip_length_check=True) if isinstance(tool, BaseTool) else tool for tool in tools
    ]


def _arguments(given: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        parsed = parse_partial_json(given)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
