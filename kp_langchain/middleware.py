"""Agent memory at constant cost: tool results become packs, and the prompt does not grow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain_core.messages import AnyMessage, ToolMessage, get_buffer_string
from langgraph.runtime import Runtime

from kp_core import Session, find_handles, strip_handles
from kp_core.engines.shared import session_of
from kp_core.errors import OptionError
from kp_core.packs.handle import check_namespace
from kp_core.packs.store import open_packs
from kp_core.packs.view import Packs
from kp_langchain.chat_model import ChatKnowledgePacks

__all__ = ["KnowledgePackMiddleware", "PackState", "PackSummarizer"]


def _union(known: list[str], new: list[str]) -> list[str]:
    return list(dict.fromkeys((*known, *new)))


class PackState(AgentState[Any]):
    """An agent's state with the packs it has met."""

    packs: NotRequired[Annotated[list[str], _union]]
    """Handles, in order of first appearance. They are plain strings, so that any checkpointer can save them."""


class KnowledgePackMiddleware(AgentMiddleware[PackState, Any, Any]):
    """Keeps the results of an agent's tools as packs, so that the prompt does not grow.

    Handles in tool messages enter the state channel `packs` and stay there, whatever becomes of the messages. The model
    is called with `compact` (see `kp_core.Request`): of tool exchanges that brought only handles the latest call stays,
    so the prompt of step 20 is as long as that of step 2. Packs whose messages are gone (summarised, or of another
    conversation) stand at the start of the system message.

    Handles in `packs` count as brought by tools: a model whose `trusted_roles` lack `"tool"` does not use them. A model
    other than a `ChatKnowledgePacks` raises `TypeError`.
    """

    state_schema = PackState

    def before_model(self, state: PackState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Add the handles in tool messages to the state."""
        handles = dict.fromkeys(handle for message in state["messages"] for handle in _handles(message))
        new_handles = [handle for handle in handles if handle not in (state.get("packs") or ())]
        return {"packs": new_handles} if new_handles else None

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model with packs in place of tool results."""
        return handler(_with_packs(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As `wrap_model_call`."""
        return await handler(_with_packs(request))


class PackSummarizer:
    """A `summarizer` for LangChain's `SummarizationMiddleware` that needs no model: the words themselves, as one pack.

    The summary is the handle of a pack that replaces the messages: what was said, from the newest word back,
    `max_tokens` tokens at most, and the earlier summary before it. Packs that tools brought are left out, so that the
    prompt has room; they can be searched for again. Packs go into `namespace`, compiled for the system message.

    Raises `OptionError` for `max_tokens` below 1.
    """

    def __init__(
        self, engine: Session, store: Packs | str, *, namespace: str = "default", max_tokens: int = 1000
    ) -> None:
        self._engine, self._store, self._namespace = session_of(engine), open_packs(store), check_namespace(namespace)
        if max_tokens < 1:
            raise OptionError(f"Got max_tokens={max_tokens}; expected a number from 1 on.")
        self._max_tokens = max_tokens

    def __call__(self, messages: list[AnyMessage]) -> str:
        """The handle that stands for `messages`; empty if nothing was said."""
        parts = list[str]()
        for message in messages:
            if message.additional_kwargs.get("lc_source") == "summarization":
                handles = (handle for *_, handle in find_handles(message.text) if handle.namespace == self._namespace)
                parts += [pack.text for handle in handles if (pack := self._store.peek(handle))]
            elif text := strip_handles(message.text).strip():
                parts.append(get_buffer_string([message.model_copy(update={"content": text, "tool_calls": []})]))
        tokenizer = self._engine.tokenizer
        ids = tokenizer.encode("\n".join(parts), add_special_tokens=False)[-self._max_tokens :]
        if not ids:
            return ""
        text = tokenizer.decode(ids)
        return str(self._store.put(self._engine.build_pack(text, namespace=self._namespace, compiled_for="system")))


def _with_packs(request: ModelRequest[Any]) -> ModelRequest[Any]:
    model = request.model
    if not isinstance(model, ChatKnowledgePacks):
        raise TypeError(f"Got an agent on {type(model).__name__}; KnowledgePackMiddleware needs a ChatKnowledgePacks.")
    state: Any = request.state
    # A handle in a summary, or in a message of the user, brings its pack there.
    named = [(handle, message.type) for message in request.messages for handle in _handles(message, brought=True)]
    listed = {handle for handle, role in named if model.resolves(handle, role)}
    # Anybody may write into a state; only handles that resolve are used.
    candidates = [handle for handle in state.get("packs") or () if isinstance(handle, str) and handle not in listed]
    readable = [handle for handle in candidates if model.resolves(handle, "tool")]
    settings = {**model.remembering(), **request.model_settings, "compact": True}
    if readable:
        settings["packs"] = list(dict.fromkeys((*settings.get("packs", ()), *readable)))
    return request.override(model_settings=settings)


def _handles(message: AnyMessage, *, brought: bool = False) -> list[str]:
    """The handles in a tool message, or in any message if it is `brought` by us."""
    has_packs = brought or isinstance(message, ToolMessage)
    return [str(handle) for _, _, handle in find_handles(message.text)] if has_packs else []
