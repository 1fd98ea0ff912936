"""`ChatKnowledgePacks`: an open-weight model behind LangChain's chat interface. It resolves handles."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from graphlib import CycleError, TopologicalSorter
from inspect import isfunction
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import BaseOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from kp_core import Composer
from kp_core.errors import PromptError
from kp_core.prompt.conversation import to_turns
from kp_core.settings import MODEL_OPTIONS, ModelSettings, core_choice
from kp_core.tools import AnswerShape
from kp_langchain.messages import PROVIDER, last_chunk, overflows, to_chunk, to_messages, to_result

_OF_LANGCHAIN = ("model", "response_format", "ls_structured_output_format", "strict", "stream", "stream_usage")
"""Options of a call that only LangChain knows. The last four, which it binds for its own use, have no effect here."""
_DEFINITION = re.compile(r'"#/\$defs/([^"]+)"')


class ChatKnowledgePacks(ModelSettings, BaseChatModel):
    """A chat model whose messages may hold handles; each is replaced by the knowledge of its pack.

    Its settings, and the errors it raises for them, are those of `kp_core.settings.ModelSettings`; packs of a call
    follow those of the field. A grammar holds calls and structured output to their schema, so they always parse; a
    schema that it cannot express raises `PromptError`.

    `usage_metadata.input_tokens` counts what the model reads, packs included, and `input_token_details.cache_read` what
    of it came from packs and caches. `response_metadata["kp"]` holds all counts of `kp_core.Usage`, as what was sent.

    Raises `ContextOverflowError`, which is that of the core and LangChain's, for more tokens than the model has.
    """

    max_retries: int | None = None
    """Accepted because LangChain's models have it; a model on this machine has nothing to retry."""
    streaming: bool = False

    @property
    def _llm_type(self) -> str:
        return "knowledge-packs"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # Part of the key of LangChain's cache of answers, so objects are given by what they do.
        request = self._defaults()
        return {
            "model_name": self.model_name,
            "dtype": self.dtype,
            "base_url": self.base_url,
            "store": None if self.store is None else str(self.store.blobs or self.store),
            "namespaces": self.namespaces,
            "trusted_roles": self.trusted_roles,
            **{name: getattr(request, name) for name in MODEL_OPTIONS},
            "composer": request.composer.key,
            "steering": None if request.steering is None else str(request.steering),
        }

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        if isinstance(composer := kwargs.get("composer"), Composer):
            kwargs["composer"] = composer.key
        # Two different models may have the same name, and a handle may resolve at one time and not at another.
        model = self._engine(kwargs.get("model")).fingerprint.id
        changes = None if self.store is None else self.store.changes
        return f"{super()._get_llm_string(stop, **kwargs)}---{model}---{changes}"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        model_name = str(kwargs.get("model", self.model_name))
        return LangSmithParams(**{**params, "ls_provider": PROVIDER, "ls_model_name": model_name})

    def _resolve_model_profile(self) -> ModelProfile:
        flags = dict.fromkeys(("text_inputs", "text_outputs", "tool_calling", "structured_output"), True)
        limit = None if self.engine is None else self.engine.max_positions
        if self.engine is None and self.base_url is None:  # A server would have to be asked.
            from kp_core.engines.hf.loading import positions

            limit = positions(self.model)
        return cast("ModelProfile", flags if limit is None else {**flags, "max_input_tokens": limit})

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` in the model's own tokenizer."""
        return [int(token) for token in self._engine().tokenizer.encode(text, add_special_tokens=False)]

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
    ) -> int:
        """Number of tokens that the model reads for `messages` and `tools`, as in `usage_metadata.input_tokens`.

        Messages that the chat template refuses, e.g. a part of a conversation, are counted as plain text.
        """
        if not messages:  # `trim_messages` asks for this.
            return 0
        shape, options = AnswerShape.of(_offer(tool) for tool in tools or ()), self._defaults()
        render = partial(self._engine().template.render, placement=options.placement)
        core_messages = to_messages(messages)
        # `trim_messages` also counts parts of conversations, from the last message on. Some templates refuse these.
        for ordered in (core_messages, core_messages[::-1]):
            with suppress(PromptError):
                return len(render(ordered, view=self._view(), shape=shape))
        calls = [json.dumps(message["tool_calls"]) for message in core_messages if "tool_calls" in message]
        texts = [turn.content for turn in to_turns(core_messages, self._view())]
        return sum(len(self.get_token_ids(text)) for text in (*texts, *calls))

    if not TYPE_CHECKING:  # LangChain's type of it is private.

        def bind(self, **kwargs: Any) -> Any:
            """The model with options for every call. Unknown options raise here, not at the first call."""
            self._request(None, kwargs)
            return super().bind(**kwargs)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with `tools` on offer.

        `tool_choice` is `"auto"` (default), `"any"`, `"required"` or `True` (a tool must be called), `"none"`, or the
        name of a tool; raises `PromptError` for others. `parallel_tool_calls` is by default only on with `"auto"`.
        """
        offered = [_offer(tool) for tool in tools]
        choice = core_choice(tool_choice)
        if offered or choice not in ("auto", "none"):
            # Two tools of one name are refused only when they are sent, as one may still be dropped.
            tools_by_name = {tool["function"]["name"]: tool for tool in offered}
            AnswerShape.of(list(tools_by_name.values()), choice)
        arguments = {"tools": offered, "tool_choice": choice, "parallel_tool_calls": parallel_tool_calls, **options}
        return self.bind(**{name: value for name, value in arguments.items() if value is not None})

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **options: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers of `schema`: a Pydantic class, a TypedDict, a JSON Schema or an OpenAI function.

        `function_calling` gives the arguments of a call, `json_schema` and `json_mode` the text. Schemas are always
        enforced, whatever `strict`. `include_raw` returns `{"raw", "parsed", "parsing_error"}`. Raises `PromptError`
        for other methods.
        """
        tool = _offer(schema)
        name, model_class = tool["function"]["name"], cast("type[BaseModel]", schema)
        is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
        options["ls_structured_output_format"] = {"kwargs": {"method": method}, "schema": tool}
        parser: BaseOutputParser[Any]
        model: Runnable[LanguageModelInput, AIMessage]
        if method in ("json_schema", "json_mode"):
            model = self.bind(response_format=schema, **options)
            parser = PydanticOutputParser(pydantic_object=model_class) if is_model else JsonOutputParser()
        elif method == "function_calling":
            model = self.bind_tools([schema], tool_choice=name, **options)
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            parser = PydanticToolsParser(tools=[model_class], first_tool_only=True) if is_model else parser
        else:
            raise PromptError(f"Got method={method!r}; expected 'json_schema', 'function_calling' or 'json_mode'.")
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        with overflows():
            generation = self._engine(model).generate(to_messages(messages), **request)
        return to_result(generation, model or self.model_name)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        with overflows(), closing(self._engine(model).stream(to_messages(messages), **request)) as stream:
            for delta in stream.deltas():
                chunk = to_chunk(delta)
                if run_manager:
                    run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk
            yield last_chunk(stream.result(), model or self.model_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        engine = await asyncio.to_thread(self._engine, model)
        with overflows():
            generation = await engine.agenerate(to_messages(messages), **request)
        return to_result(generation, model or self.model_name)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        engine = await asyncio.to_thread(self._engine, model)
        with overflows():
            async with aclosing(engine.astream(to_messages(messages), **request)) as stream:
                async for delta in stream.deltas():
                    chunk = to_chunk(delta)
                    if run_manager:
                        await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                    yield chunk
                if stream.generation is not None:
                    yield last_chunk(stream.generation, model or self.model_name)

    def _request(self, stop: list[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """The fields, overridden by the options of one call. Packs of both are used, the field's first."""
        options_given = self._asked(options, *_OF_LANGCHAIN)
        request = {name: value for name, value in options_given.items() if name not in _OF_LANGCHAIN}
        if options_given.get("response_format") is not None:
            request["response_schema"] = response_schema(options_given["response_format"])
        if "packs" in options:
            request["packs"] = (*(self.packs or ()), *request["packs"])
        return request if stop is None else {**request, "stop": stop}


def response_schema(response_format: Any) -> Mapping[str, Any] | bool:
    """The JSON Schema in a `response_format`: OpenAI's mapping, a Pydantic class, a TypedDict or a plain JSON Schema.

    `True` is any JSON object. Raises `PromptError` for anything else.
    """
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
        if kind == "json_object":
            return response_schema(response_format["schema"]) if response_format.get("schema") else True
        if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
            schema = response_format["json_schema"].get("schema")
            if isinstance(schema, Mapping):
                return schema
    try:
        # `strict` is OpenAI's switch; every schema is strict here.
        schema = {key: value for key, value in convert_to_json_schema(response_format).items() if key != "strict"}
        return {**schema, **_recursive(response_format)}
    except (TypeError, ValueError) as error:
        raise PromptError(
            f"Got response_format={response_format!r}; expected a Pydantic class, a TypedDict, a JSON Schema with a "
            "'title', or OpenAI's {'type': 'json_schema', 'json_schema': {'schema': ...}}."
        ) from error


def _offer(tool: Any) -> dict[str, Any]:
    """The form in which `tool` is offered: that of LangChain, with its `cache_control`. A class that holds itself keeps
    its schema.
    """
    offered = convert_to_openai_tool(tool)
    extras = tool if isinstance(tool, Mapping) else getattr(tool, "extras", None)
    if isinstance(extras, Mapping) and extras.get("cache_control"):
        offered["cache_control"] = True
    schema = create_schema_from_function("f", tool) if isfunction(tool) else getattr(tool, "tool_call_schema", tool)
    if parameters := _recursive(schema):
        offered["function"]["parameters"] = parameters
    return offered


def _recursive(schema: Any) -> dict[str, Any]:
    """The JSON Schema of a Pydantic class that holds itself, where LangChain writes `{}`; empty for all others."""
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return {}
    full = schema.model_json_schema()
    definitions = full.get("$defs", {})
    with suppress(CycleError):
        TopologicalSorter({name: _DEFINITION.findall(json.dumps(held)) for name, held in definitions.items()}).prepare()
        return {}
    root = definitions.get(full.pop("$ref", "").removeprefix("#/$defs/"), {})
    return {key: value for key, value in {**root, **full}.items() if key not in ("title", "description")}
