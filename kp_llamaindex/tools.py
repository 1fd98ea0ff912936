"""Tools and structured output: LlamaIndex's tools in the form the core takes, and its calls back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.tools import BaseTool

__all__ = ["ToolCalling", "to_tool_choice"]


class ToolCalling:
    """What `KnowledgePackLLM` adds to LlamaIndex's own tool calling, which does the rest through `chat`."""

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
        made: dict[str, Any] = {"messages": messages, **kwargs}
        if tools:
            made["tools"] = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
            made["tool_choice"] = to_tool_choice(tool_choice, required=tool_required)
            made["parallel_tool_calls"] = allow_parallel_tool_calls
        return made

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,  # noqa: FBT001, FBT002
        **kwargs: Any,  # noqa: ANN401, ARG002 - LlamaIndex's signature
    ) -> list[ToolSelection]:
        """The tool calls of `response`; of a streamed one as far as they have come.

        Raises `ValueError` when there are none, unless `error_on_no_tool_call` is false.
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


def to_tool_choice(choice: str | Mapping[str, Any] | None, *, required: bool = False) -> str:
    """The core's `auto`, `any`, `none` or a tool's name, for what LlamaIndex's users write.

    `choice` may also be `required`, or a mapping `{"type": "function", "function": {"name": ...}}`.
    """
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = str(function["name"])
    if choice is None or choice == "auto":
        return "any" if required else "auto"
    return "any" if choice == "required" else choice


def _arguments(given: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        parsed = parse_partial_json(given)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
