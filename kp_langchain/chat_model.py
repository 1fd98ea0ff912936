"""`ChatKnowledgePacks`: an open-weight model behind LangChain's chat interface, with handles resolved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator

from kp_core import Handle, PackView, Session
from kp_core.bundled import BUNDLED_MODEL
from kp_core.engines.shared import shared_engine
from kp_core.errors import ToolError
from kp_core.packs.view import TRUSTED_ROLES, Packs
from kp_core.steering import as_steering
from kp_core.tools import AnswerShape
from kp_langchain.answers import PROVIDER, last_chunk, to_chunk, to_result
from kp_langchain.messages import core_role, to_messages
from kp_langchain.options import SAMPLING, core_choice, request_of
from kp_langchain.structured import answer_parser, call_parser, with_raw

__all__ = ["ChatKnowledgePacks"]


class ChatKnowledgePacks(BaseChatModel):
    """A chat model whose messages may hold handles; each is replaced by the knowledge of its pack.

    Give an `engine`, or the `model` (a Hugging Face id or folder; without either, the bundled SmolLM2-135M-Instruct)
    with `dtype` and `device`: it is loaded on first use, once per process. Handles resolve through `store`, in the
    `namespaces` named, from messages of `trusted_roles`; all others stay text and are logged. Options of a call
    (`temperature`, `max_tokens`, `packs`, `model`, ...) override the fields; unknown ones raise `TypeError`.

    Tools: forced calls, calls once begun, and structured output are held to their schema by a grammar, so they always
    parse. A schema that the grammar cannot express raises `ToolError`.

    Accounting: `usage_metadata.input_tokens` is what the messages sent. Tokens that packs delivered are not in it, so a
    summariser that watches it does not fire on knowledge. `input_token_details.cache_read` is how many of those were
    certainly reused. The full count of `kp_core.Usage` stands in `response_metadata["kp"]`.

    Raises `KnowledgePackError` and its kinds, as the engine does.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=())

    engine: Any = Field(default=None, exclude=True, repr=False)
    """A `kp_core.Engine`."""
    model: str | None = Field(default=None, alias="model_name")
    dtype: str | None = None
    device: str | None = None
    store: Packs | None = Field(default=None, exclude=True)
    namespaces: tuple[str, ...] = Field(default=(), validation_alias=AliasChoices("namespaces", "banks", "bank"))
    """Namespaces whose handles resolve; required with `store`. Also taken as `banks`, or one as `bank`."""
    packs: tuple[str, ...] = ()
    """Handles whose packs stand at the head of the system message in every call."""
    trusted_roles: frozenset[str] = TRUSTED_ROLES
    """Roles whose messages may bring packs; LangChain's names (`human`) and the core's (`user`) both do."""
    placement: Literal["in_place", "system"] = "in_place"
    """Where packs stand: where their handle stood, or at the head of the system message."""
    compact: bool = False
    """Whether tool exchanges that brought nothing but packs shrink to the latest call, so that prompts stay short."""
    mismatch: Literal["error", "rebuild"] = "error"
    thinking: bool | None = None
    steering: Any = Field(default=None, exclude=True, repr=False)
    """A `kp_core.Steering` as it is, or a pair of it and alpha; with an alpha of `None`, at its default strength."""
    scope: Literal["pack", "system", "prompt", "last_token"] | None = None
    """What is steered; by default the system head with the packs in it, or packs alone where some stand elsewhere."""
    temperature: float | None = None
    """0 or `None` is greedy."""
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = None
    """Seconds after which a call raises `GenerationTimeoutError`."""
    max_retries: int | None = None
    """Taken because LangChain's models take it; a model on this machine has nothing to retry."""
    streaming: bool = False

    @field_validator("namespaces", mode="before")
    @classmethod
    def _list_namespaces(cls, names: Any) -> Any:  # noqa: ANN401 - what a caller gave
        return (names,) if isinstance(names, str) else names

    @field_validator("steering")
    @classmethod
    def _check_steering(cls, steering: Any) -> Any:  # noqa: ANN401
        as_steering(steering)  # Refused here, not at the first call.
        return steering

    @field_validator("trusted_roles")
    @classmethod
    def _name_roles(cls, roles: frozenset[str]) -> frozenset[str]:
        return frozenset(core_role(role) for role in roles)

    @model_validator(mode="after")
    def _check_trust(self) -> Self:
        if (self.store is None) != (not self.namespaces):
            raise ValueError(
                f"Got store={self.store!r} and namespaces={self.namespaces!r}; expected both or neither. A handle "
                "resolves only in a namespace that the model is given, e.g. `namespaces=['default']`."
            )
        if self.engine is not None and (self.dtype or self.device):
            raise ValueError("Got an engine together with dtype or device; the engine has its own.")
        self._view()  # Namespaces are checked where they are made.
        return self

    @property
    def model_name(self) -> str:
        """What the model is called in metadata and traces."""
        return self.model or (BUNDLED_MODEL if self.engine is None else str(self.engine.name))

    @property
    def _llm_type(self) -> str:
        return "knowledge-packs"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "dtype": self.dtype,
            "store": None if self.store is None else str(getattr(self.store, "path", self.store)),
            "namespaces": list(self.namespaces),
            "packs": list(self.packs),
            "trusted_roles": sorted(self.trusted_roles),
            "placement": self.placement,
            "compact": self.compact,
            "thinking": self.thinking,
            # Part of the key under which LangChain caches answers.
            "steering": None if self.steering is None else str(self.steering),
            "scope": self.scope,
            "stop": self.stop,
            **{name: getattr(self, name) for name in SAMPLING},
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:  # noqa: ANN401
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = str(kwargs.get("model", self.model_name))
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        # `max_input_tokens` is known once there is a model; an id alone does not load one.
        known = {} if self.engine is None else {"max_input_tokens": self.engine.max_positions}
        return cast(
            "ModelProfile",
            {"text_inputs": True, "text_outputs": True, "tool_calling": True, "structured_output": True, **known},
        )

    def get_token_ids(self, text: str) -> list[int]:
        """The token ids of `text` under the model's own tokenizer."""
        return [int(token) for token in self._engine().tokenizer.encode(text, add_special_tokens=False)]

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
    ) -> int:
        """Tokens that `messages` and `tools` would send: as `usage_metadata.input_tokens`, so without packs."""
        shape = AnswerShape.of(convert_to_openai_tool(tool) for tool in tools or ())
        prompt = self._engine().template.render(
            to_messages(messages), view=self._view(), placement=self.placement, compact=self.compact, shape=shape
        )
        return int(len(prompt) - prompt.pack_tokens)

    def resolves(self, handle: str, role: str = "system") -> bool:
        """Whether `handle` stands for a pack that this model may use when a message of `role` brings it."""
        view = self._view()
        return view is not None and view.resolve(Handle.parse(handle), core_role(role)) is not None

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with `tools` on offer.

        `tool_choice`: `"auto"` (default), `"any"` or `"required"` or `True` (one must be called), `"none"`, or the name
        of the tool to call. `parallel_tool_calls` allows several calls in one answer; by default only with `"auto"`.
        Raises `ToolError` for a choice that names no tool.
        """
        offered = [convert_to_openai_tool(tool) for tool in tools]
        choice = core_choice(tool_choice)
        if offered or choice not in ("auto", "none"):
            # Two tools of one name are refused when they are sent, as either of them may still be dropped.
            named = {tool["function"]["name"]: tool for tool in offered}
            AnswerShape.of(list(named.values()), choice)
        bound = {"tools": offered, "tool_choice": choice, "parallel_tool_calls": parallel_tool_calls, **options}
        return self.bind(**{name: value for name, value in bound.items() if value is not None})

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,  # noqa: ARG002 - every schema is strict here
        **options: Any,  # noqa: ANN401
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers of `schema`: a Pydantic class, a TypedDict, a JSON Schema or an OpenAI function.

        All methods hold the answer to the schema by a grammar: `function_calling` as the arguments of a call,
        `json_schema` (default) and `json_mode` as the text. `strict` is taken for LangChain's sake: schemas are always
        enforced. `include_raw` gives `{"raw", "parsed", "parsing_error"}`.
        """
        about = {"kwargs": {"method": method}, "schema": convert_to_openai_tool(schema)}
        if method == "function_calling":
            name = about["schema"]["function"]["name"]
            model = self.bind_tools([schema], tool_choice=name, ls_structured_output_format=about, **options)
            parser = call_parser(schema, name)
        elif method in ("json_schema", "json_mode"):
            wanted = {"type": "json_object", "schema": schema} if method == "json_mode" else schema
            model = self.bind(response_format=wanted, ls_structured_output_format=about, **options)
            parser = answer_parser(schema)
        else:
            raise ToolError(f"Got method={method!r}; expected 'json_schema', 'function_calling' or 'json_mode'.")
        return with_raw(model, parser) if include_raw else model | parser

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResult:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        return to_result(self._engine(model).generate(to_messages(messages), **request), model or self.model_name)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Iterator[ChatGenerationChunk]:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        stream = self._engine(model).stream(to_messages(messages), **request)
        try:
            for delta in stream.deltas():
                chunk = to_chunk(delta)
                if run_manager:
                    run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk
            yield last_chunk(stream.result(), model or self.model_name)
        finally:
            stream.close()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResult:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        engine = await asyncio.to_thread(self._engine, model)
        return to_result(await engine.agenerate(to_messages(messages), **request), model or self.model_name)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> AsyncIterator[ChatGenerationChunk]:
        request, model = self._request(stop, kwargs), kwargs.get("model")
        engine = await asyncio.to_thread(self._engine, model)
        stream = engine.astream(to_messages(messages), **request)
        try:
            async for delta in stream.deltas():
                chunk = to_chunk(delta)
                if run_manager:
                    await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk
            if stream.generation is not None:
                yield last_chunk(stream.generation, model or self.model_name)
        finally:
            await stream.aclose()

    def _engine(self, model: str | None = None) -> Session:
        if self.engine is not None and model in (None, self.model_name):
            return cast("Session", self.engine)
        return shared_engine(model or self.model, self.dtype, self.device)

    def _view(self) -> PackView | None:
        if self.store is None:
            return None
        return self.store.view(*self.namespaces, trusted_roles=self.trusted_roles)

    def _request(self, stop: list[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """The fields, overridden by the options of one call."""
        settings: dict[str, Any] = {
            "view": self._view(),
            "packs": self.packs,
            "placement": self.placement,
            "compact": self.compact,
            "mismatch": self.mismatch,
            "thinking": self.thinking,
            "steering": self.steering,
            "scope": self.scope,
            "stop": tuple((self.stop if stop is None else stop) or ()),
            **{name: getattr(self, name) for name in SAMPLING},
        }
        return request_of(settings, options)
