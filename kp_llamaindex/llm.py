"""`KnowledgePackLLM`: an open-weight model behind LlamaIndex's function-calling interface. It resolves handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import (
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.program.utils import get_program_for_llm
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.types import BasePydanticProgram, PydanticProgramMode

from kp_core import find_handles, strip_handles
from kp_core.plan.request import OPTIONS
from kp_core.settings import GIVEN, ModelSettings
from kp_llamaindex.messages import MEMORY, PartialAnswer, to_completion, to_messages, to_response

T = TypeVar("T")

_DEFAULT_OUTPUT = 512
_GIVEN = "given"
_BY_CALL = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)


class KnowledgePackLLM(ModelSettings, FunctionCallingLLM):
    """A model whose messages may hold handles; each is replaced by the knowledge of its pack.

    Its settings, and the errors it raises for them, are those of `kp_core.settings.ModelSettings`. A completion is a
    chat of one user message, whether or not it is `formatted`.

    `raw` of a response (of the last one in a stream) holds `usage`, which counts what the model reads, packs included,
    `kp` with all counts of `kp_core.Usage`, `timings` and `finish_reason`. A grammar holds tool calls and
    `response_schema` to their schemas. Async methods work in threads. `metadata` needs the engine: read it before the
    loop runs, or pass an `engine`.

    In serialised form, a store is its path. An engine, a steering, a composer and a store without a path become
    markers; they must be given again.
    """

    @field_validator(*GIVEN, mode="before")
    @classmethod
    def _refuse_marks(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and value == _GIVEN:
            name = info.field_name
            said = f"Got the description of an LLM that was made with a {name} of its own; expected that {name}: "
            raise ValueError(f"{said}`KnowledgePackLLM.from_dict(data, {name}={name})`.")
        return value

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The fields as plain values."""
        marks = {name: None if getattr(self, name) is None else _GIVEN for name in GIVEN}
        if self.composer == OPTIONS["composer"].default:
            marks["composer"] = None
        if self.store is not None and self.store.blobs is not None:
            marks["store"] = str(self.store.blobs)
        data: dict[str, Any] = super().custom_model_dump(handler, info)
        return data | marks

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "KnowledgePackLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Names and sizes. With a store, half of the positions are for packs, which prompt helpers cannot see.

        Loads the engine.
        """
        positions = self._engine().max_positions
        window = positions if self.store is None else positions - positions // 2
        return LLMMetadata(
            context_window=window,
            num_output=self._defaults().max_tokens or min(_DEFAULT_OUTPUT, window // 2),
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=self.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """The form for LlamaIndex's events. It loads no model, so that an event never waits for weights."""
        if self.engine is None:
            return {"class_name": self.class_name(), "model_name": self.model_name}
        return super().to_payload()

    def token_ids(self, text: str) -> list[int]:
        """Token ids of `text` in the model's own tokenizer, without handles, which are not sent."""
        ids = self._engine().tokenizer.encode(strip_handles(text), add_special_tokens=False)
        return [int(token) for token in ids]

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The answer to a conversation."""
        return self._chat(messages, kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to one user message."""
        return to_completion(self._chat([ChatMessage(prompt)], kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """The answer to a conversation, piece by piece. Closing the stream stops the generation."""
        return self._stream(messages, kwargs, lambda response: response)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """The answer to one user message, piece by piece."""
        return self._stream([ChatMessage(prompt)], kwargs, to_completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`; cancelling the task stops the generation."""
        return await self._achat(messages, kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`; cancelling the task stops the generation."""
        return to_completion(await self._achat([ChatMessage(prompt)], kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`."""
        return self._astream(messages, self._request(kwargs, messages), lambda response: response)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`."""
        return self._astream([ChatMessage(prompt)], self._request(kwargs, ()), to_completion)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls of `response`; of a streamed one, those that have come so far.

        Raises `ValueError` if there are none, unless `error_on_no_tool_call` is false.
        """
        calls = []
        for block in response.message.blocks:
            if isinstance(block, ToolCallBlock):
                call_id, arguments = block.tool_call_id or "", _arguments(block.tool_kwargs)
                calls.append(ToolSelection(tool_id=call_id, tool_name=block.tool_name, tool_kwargs=arguments))
        if not calls and error_on_no_tool_call:
            raise ValueError(f"Expected at least one tool call, got none in: {response.message.content!r}")
        return calls

    def _prepare_chat_with_tools(  # noqa: PLR0913 - LlamaIndex's signature
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of `chat` for a conversation with tools."""
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        if tool_required and tool_choice in (None, "auto"):
            tool_choice = "any"
        offer = {"tools": list(tools), "tool_choice": tool_choice, "parallel_tool_calls": allow_parallel_tool_calls}
        return {"messages": messages, **(offer if tools else {}), **kwargs}

    def _structured_stream_call(
        self, output_cls: Any, prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        return self._program(output_cls, prompt).stream_call(llm_kwargs=llm_kwargs, **prompt_args)

    async def _structured_astream_call(
        self, output_cls: Any, prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        return await self._program(output_cls, prompt).astream_call(llm_kwargs=llm_kwargs, **prompt_args)

    def _program(self, output_cls: Any, prompt: PromptTemplate) -> BasePydanticProgram[Any]:
        # LlamaIndex does not require the call when it streams, so small models answer in prose.
        mode = self.pydantic_program_mode
        forced = {"tool_choice": "any"} if mode in _BY_CALL else {}
        return get_program_for_llm(output_cls, prompt, self, pydantic_program_mode=mode, **forced)

    def _chat(self, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> ChatResponse:
        request = self._request(options, messages)
        return to_response(self._engine().generate(to_messages(messages), **request))

    async def _achat(self, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> ChatResponse:
        request = self._request(options, messages)
        engine = await asyncio.to_thread(self._engine)
        return to_response(await engine.agenerate(to_messages(messages), **request))

    def _stream(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any], form: Callable[[ChatResponse], T]
    ) -> Generator[T, None, None]:
        answer, request = PartialAnswer(), self._request(options, messages)
        stream = self._engine().stream(to_messages(messages), **request)

        def pieces() -> Generator[T, None, None]:
            with closing(stream):
                for delta in stream.deltas():
                    yield form(answer.add(delta))
                yield form(to_response(stream.result(), delta=""))

        return pieces()

    async def _astream(
        self, messages: Sequence[ChatMessage], request: dict[str, Any], form: Callable[[ChatResponse], T]
    ) -> AsyncGenerator[T, None]:
        answer = PartialAnswer()
        engine = await asyncio.to_thread(self._engine)
        async with aclosing(engine.astream(to_messages(messages), **request)) as stream:
            async for delta in stream.deltas():
                yield form(answer.add(delta))
            if stream.generation is not None:
                yield form(to_response(stream.generation, delta=""))

    def _request(self, options: Mapping[str, Any], messages: Sequence[ChatMessage]) -> dict[str, Any]:
        """The fields, overridden by the options of one call. `stop=None` leaves the field's value.

        KV behind the handles of a memory block is kept unless `keep` says otherwise.
        """
        given_options = {name: value for name, value in options.items() if name != "stop" or value is not None}
        request = self._asked(given_options)
        if any(map(self._remembers, messages)) and given_options.get("keep") is None:
            request |= self.remembering()
        if "tools" in request:
            request["tools"] = [
                tool.metadata.to_openai_tool(skip_length_check=True) if isinstance(tool, BaseTool) else tool
                for tool in request["tools"]
            ]
        return request

    def _remembers(self, message: ChatMessage) -> bool:
        """Whether a message holds the handle of a memory block's pack that this LLM may read."""
        if self.store is None or not isinstance(message, ChatMessage):
            return False
        handles = (handle for *_, handle in find_handles(message.content or ""))
        packs = (self.store.peek(handle) for handle in handles if handle.namespace in self.namespaces)
        return any(pack is not None and MEMORY in pack.provenance for pack in packs)


def _arguments(given: dict[str, Any] | str) -> dict[str, Any]:
    """The arguments of a call, or what has come of them so far."""
    if not isinstance(given, str):
        return given
    try:
        parsed = parse_partial_json(given)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
