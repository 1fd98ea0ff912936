"""Agents whose tool results are packs: the prompt of a text agent, bounded, with what left it still to be found."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired, cast

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse, ToolCallRequest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    get_buffer_string,
)
from langchain_core.runnables import RunnableBinding
from langgraph.runtime import Runtime
from langgraph.types import Command

from kp_core import FactStore, Handle, Session, find_handles, strip_handles
from kp_core.engines.shared import session_of
from kp_core.errors import OptionError
from kp_core.events import warn_once
from kp_core.packs.handle import check_namespace
from kp_core.packs.store import open_packs
from kp_core.packs.view import PackRef, Packs, PackView
from kp_core.plan.composer import composer_of
from kp_core.settings import core_role
from kp_langchain.chat_model import ChatKnowledgePacks
from kp_langchain.messages import as_sent, texts_in, with_texts
from kp_methods.recall import recalled, remember

logger = logging.getLogger(__name__)

_START = HumanMessage("?")
_LEFT = HumanMessage("(Earlier messages have left this conversation. What was found earlier can be searched again.)")
_TOO_LONG = "(This result has {} tokens, more than the {} that fit here. Ask for less.)"
_MORE = "(More was found than fits here. Ask for less.)"
_LEFT_OUT = (
    "A tool result of %s tokens does not go to the model whole: %s are left for it. Let the tool find less, or set a "
    "higher `memory_tokens` or a lower `max_tokens`."
)
_REPEATED = (
    "You have called {} with the same arguments three times in a row, so it was not called again. Use the result "
    "above, call it with other arguments, or answer."
)
_MOST_TOKENS = 512  # Of an answer without `max_tokens`, as in a request.
_REPEATS = 3
_FOUND = "knowledge_packs_found"  # Key in the additional arguments of an answer.
_REMEMBERED = 65_536  # Sizes of messages, and results that have left.


def _union(known: list[str], new: list[str]) -> list[str]:
    lists = [names for names in (known, new) if isinstance(names, list)]  # Anybody may write a state.
    return list(dict.fromkeys(name for names in lists for name in names if isinstance(name, str)))


class PackState(AgentState[Any]):
    """An agent's state with the packs it has met."""

    packs: NotRequired[Annotated[list[str], _union]]
    """Handles, in order of first appearance. They are plain strings, so that any checkpointer can save them."""


