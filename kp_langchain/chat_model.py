"""`ChatKnowledgePacks`: an open-weight model behind LangChain's chat interface, with handles resolved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, field_validator, model_validator

import kp_core
from kp_core import Engine, Generation, PackStore, PackView, Request
from kp_core.resolve import TRUSTED_ROLES
from kp_langchain.messages import core_role, to_messages

__all__ = ["ChatKnowledgePacks", "shared_engine"]

_PROVIDER = "knowledge_packs"
_BUNDLED = "SmolLM2-135M-Instruct"
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")
_PER_CALL = (*_SAMPLING, "placement", "foreign", "thinking", "packs", "reuse", "deterministic")

_engines: dict[tuple[str | None, str | None, str | None], Engine] = {}
_loading = threading.Lock()


def shared_engine(model: str | None = None, dtype: str | None = None, device: str | None = None) -> Engine:
    """The engine this process keeps for `(model, dtype, device)`, loaded when it is first asked for."""
    key = (model, dtype, device)
    with _loading:
        if key not in _engines:
            _engines[key] = kp_core.load_engine(model, dtype=dtype, device=device)
        return _engines[key]


class ChatKnowledgePacks(BaseChatModel):
    """A chat model whose messages may hold handles; each is replaced by the knowledge of its pack.

    Give an `engine`, or the `model` (a Hugging Face id or folder; without either, the bundled SmolLM2-135M-Instruct)
    with `dtype` and `device`: it is loaded on first use, once per process. Handles resolve through `store`, in the
    `namespaces` named, from messages of `trusted_roles`; all others stay text and are logged. Options of a call
    (`temperature`, `max_tokens`, `packs`, ...) override the fields; unknown ones raise `TypeError`.

    Accounting: `usage_metadata.input_tokens` is what the messages sent. Tokens that packs delivered are not in it, so a
    summariser that watches it does not fire on knowledge. `input_token_details.cache_read` is how many of those were
    certainly reused. The full count of `kp_core.Usage` stands in `response_metadata["kp"]`.

    Raises `KnowledgePackError` and its kinds, as the engine does. Tools and structured output are not supported.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=())

    engine: Any = Field(default=None, exclude=True, repr=False)
    """A `kp_core.Engine`."""
    model: str | None = Field(default=None, alias="model_name")
    dtype: str | None = None
    device: str | None = None
    store: PackStore | None = Field(default=None, exclude=True)
    namespaces: tuple[str, ...] = ()
    """Namespaces whose handles resolve; required with `store`."""
    trusted_roles: frozenset[str] = TRUSTED_ROLES
    """Roles whose messages may bring packs; LangChain's names (`human`) and the core's (`user`) both do."""
    placement: Literal["in_place", "system"] = "in_place"
    """Where packs stand: where their handle stood, or at the head of the system message."""
    foreign: Literal["error", "rebuild"] = "error"
    thinking: bool | None = None
    temperature: float | None = None
    """0 or `None` is greedy."""
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    streaming: bool = False

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
        return self.model or (_BUNDLED if self.engine is None else str(getattr(self.engine, "name", _PROVIDER)))

    @property
    def _llm_type(self) -> str:
        return "knowledge-packs"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "dtype": self.dtype,
            "store": None if self.store is None else str(self.store.path),
            "namespaces": list(self.namespaces),
            "trusted_roles": sorted(self.trusted_roles),
            "placement": self.placement,
            "thinking": self.thinking,
            "stop": self.stop,
            **{name: getattr(self, name) for name in _SAMPLING},
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:  # noqa: ANN401
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = _PROVIDER
        params["ls_model_name"] = str(kwargs.get("model", self.model_name))
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """The token ids of `text` under the model's own tokenizer."""
        return [int(token) for token in self._engine().tokenizer.encode(text, add_special_tokens=False)]

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
    ) -> int:
        """Tokens that `messages` would send: as `usage_metadata.input_tokens`, so without packs."""
        if tools:
            raise NotImplementedError("Tools are not supported.")
        prompt = self._engine().template.render(to_messages(messages), view=self._view(), placement=self.placement)
        return int(len(prompt) - prompt.pack_tokens)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResult:
        request = self._request(stop, kwargs)
        return self._result(self._engine().generate(to_messages(messages), **request))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(stop, kwargs)
        stream = self._engine().stream(to_messages(messages), **request)
        try:
            for piece in stream:
                chunk = _chunk(piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield self._last_chunk(stream.result())
        finally:
            stream.close()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResult:
        request = self._request(stop, kwargs)
        engine = await asyncio.to_thread(self._engine)
        return self._result(await engine.agenerate(to_messages(messages), **request))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> AsyncIterator[ChatGenerationChunk]:
        # The event tells the engine to stop, however this generator is left.
        cancel = threading.Event()
        request = self._request(stop, kwargs)
        request["cancel"] = cancel
        engine = await asyncio.to_thread(self._engine)
        stream = engine.astream(to_messages(messages), **request)
        try:
            async for piece in stream:
                chunk = _chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            if stream.generation is not None:
                yield self._last_chunk(stream.generation)
        finally:
            cancel.set()
            # A step that is still under way in its thread ends by the event and closes the stream itself.
            with suppress(ValueError):
                await stream.aclose()

    def _engine(self) -> Any:  # noqa: ANN401 - an `Engine`, and its tokenizer
        return self.engine if self.engine is not None else shared_engine(self.model, self.dtype, self.device)

    def _view(self) -> PackView | None:
        if self.store is None:
            return None
        return self.store.view(*self.namespaces, trusted_roles=self.trusted_roles)

    def _request(self, stop: list[str] | None, options: Mapping[str, Any]) -> Request:
        """The fields, overridden by the options of one call."""
        unknown = sorted(set(options) - set(_PER_CALL))
        if unknown:
            raise TypeError(f"Got the options {', '.join(unknown)}; expected some of {', '.join(_PER_CALL)}, stop.")
        request: dict[str, Any] = {
            "view": self._view(),
            "placement": self.placement,
            "foreign": self.foreign,
            "thinking": self.thinking,
            "stop": tuple((self.stop if stop is None else stop) or ()),
            **{name: getattr(self, name) for name in _SAMPLING},
            **options,
        }
        return cast("Request", {name: value for name, value in request.items() if value is not None})

    def _result(self, generation: Generation) -> ChatResult:
        message = AIMessage(
            generation.text,
            usage_metadata=_usage_metadata(generation),
            response_metadata=self._response_metadata(generation),
        )
        about = {"finish_reason": generation.finish_reason}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=about)])

    def _last_chunk(self, generation: Generation) -> ChatGenerationChunk:
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage_metadata(generation),
            response_metadata=self._response_metadata(generation),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message, generation_info={"finish_reason": generation.finish_reason})

    def _response_metadata(self, generation: Generation) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "model_provider": _PROVIDER,
            "finish_reason": generation.finish_reason,
            "kp": generation.usage.to_dict(),
        }


def _chunk(piece: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=piece))


def _usage_metadata(generation: Generation) -> UsageMetadata:
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=max(0, usage.reused_tokens - usage.pack_tokens)),
    )
