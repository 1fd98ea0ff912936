"""LlamaIndex's messages and prompts in the form that the core takes, and the engine's answers in LlamaIndex's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate

from kp_core import Delta, Generation, Message, TokenLogprob
from kp_core.errors import PromptError
from kp_core.prompt.conversation import slotted, tool_call
from kp_core.settings import core_role

MEMORY = "memory"
"""Key in the provenance of a pack: the name of the memory block that made it."""


def to_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """LlamaIndex messages as dictionaries with `role`, `content`, and for tools `tool_calls`, `tool_call_id`, `name`.

    A tool message gets the name of the call that it answers. Tool calls whose arguments did not parse are left out, as
    no template could show them; so is thinking. A cache point marks its message. Raises `PromptError` for images,
    audio, video and files, and for other objects than `ChatMessage`.
    """
    names: dict[object, str] = {}
    converted = []
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise PromptError(f"Got a {type(message).__name__}; expected a ChatMessage.")
        role, extra = core_role(message.role.value), message.additional_kwargs
        texts = [text for block in message.blocks if (text := _text(block, role)) is not None]
        calls = _calls(message) if role == "assistant" else []
        names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        call_id = extra.get("tool_call_id") if role == "tool" else None
        more = {
            "cache_control": any(isinstance(block, CachePoint) for block in message.blocks),
            "tool_calls": calls,
            "tool_call_id": call_id,
            "name": extra.get("name") or names.get(call_id),
        }
        content = {"role": role, "content": "\n".join(texts)}
        converted.append(content | {name: value for name, value in more.items() if value})
    return converted


def pack_place(template: BasePromptTemplate, llm: LLM | None = None, variable: str = "context_str") -> list[Message]:
    """The place of the first node in a prompt of `template`, as messages for `compiled_for`.

    A pack compiled for this place is read straight from the store if its node is the first. `llm` selects among the
    variants of a template and adds its system prompt. Raises `PromptError` if another variable stands before
    `variable`, as the text before the nodes then changes from call to call, or if `variable` is not in the template.
    """
    marks = {name: f"\0{number}\1" for number, name in enumerate(dict.fromkeys((*template.template_vars, variable)))}
    messages = template.format_messages(llm=llm, **marks)
    if llm is not None and llm.system_prompt:
        messages = [ChatMessage(role="system", content=llm.system_prompt), *messages]
    return slotted(to_messages(messages), variable, marks)


class PartialAnswer:
    """The answer of a stream so far. Its responses hold the whole message, the arguments of a call as a string.

    `additional_kwargs["tool_calls"]` of the message repeats the calls in OpenAI's form, which LlamaIndex's structured
    streaming looks for.
    """

    def __init__(self) -> None:
        self._text, self._reasoning = "", ""
        self._calls: list[ToolCallBlock] = []

    def add(self, delta: Delta) -> ChatResponse:
        """The response for `delta`."""
        self._text += delta.text
        self._reasoning += delta.reasoning
        if (part := delta.tool_call) is not None:
            if part.index == len(self._calls):
                self._calls.append(ToolCallBlock(tool_call_id="", tool_name="", tool_kwargs=""))
            call = self._calls[part.index]
            self._calls[part.index] = ToolCallBlock(
                tool_call_id=part.id or call.tool_call_id,
                tool_name=part.name or call.tool_name,
                tool_kwargs=f"{call.tool_kwargs}{part.arguments}",
            )
        extra = {"thinking_delta": delta.reasoning} if delta.reasoning else {}
        message = _message(self._text, self._reasoning, self._calls)
        return ChatResponse(message=message, delta=delta.text, additional_kwargs=extra)


def to_response(generation: Generation, delta: str | None = None) -> ChatResponse:
    """The response with all of `generation`; `delta=""` for the last one of a stream.

    The arguments of a call are a dictionary. `raw` has `usage` in OpenAI's form, in which the prompt is what the model
    reads, packs included, `kp`, all counts of `Usage` and the handles of the `packs` that were read, `timings` (in
    seconds) and `finish_reason`. `logprobs`, if asked for, is for each token a list of itself and the likeliest others,
    best first.
    """
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))
        for call in generation.tool_calls
    ]
    counts = generation.usage
    read = counts.prompt_tokens + counts.pack_tokens
    usage = {
        "prompt_tokens": read,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": read + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.reused_tokens},
    }
    told = counts.to_dict() | {"packs": list(generation.packs)}
    raw = {"usage": usage, "kp": told, "finish_reason": generation.finish_reason, "timings": {"ttft_s": counts.ttft_s}}
    logprobs = None if generation.logprobs is None else [_logprobs(token) for token in generation.logprobs]
    message = _message(generation.text, generation.reasoning, calls)
    return ChatResponse(message=message, raw=raw, delta=delta, logprobs=logprobs)


def to_completion(response: ChatResponse) -> CompletionResponse:
    """A chat response as a completion response."""
    shared = {name: getattr(response, name) for name in ("delta", "logprobs", "raw", "additional_kwargs")}
    return CompletionResponse(text=response.message.content or "", **shared)


def _logprobs(token: TokenLogprob) -> list[LogProb]:
    """The token itself, then the likeliest others in its place."""
    tokens = [token, *(other for other in token.top if other.token_id != token.token_id)]
    return [LogProb(token=each.text, logprob=each.logprob, bytes=list(each.bytes)) for each in tokens]


def _message(text: str, reasoning: str, calls: Sequence[ToolCallBlock]) -> ChatMessage:
    blocks: list[ContentBlock] = [ThinkingBlock(content=reasoning)] if reasoning else []
    # Templates separate calls by blank lines, which are not text of the answer.
    if text.strip() or not calls:
        blocks.append(TextBlock(text=text))
    openai = []
    for call in calls:
        arguments = call.tool_kwargs if isinstance(call.tool_kwargs, str) else json.dumps(call.tool_kwargs)
        openai.append(tool_call(call.tool_name, arguments, call.tool_call_id))
    extra = {"tool_calls": openai} if openai else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=[*blocks, *calls], additional_kwargs=extra)


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    calls = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            arguments: Any = block.tool_kwargs
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments or "{}")
                except json.JSONDecodeError:
                    continue
            if isinstance(arguments, Mapping):
                calls.append(tool_call(block.tool_name, dict(arguments), block.tool_call_id))
    return calls


def _text(block: ContentBlock, role: str) -> str | None:
    """The text of a block; `None` if the block is not sent."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, CachePoint) or (role == "assistant" and isinstance(block, ThinkingBlock | ToolCallBlock)):
        return None
    if isinstance(block, CitableBlock):
        return "\n".join(text for part in block.content if (text := _text(part, role)) is not None)
    if isinstance(block, CitationBlock):
        return _text(block.cited_content, role)
    raise PromptError(
        f"Got a content block of type {block.block_type!r} in a {role} message; a text model takes text. "
        "Describe it in words, or leave it out."
    )
