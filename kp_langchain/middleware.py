"""Agent memory at constant cost: what tools found becomes packs, and the prompt stays as long as it was."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain_core.messages import AnyMessage, BaseMessage, ToolMessage, get_buffer_string
from langgraph.runtime import Runtime

from kp_core import Session, find_handles, strip_handles
from kp_core.packs.view import Packs
from kp_langchain.chat_model import ChatKnowledgePacks

__all__ = ["KnowledgePackMiddleware", "PackState", "PackSummarizer"]


def _union(known: list[str], new: list[str]) -> list[str]:
    return list(dict.fromkeys((*known, *new)))


class PackState(AgentState[Any]):
    """An agent's state with the packs it has met."""

    packs: NotRequired[Annotated[list[str], _union]]
    """Handles, in order of first appearance; plain strings, so that any checkpointer keeps them."""


class KnowledgePackMiddleware(AgentMiddleware[PackState, Any, Any]):
    """Keeps what an agent's tools found as packs, and the prompt as long as it was.

    Handles in tool messages enter the state channel `packs` and stay there, whatever becomes of the messages. In what
    the model is sent, tool exchanges whose results are all handles are absorbed: of those that follow one message, the
    latest call stays, with one short line as its result that stands for all of them, and their packs stand at the end
    of that message. So the prompt of step 20 is as long as that of step 2, and a step computes only what is new. Packs
    whose messages are gone (summarised, or of another conversation) stand at the head of the system message; so do all
    of them with the model's `placement="system"`. The messages in the state are not touched: text and documents are
    still there.

    What stands in `packs` counts as brought by tools: a model whose `trusted_roles` lack `"tool"` does not use it.

    The agent's model must be a `ChatKnowledgePacks`; its `namespaces` say which handles count, others stay text.
    Raises `TypeError` for any other model.
    """

    state_schema = PackState

    def before_model(self, state: PackState, runtime: Runtime[Any]) -> dict[str, Any] | None:  # noqa: ARG002
        """Put the handles that tools brought into the state."""
        known = set(state.get("packs") or ())
        found = [handle for message in state["messages"] for handle in _handles(message)]
        new = [handle for handle in dict.fromkeys(found) if handle not in known]
        return {"packs": new} if new else None

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Send packs in place of what they hold."""
        return handler(_with_packs(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As `wrap_model_call`."""
        return await handler(_with_packs(request))


class PackSummarizer:
    """A `summarizer` for LangChain's `SummarizationMiddleware` that forgets nothing.

    The messages become one pack, and the summary is its handle, behind the handles that earlier summaries and tools
    brought. Packs go into `namespace`, compiled as memory of the system message.
    """

    def __init__(self, engine: Session, store: Packs, *, namespace: str = "default") -> None:
        self._engine, self._store, self._namespace = engine, store, namespace

    def __call__(self, messages: list[AnyMessage]) -> str:
        """The handles that stand for `messages`."""
        carried: dict[str, None] = {}
        spoken: list[BaseMessage] = []
        for message in messages:
            is_summary = message.additional_kwargs.get("lc_source") == "summarization"
            carried |= dict.fromkeys(_handles(message, brought=is_summary))
            text = strip_handles(message.text).strip()
            if text and not is_summary:
                spoken.append(message.model_copy(update={"content": text, "tool_calls": []}))
        if spoken:
            text = get_buffer_string(spoken)
            handle = self._store.put(self._engine.build_pack(text, namespace=self._namespace, compiled_for="system"))
            carried[str(handle)] = None
        return "\n".join(carried)


def _with_packs(request: ModelRequest[Any]) -> ModelRequest[Any]:
    model = request.model
    if not isinstance(model, ChatKnowledgePacks):
        raise TypeError(f"Got an agent on {type(model).__name__}; KnowledgePackMiddleware needs a ChatKnowledgePacks.")
    state: Any = request.state
    here = {handle for message in request.messages for handle in _handles(message)}
    # Anybody may write into a state; what is no handle is no pack.
    known = [handle for handle in state.get("packs") or () if isinstance(handle, str) and handle not in here]
    gone = [handle for handle in known if model.resolves(handle, "tool")]
    settings = {**model.remembering(), **request.model_settings, "compact": True}
    if gone:
        settings["packs"] = list(dict.fromkeys((*settings.get("packs", ()), *gone)))
    return request.override(model_settings=settings)


def _handles(message: AnyMessage, *, brought: bool = False) -> list[str]:
    """The handles in what a tool brought, or was otherwise `brought` by us."""
    ours = brought or isinstance(message, ToolMessage)
    return [str(handle) for _, _, handle in find_handles(message.text)] if ours else []