class KnowledgePackMiddleware(AgentMiddleware[PackState, Any, Any]):
    """Keeps an agent's prompt that of the same agent with text, and within bounds.

    The prompt is the conversation with packs in place of results, token for token. The messages behind the head (system
    message and tools) take at most `memory_tokens` tokens, packs counted, or this share of what head and `max_tokens`
    leave of the window, if the newest message of the user leaves room for it. Beyond, the oldest exchanges (a call and
    its results) and messages leave the prompt in one block, down to half, so that its beginning stays cached between
    blocks; one line says that earlier results can be searched again. Of a result that is too long alone the first packs
    that fit stay, and a line says so to the model, a warning to you. The state keeps all messages.
    `memory_tokens=None` leaves this to a summariser.

    The state channel `packs` lists the handles in results, whatever becomes of the messages. With `memory="search"`,
    the newest message of the user is searched for among the packs that have left: facts of `facts`, and documents of a
    vector store of your own (`from_retriever`). At most two, those that the model attends to, stand before it. They
    stay there until it leaves: the model's answer notes them. Results that are plain text are added to `facts` when
    they leave: in `keep_in`, or the model's only namespace.

    Where a middleware in front forces a call (`tool_choice`), structured output of the agent waits for the next step.

    The messages hold the texts of packs, so that another model (a router's, a fallback's) can read them; a
    `ChatKnowledgePacks` still gets the handles. If a middleware in front chooses another model, packs and bounds are
    those of `model`.

    Raises `OptionError` for bad settings, and for handles on their way to another model without `model`.
    """

    state_schema = PackState

    def __init__(
        self,
        *,
        memory_tokens: float | None = 0.75,
        memory: Literal["search"] | None = None,
        facts: FactStore | None = None,
        model: ChatKnowledgePacks | None = None,
    ) -> None:
        super().__init__()
        is_share = isinstance(memory_tokens, float) and 0 < memory_tokens <= 1
        if not (is_share or memory_tokens is None or (isinstance(memory_tokens, int) and memory_tokens > 0)):
            raise OptionError(
                f"Got memory_tokens={memory_tokens!r}; expected an int from 1 on, a share up to 1.0, or None."
            )
        if memory not in (None, "search") or (memory is None) != (facts is None):
            raise OptionError(
                f"Got memory={memory!r} and facts={facts!r}; expected memory='search' with the store of the facts that "
                "the tools find, or neither."
            )
        self._most, self._facts, self._model = memory_tokens, facts, model
        self._sizes, self._packs = dict[int, int](), dict[int, list[Handle]]()

    def before_model(self, state: PackState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Add the handles in tool messages to the state."""
        texts = [
            text for message in state["messages"] if isinstance(message, ToolMessage) for text in texts_in(message)
        ]
        handles = dict.fromkeys(str(handle) for text in texts for *_, handle in find_handles(text))
        new_handles = [handle for handle in handles if handle not in (state.get("packs") or ())]
        return {"packs": new_handles} if new_handles else None

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model with the messages that stay."""
        prepared, found = self._prepared(request)
        return self._noted(handler(prepared), found)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As `wrap_model_call`."""
        prepared, found = await asyncio.to_thread(self._prepared, request)
        return self._noted(await handler(prepared), found)

    def _noted(self, response: ModelResponse[Any], found: Sequence[Handle]) -> ModelResponse[Any]:
        """The response whose message notes what was found, so that it stays where it stood."""
        if self._facts is None or not response.result:
            return response
        first, *others = response.result
        noted = {**first.additional_kwargs, _FOUND: [*map(str, found)]}
        return replace(response, result=[first.model_copy(update={"additional_kwargs": noted}), *others])

    def _prepared(self, request: ModelRequest[Any]) -> tuple[ModelRequest[Any], list[Handle]]:
        """The request with the messages that stay, which any model can read, and what was found for the newest one."""
        bound: Any = request.model
        asked: Any = bound.bound if isinstance(bound, RunnableBinding) else bound
        is_ours = isinstance(asked, ChatKnowledgePacks)
        model: ChatKnowledgePacks | None = asked if is_ours else self._model
        is_called = request.tool_choice not in (None, "auto", "none")
        if is_ours and is_called and not isinstance(request.response_format, ToolStrategy):
            request = request.override(response_format=None)  # A call or an object: LangChain would drop the choice.
        system = [request.system_message] if request.system_message else []
        if model is None:
            if any(find_handles(text) for message in (*system, *request.messages) for text in texts_in(message)):
                raise OptionError(
                    f"Got handles for a {type(request.model).__name__}, which cannot read them. Say of which "
                    "ChatKnowledgePacks they are: `KnowledgePackMiddleware(model=...)`; or put this middleware in "
                    "front of the one that chooses the model."
                )
            return request, []
        view = model._view()  # noqa: SLF001 - one of ours
        messages, found = self._bounded(request, model)
        if is_ours:  # A copy, because a middleware behind may give `model_settings` to another model.
            ours = model.model_copy(update=model.remembering())
            bound = ours if bound is asked else bound.model_copy(update={"bound": ours})
        request = request.override(
            model=bound,
            system_message=with_texts(system[0], view) if system else None,
            messages=[with_texts(message, view) for message in messages],
        )
        return request, found

    def _bounded(self, request: ModelRequest[Any], model: ChatKnowledgePacks) -> tuple[list[AnyMessage], list[Handle]]:
        """The messages that stay, with what was found of those that have left, and what of it for the newest one."""
        if self._most is None:
            return request.messages, []
        settings = request.model_settings
        session, view = model.reading()
        given = (*(model.packs or ()), *(settings.get("packs") or ()))
        packs = [str(pack) for pack in given if isinstance(pack, str | Handle)]
        system = [*map(SystemMessage, packs), *([request.system_message] if request.system_message else [])]
        tools = [*request.tools, *_schemas(request.response_format)]
        head = model.get_num_tokens_from_messages([*system, _START], tools)
        answer = settings.get("max_tokens") or model.max_tokens or min(_MOST_TOKENS, session.max_positions // 2)
        room = max(0, session.max_positions - head - answer)
        is_share = isinstance(self._most, float)
        room = room if is_share else min(int(self._most), room)
        most = int(self._most * room) if is_share else room
        for_found = 0 if self._facts is None else most // 4
        kept, left, found = self._split(request.messages, model, most - for_found - self._size([_LEFT], model), room)
        if found is None:
            found = self._found(kept, left, request, model, for_found)
        if found:
            asked = max(at for at, message in enumerate(kept) if isinstance(message, HumanMessage))
            kept[asked : asked + 1] = _beside(kept[asked : asked + 1], found, view)
        if left:
            kept.insert(next((at for at, message in enumerate(kept) if message.type != "system"), len(kept)), _LEFT)
        return kept, found

    def _split(
        self, messages: Sequence[AnyMessage], model: ChatKnowledgePacks, most: int, room: int
    ) -> tuple[list[AnyMessage], list[AnyMessage], list[Handle] | None]:
        """The messages that stay in the prompt, those that have left it, and what was found for the newest of the user;
        `None` if it must be searched for (again).

        Told step by step from the first message on, so that each call of the model sees the blocks of the one before.
        """
        groups = list[list[AnyMessage]]()  # A message, with the results of its calls.
        for message in messages:
            if isinstance(message, ToolMessage) and groups:
                groups[-1].append(message)
            else:
                groups.append([message])
        whole = [*groups]
        sizes, beside, asked = dict[int, int](), dict[int, list[Handle]](), -1  # Of the groups that stay.
        found, is_current, view = list[Handle](), False, model.reading()[1]
        for at, group in enumerate(groups):
            if isinstance(group[0], HumanMessage):
                if found:
                    beside[asked], sizes[asked] = found, self._size(groups[asked], model, found)
                asked, found, is_current = at, [], False
            elif self._facts is not None and asked >= 0 and _FOUND in group[0].additional_kwargs:
                noted = group[0].additional_kwargs[_FOUND]
                found, is_current = [handle for *_, handle in find_handles(str(noted))], True
            newest = sizes.get(asked, 0)
            limit = most if 2 * newest <= most else max(most, (room + newest) // 2)
            groups[at] = self._shortened(group, model, limit - newest)
            sizes[at] = self._size(groups[at], model)
            is_current = is_current and groups[at] is group
            if sum(sizes.values()) > limit:
                for oldest in [each for each in sizes if each not in (at, asked) and groups[each][0].type != "system"]:
                    # An answer without its question would seem to be one to `_LEFT`.
                    is_answer = isinstance(groups[oldest][0], AIMessage) and len(groups[oldest]) == 1
                    if sum(sizes.values()) <= limit // 2 and not is_answer:
                        break
                    del sizes[oldest]
                    is_current = False
        kept = [message for at in sizes for message in _beside(groups[at], beside.get(at, ()), view)]
        left = [message for at, group in enumerate(whole) if at not in sizes for message in group]
        return kept, left, found if is_current else None

    def _shortened(self, group: list[AnyMessage], model: ChatKnowledgePacks, room: int) -> list[AnyMessage]:
        """`group` with a line in place of each result that is too long, if it has more than `room` tokens."""
        results = [message for message in group if isinstance(message, ToolMessage)]
        if not results or self._size(group, model) <= room:
            return group
        most = max(0, room - self._size(group[:1], model)) // len(results)
        shortened = [
            self._first(message, model, most) if isinstance(message, ToolMessage) else message for message in group
        ]
        return group if all(map(operator.is_, shortened, group)) else shortened

    def _first(self, result: ToolMessage, model: ChatKnowledgePacks, most: int) -> ToolMessage:
        """`result` with as many of its packs, from the first on, as take `most` tokens in all, and a line that says so.

        Of packs among which the composer selects, the largest that it can select count.
        """
        size, text = self._size([result], model), result.text
        handles = find_handles(text) if isinstance(result.content, str) else []
        composer = composer_of(model.composer) if isinstance(model.composer, str) else model.composer
        if composer is not None and (reads := composer.most) is not None and len(handles) > reads:
            sizes = [self._size([_with_content(result, str(handle))], model) for *_, handle in handles]
            size = sum(sorted(sizes)[-reads:]) + self._size([_with_content(result, strip_handles(text))], model)
        if size <= most:
            return result
        warn_once(logger, _LEFT_OUT, str(size), str(most))
        for _, end, _ in reversed(handles[:-1]):
            part = _with_content(result, f"{text[:end]}\n{_MORE}")
            if self._size([part], model) <= most:
                return part
        return _with_content(result, _TOO_LONG.format(size, most))

    def _size(self, messages: Sequence[AnyMessage], model: ChatKnowledgePacks, found: Sequence[Handle] = ()) -> int:
        """The tokens of `messages` in a conversation, with `found` before the first.

        All packs count: what a composer leaves out is known too late.
        """
        said = [(message.type, message.text, repr(getattr(message, "tool_calls", ""))) for message in messages]
        key = hash((model.model_name, *model.namespaces, *said, *found))
        if key not in self._sizes:
            read = map(_text_alone, _beside(messages, found, model.reading()[1]))
            count = model.get_num_tokens_from_messages
            _note(self._sizes, key, count([_START, *read]) - count([_START]))
        return self._sizes[key]

    def _found(
        self,
        kept: Sequence[AnyMessage],
        left: Sequence[AnyMessage],
        request: ModelRequest[Any],
        model: ChatKnowledgePacks,
        room: int,
    ) -> list[Handle]:
        """What is found for the newest message of the user. Results of no fact that left become facts."""
        facts, state = self._facts, cast("Any", request.state)
        session, view = model.reading()
        asked = [message for message in kept if isinstance(message, HumanMessage)][-1:]
        question = _words(asked[0]) if asked else ""
        if view is None or facts is None or "tool" not in view.trusted_roles or not question:
            return []
        only = next(iter(view.namespaces)) if len(view.namespaces) == 1 else None
        namespace = str(request.model_settings.get("keep_in") or model.keep_in or only)
        if namespace not in view.namespaces:
            raise OptionError(f"Got keep_in={namespace!r}; expected one of {', '.join(sorted(view.namespaces))}.")
        named = [name for name in state.get("packs") or () if isinstance(name, str)]
        gone = dict.fromkeys(handle for name in named for *_, handle in find_handles(name))
        for message in left:
            key = hash((namespace, message.text))
            if isinstance(message, ToolMessage) and message.status != "error" and key not in self._packs:
                found = _packs_in(message, view)
                texts = [text] if (text := _words(message)) and not found else []
                _note(self._packs, key, found or remember(texts, facts, session, view.source, namespace))
            gone |= dict.fromkeys(self._packs.get(key, ()))
        here = {handle for message in kept for handle in _packs_in(message, view)}
        packs = recalled(question, [each for each in gone if each not in here], facts, session, view, room=room)
        return [Handle.parse(pack.handle) for pack in packs]


class RepeatedCallMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Answers the third identical call in a row, since the last message of the user, with a result that says so.

    A small model that repeats a call gets the same result, and so repeats it again. Not for a tool that gives something
    else each time it is called.
    """

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Run the call unless it is repeated."""
        return _refusal(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """As `wrap_tool_call`."""
        return _refusal(request) or await handler(request)


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
            elif text := _words(message):
                parts.append(get_buffer_string([message.model_copy(update={"content": text, "tool_calls": []})]))
        tokenizer = self._engine.tokenizer
        ids = tokenizer.encode("\n".join(parts), add_special_tokens=False)[-self._max_tokens :]
        if not ids:
            return ""
        text = tokenizer.decode(ids)
        return str(self._store.put(self._engine.build_pack(text, namespace=self._namespace, compiled_for="system")))


def _note(known: dict[int, Any], key: int, value: object) -> None:
    """Note `value`, and forget the others if they are too many."""
    if len(known) >= _REMEMBERED:
        known.clear()
    known[key] = value


def _packs_in(message: AnyMessage, view: PackView) -> list[Handle]:
    """The packs that a message brings."""
    parts = (part for text in texts_in(message) for part in view.split(text, core_role(message.type)))
    return [*as_sent(message)[1], *(Handle.parse(part.handle) for part in parts if isinstance(part, PackRef))]


def _words(message: AnyMessage) -> str:
    """The text of `message` without handles."""
    return "".join(map(strip_handles, texts_in(message))).strip()


def _text_alone(message: AnyMessage) -> AnyMessage:
    """`message` without images and the like, which another model may read."""
    if isinstance(message.content, str):
        return message
    blocks = [block for block in message.content if isinstance(block, str) or block.get("type") == "text"]
    return message.model_copy(update={"content": blocks})


def _with_content(message: ToolMessage, content: str) -> ToolMessage:
    return message.model_copy(update={"content": content})


def _schemas(response_format: Any) -> Iterator[dict[str, Any]]:
    """The schemas of structured output, as the tools that they are, or nearly."""
    if isinstance(response_format, AutoStrategy):  # What a bare schema becomes.
        response_format = ToolStrategy(response_format.schema)
    is_tool, is_native = isinstance(response_format, ToolStrategy), isinstance(response_format, ProviderStrategy)
    for spec in response_format.schema_specs if is_tool else [response_format.schema_spec] if is_native else []:
        function = {"name": spec.name, "description": spec.description, "parameters": spec.json_schema}
        yield {"type": "function", "function": function}


def _beside(messages: Sequence[AnyMessage], handles: Sequence[Handle], view: PackView | None) -> Sequence[AnyMessage]:
    """`messages`, with packs before the first."""
    return [with_texts(messages[0], view, handles), *messages[1:]] if handles else messages


def _refusal(request: ToolCallRequest) -> ToolMessage | None:
    call, calls = request.tool_call, list[tuple[str, Any]]()
    for message in request.state["messages"]:
        calls = [] if isinstance(message, HumanMessage) else calls
        for made in message.tool_calls if isinstance(message, AIMessage) else ():
            calls.append((made["name"], made["args"]))
            if made["id"] == call["id"]:
                break
    same = [(call["name"], call["args"])] * _REPEATS
    if calls[-_REPEATS:] != same:
        return None
    said = _REPEATED.format(call["name"])
    return ToolMessage(said, tool_call_id=call["id"], name=call["name"], status="error")
