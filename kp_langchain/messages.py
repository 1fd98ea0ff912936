"""LangChain's messages and prompts in the form that the core takes, and the engine's answers in LangChain's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from langchain_core import exceptions
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, HumanMessage, ToolMessage
from langchain_core.messages import tool as tool_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from kp_core import Delta, Generation, Handle, TokenLogprob, Usage, errors
from kp_core.errors import PromptError
from kp_core.packs.handle import find_handles, inert, strip_handles
from kp_core.packs.view import PackRef, PackView
from kp_core.prompt.conversation import GAP, Message, is_marked, slotted, texts_of, tool_call
from kp_core.settings import core_role

PROVIDER = "knowledge_packs"
_SENT = "knowledge_packs_sent"
"""Key in the additional arguments of a message: its content with handles, the content that has texts instead, and the
handles of the packs before it. A tuple, which no JSON brings."""
AnyOf = TypeVar("AnyOf", bound=BaseMessage)


class ContextOverflowError(errors.ContextOverflowError, exceptions.ContextOverflowError):
    """The core's error as LangChain's of that name, for which its middlewares look."""


@contextmanager
def overflows() -> Iterator[None]:
    """Raise the core's `ContextOverflowError` as one that is also LangChain's."""
    try:
        yield
    except errors.ContextOverflowError as error:
        raise ContextOverflowError(error.prompt_tokens, error.max_tokens, error.limit) from error


def to_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """LangChain messages as dictionaries with `role`, `content`, and for tools `tool_calls`, `tool_call_id`, `name`.

    Text blocks are joined, and other blocks left out, as `kp_core.prompt.conversation.text_of` states. Tool calls whose
    arguments did not parse are left out, as no template could show them. Raises `PromptError` for images, audio and
    files, and for messages of other roles.
    """
    converted = []
    for message in messages:
        kind = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
        role = core_role(kind)
        if role not in ("system", "user", "assistant", "tool"):
            raise PromptError(f"Got a {type(message).__name__} ({role}); expected a system, human, AI or tool message.")
        content, before = as_sent(message)
        sent = {"role": role, "content": content}
        calls = message.tool_calls if isinstance(message, AIMessage) else ()
        more = {
            "cache_control": is_marked(sent),
            "tool_calls": [tool_call(call["name"], call["args"], call.get("id")) for call in calls],
            "tool_call_id": message.tool_call_id if isinstance(message, ToolMessage) else None,
            "name": message.name,
            "before": before,
        }
        texts = texts_of(sent)
        # A handle ends where its block does.
        read = texts if len(texts) > 1 and any(map(find_handles, texts)) else "".join(texts)
        converted.append({**sent, "content": read, **{name: value for name, value in more.items() if value}})
    return converted


def texts_in(message: BaseMessage) -> list[str]:
    """The texts of a message's blocks, with the handles that `to_messages` sends."""
    content, _ = as_sent(message)
    blocks = [content] if isinstance(content, str) else content
    texts = (block.get("text") if isinstance(block, dict) else block for block in blocks)
    return [text for text in texts if isinstance(text, str)]


def with_texts(message: AnyOf, view: PackView | None, before: Sequence[Handle] = ()) -> AnyOf:
    """`message` as another model reads it: texts that `view` may read in place of handles, and no other handles.

    The packs of `before`, which a tool found, stand in front of it. `to_messages` sends the handles all the same,
    unless somebody else changed the message meanwhile.
    """

    def read(text: str, role: str = core_role(message.type)) -> str:
        parts = (text,) if view is None else view.split(text, role)
        return "".join(inert(part.text) if isinstance(part, PackRef) else strip_handles(part) for part in parts)

    def read_block(block: Any) -> Any:
        is_text = isinstance(block, dict) and isinstance(block.get("text"), str)
        return read(block) if isinstance(block, str) else {**block, "text": read(block["text"])} if is_text else block

    sent = message.content
    content = read(sent) if isinstance(sent, str) else [read_block(block) for block in sent]
    found = {str(handle): text for handle in before if (text := read(str(handle), "tool"))}
    if block := "".join(f"{text}{GAP}" for text in found.values()):
        content = block + content if isinstance(content, str) else [{"type": "text", "text": block}, *content]
    if content == sent:
        return message
    kept = {**message.additional_kwargs, _SENT: (sent, content, tuple(found))}
    return message.model_copy(update={"content": content, "additional_kwargs": kept})


def as_sent(message: BaseMessage) -> tuple[Any, list[Handle]]:
    """The content with the handles that `with_texts` replaced, and those before it, if `with_texts` left it so."""
    kept = message.additional_kwargs.get(_SENT)
    if not isinstance(kept, tuple) or kept[1] != message.content:
        return message.content, []
    return kept[0], list(map(Handle.parse, kept[2]))


def pack_place(prompt: ChatPromptTemplate, variable: str = "context") -> list[Message]:
    """The place of the first document of `variable` in `prompt`, as messages for `build_pack(compiled_for=...)`.

    A pack compiled for this place is read straight from the store if it is the first document. So `variable` must begin
    with the documents, and nothing before it may change from call to call: another variable there raises `PromptError`.
    A placeholder for optional messages counts as empty.
    """
    placeholders = {part.variable_name for part in prompt.messages if isinstance(part, MessagesPlaceholder)}
    if variable not in prompt.input_variables or variable in placeholders:
        available = ", ".join(sorted(set(prompt.input_variables) - placeholders)) or "none"
        raise PromptError(f"Got the variable {variable!r}; the variables in the text of the prompt are: {available}.")
    names = (*prompt.input_variables, *prompt.optional_variables)
    marks = {name: f"\0{number}\1" for number, name in enumerate(names)}
    values: dict[str, Any] = {
        name: [HumanMessage(mark)] if name in placeholders else mark for name, mark in marks.items()
    }
    values |= {name: [] for name in prompt.optional_variables}
    return slotted(to_messages(prompt.format_messages(**values)), variable, marks)


def to_result(generation: Generation, model_name: str) -> ChatResult:
    """The whole answer as one message."""
    calls = [
        tool_messages.tool_call(name=call.name, args=dict(call.arguments), id=call.id) for call in generation.tool_calls
    ]
    message = AIMessage(
        generation.text,
        tool_calls=calls,
        additional_kwargs=_reasoning(generation.reasoning),
        **_about(generation, model_name),
    )
    info: dict[str, Any] = {"finish_reason": generation.finish_reason}
    info |= {} if generation.logprobs is None else {"logprobs": _logprobs(generation.logprobs)}
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


def to_chunk(delta: Delta) -> ChatGenerationChunk:
    """One chunk of a stream."""
    calls = []
    if (part := delta.tool_call) is not None:
        calls = [tool_messages.tool_call_chunk(name=part.name, args=part.arguments, id=part.id, index=part.index)]
    message = AIMessageChunk(content=delta.text, tool_call_chunks=calls, additional_kwargs=_reasoning(delta.reasoning))
    info = {"logprobs": _logprobs(delta.logprobs)} if delta.logprobs else None
    return ChatGenerationChunk(message=message, generation_info=info)


def last_chunk(generation: Generation, model_name: str) -> ChatGenerationChunk:
    """The last chunk of a stream: token counts and finish reason."""
    message = AIMessageChunk(content="", chunk_position="last", **_about(generation, model_name))
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": generation.finish_reason})


def _logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities in OpenAI's form. LangChain copies them to `response_metadata`, and joins those of chunks."""
    return {"content": [token.to_dict() for token in logprobs]}


def _reasoning(text: str) -> dict[str, Any]:
    # LangChain makes a reasoning block from this key.
    return {"reasoning_content": text} if text else {}


def _about(generation: Generation, model_name: str) -> dict[str, Any]:
    """What a message says of its generation."""
    metadata: dict[str, Any] = {"model_name": model_name, "model_provider": PROVIDER}
    counts = generation.usage.to_dict() | {"packs": list(generation.packs)}
    metadata |= {"finish_reason": generation.finish_reason, "kp": counts}
    return {"usage_metadata": usage_metadata(generation.usage), "response_metadata": metadata}


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Counts in LangChain's form. Input is what the model reads, packs included."""
    return UsageMetadata(
        input_tokens=usage.prompt_tokens + usage.pack_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.pack_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.reused_tokens),
    )
