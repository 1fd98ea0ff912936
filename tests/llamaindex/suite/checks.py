"""The table of checks: endpoints by property, then what stands on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index_instrumentation import get_dispatcher

from tests.llamaindex.suite.suite import ENDPOINTS, Check, Endpoint, Subject, expect, text_of
from tests.llamaindex.suite.tools import TOOL_CHECKS

__all__ = ["CHECKS"]

_TICK_S = 0.002
_FEWEST_TICKS = 3  # A blocked loop ticks once at most.


async def _answers(endpoint: Endpoint, subject: Subject) -> None:
    """The answer has a text and the type that the endpoint promises."""
    reply = await endpoint(subject.make(), subject.question)
    kind = ChatResponse if endpoint.chat else CompletionResponse
    for response in reply.responses:
        expect(isinstance(response, kind), f"got a {type(response).__name__}; expected a {kind.__name__}")
    expect(bool(reply.text.strip()), "the answer is blank")
    if isinstance(reply.last, ChatResponse):
        role = reply.last.message.role
        expect(role == MessageRole.ASSISTANT, f"the answer's role is {role}; expected assistant")


async def _agrees(endpoint: Endpoint, subject: Subject) -> None:
    """All endpoints say the same."""
    llm = subject.make()
    said, expected = (await endpoint(llm, subject.question)).text, llm.chat([ChatMessage(subject.question)])
    agrees = subject.agrees(subject.question, said, text_of(expected))
    expect(agrees, f"said {said!r}; chat says {text_of(expected)!r}")


async def _counts(endpoint: Endpoint, subject: Subject) -> None:
    """The last response counts its tokens, in plain values that can be logged."""
    llm = subject.make()
    reply = await endpoint(llm, subject.question)
    for name in ("prompt_tokens", "completion_tokens"):
        count = reply.usage.get(name)
        expect(isinstance(count, int) and count > 0, f"usage[{name!r}] is {count!r}; expected a positive integer")
    try:
        json.dumps(reply.last.raw)
    except TypeError as error:
        expect(holds=False, otherwise=f"raw cannot be written as JSON: {error}")
    longer = await endpoint(llm, subject.question + " Then say why you named just these.")
    grown = longer.usage["prompt_tokens"] > reply.usage["prompt_tokens"]
    expect(grown, "a longer prompt does not count more tokens")


async def _takes_options(endpoint: Endpoint, subject: Subject) -> None:
    """An option of the call wins over the setting."""
    llm = subject.make()
    whole = await endpoint(llm, subject.question)
    short = await endpoint(llm, subject.question, **{subject.limit: 2})
    expect(len(short.text) < len(whole.text), f"{subject.limit}=2 did not shorten {whole.text!r}")
    expect(whole.text.startswith(short.text), f"{subject.limit}=2 changed {whole.text!r} to {short.text!r}")


async def _stops(endpoint: Endpoint, subject: Subject) -> None:
    """A stop string of the call ends the answer and is not part of it."""
    llm = subject.make()
    whole = (await endpoint(llm, subject.question)).text
    stop = whole[len(whole) // 2 :][:2]
    said = (await endpoint(llm, subject.question, stop=[stop])).text
    expected = whole[: whole.index(stop)]
    expect(said == expected, f"with stop={stop!r} said {said!r}; expected {expected!r}")


async def _tells(endpoint: Endpoint, subject: Subject) -> None:
    """Tracing sees the call: one start, one end with the answer, and a piece at a time in between."""
    llm = subject.make()
    counter = TokenCountingHandler(tokenizer=str.split)
    llm.callback_manager = CallbackManager([counter])
    chat = endpoint.chat
    with _listening() as events:
        reply = await endpoint(llm, subject.question)
    starts = [event for event in events if isinstance(event, LLMChatStartEvent if chat else LLMCompletionStartEvent)]
    ends = [event for event in events if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent)]
    own = [event for event in ends if isinstance(event, LLMChatEndEvent if chat else LLMCompletionEndEvent)]
    expect(len(starts) == len(own) == 1, f"got {len(starts)} start and {len(own)} end events; expected one of each")
    told = own[0].response
    expect(told is not None and text_of(told) == reply.text, "the end event does not hold the answer")
    if endpoint.streams:
        kind = LLMChatInProgressEvent if chat else LLMCompletionInProgressEvent
        count = sum(isinstance(event, kind) for event in events)
        expect(count == len(reply.responses), f"got {count} events for {len(reply.responses)} pieces")
    expect(len(counter.llm_token_counts) == 1, f"callbacks counted {len(counter.llm_token_counts)} calls; expected one")
    counted = counter.prompt_llm_token_count, counter.completion_llm_token_count
    expected = reply.usage["prompt_tokens"], reply.usage["completion_tokens"]
    expect(counted == expected, f"TokenCountingHandler counted {counted}; the call says {expected}")


async def _streams(endpoint: Endpoint, subject: Subject) -> None:
    """Pieces come one by one, each with the text so far, and join to the whole."""
    reply = await endpoint(subject.make(), subject.question)
    expect(len(reply.responses) > 1, "the answer came in one piece")
    so_far = ""
    for response in reply.responses:
        so_far += response.delta or ""
        expect(text_of(response) == so_far, f"a response holds {text_of(response)!r}; its pieces join to {so_far!r}")


async def _can_be_left(endpoint: Endpoint, subject: Subject) -> None:
    """A stream may be left after its first piece; the next call is not disturbed."""
    llm = subject.make()
    expected = (await endpoint(llm, subject.question)).text
    asked: Any = [ChatMessage(subject.question)] if endpoint.chat else subject.question
    stream = getattr(llm, str(endpoint))(asked)
    if endpoint.is_async:
        stream = await stream
        await anext(stream)
        await stream.aclose()
    else:
        next(stream)
        stream.close()
    said = (await endpoint(llm, subject.question)).text
    agrees = subject.agrees(subject.question, said, expected)
    expect(agrees, f"after a stream was left, the answer is {said!r}; before it was {expected!r}")


async def _leaves_the_loop_free(endpoint: Endpoint, subject: Subject) -> None:
    """Other tasks run while the model works."""
    llm = subject.make()
    await endpoint(llm, "Hi")  # Weights may load at the first call.
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(_TICK_S)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await endpoint(llm, subject.question)
    seen = ticks
    ticking.cancel()
    expect(seen >= _FEWEST_TICKS, f"the loop ran {seen} times during the call; expected at least {_FEWEST_TICKS}")


async def _can_be_cancelled(endpoint: Endpoint, subject: Subject) -> None:
    """Cancelling the task ends the call; the next one is not disturbed."""
    llm = subject.make()
    expected = (await endpoint(llm, subject.question)).text
    task = asyncio.ensure_future(endpoint(llm, subject.question + " Take your time."))
    await asyncio.sleep(_TICK_S)
    expect(not task.done(), "the call was over before it could be cancelled: it blocks the loop")
    task.cancel()
    cancelled = False
    try:
        await task
    except asyncio.CancelledError:
        cancelled = True
    expect(cancelled, "cancelling the task did not end the call")
    said = (await endpoint(llm, subject.question)).text
    agrees = subject.agrees(subject.question, said, expected)
    expect(agrees, f"after a call was cancelled, the answer is {said!r}; before it was {expected!r}")


async def _several_at_once(endpoint: Endpoint, subject: Subject) -> None:
    """Calls that run at the same time do not mix."""
    llm = subject.make()
    questions = [f"{subject.question} ({number})" for number in range(3)]
    one_by_one = [(await endpoint(llm, question)).text for question in questions]
    together = [reply.text for reply in await asyncio.gather(*(endpoint(llm, question) for question in questions))]
    agrees = all(map(subject.agrees, questions, together, one_by_one))
    expect(agrees, f"together they said {together}; one by one {one_by_one}")


async def _predicts(subject: Subject) -> None:
    """Templates are filled and the system prompt is sent."""
    llm, template = subject.make(), PromptTemplate("{task}")
    llm.system_prompt = "Be brief."
    messages = [ChatMessage("Be brief.", role="system"), ChatMessage(subject.question)]
    expected = text_of(llm.chat(messages))
    said = {
        "predict": llm.predict(template, task=subject.question),
        "apredict": await llm.apredict(template, task=subject.question),
        "stream": "".join(llm.stream(template, task=subject.question)),
        "astream": "".join([part async for part in await llm.astream(template, task=subject.question)]),
    }
    for name, text in said.items():
        expect(text == expected, f"{name} said {text!r}; chat says {expected!r}")


async def _reads_conversations(subject: Subject) -> None:
    """Earlier turns are part of the prompt, in every role."""
    llm = subject.make()
    turns = [
        ChatMessage("Be brief.", role="system"),
        ChatMessage("Hi"),
        ChatMessage("Hello.", role="assistant"),
        ChatMessage(subject.question),
    ]
    # A turn that is left out may bring in a template's default, so turns are made longer instead.
    count = (await ENDPOINTS[4](llm, turns)).usage["prompt_tokens"]
    for at, turn in enumerate(turns):
        longer = ChatMessage(f"{turn.content} The sea is calm today.", role=turn.role)
        grown = (await ENDPOINTS[4](llm, [*turns[:at], longer, *turns[at + 1 :]])).usage["prompt_tokens"]
        expect(grown > count, f"a longer {turn.role.value} message does not count more tokens: {grown} after {count}")


async def _describes_itself(subject: Subject) -> None:
    """Sizes are sensible, and the payload of events can be logged."""
    llm = subject.make()
    about = llm.metadata
    expect(
        about.context_window > about.num_output > 0, f"got a window of {about.context_window} for {about.num_output}"
    )
    expect(about.model_name not in ("", "unknown"), "the model has no name")
    json.dumps(llm.to_payload(), default=str)


async def _serialises(subject: Subject) -> None:
    """`to_dict` gives plain values that make the same LLM again."""
    llm = subject.make()
    data = json.loads(llm.to_json())
    expect(data.get("class_name") == llm.class_name(), f"class_name is {data.get('class_name')!r}")
    again = (subject.revive or type(llm).from_dict)(data)
    expect(json.loads(again.to_json()) == data, "the LLM made from it is another")
    said, expected = again.complete(subject.question).text, llm.complete(subject.question).text
    expect(said == expected, f"the LLM made from it says {said!r}; the first says {expected!r}")


_Property = Callable[[Endpoint, Subject], Awaitable[None]]


def _rows(title: str, run: _Property, *, streams: bool = False, is_async: bool = False) -> Iterator[Check]:
    """`run` for every endpoint, or for those that stream or are async."""
    for endpoint in ENDPOINTS:
        if (endpoint.streams or not streams) and (endpoint.is_async or not is_async):
            yield Check(f"{endpoint} {title}", partial(run, endpoint))


@contextmanager
def _listening() -> Iterator[list[BaseEvent]]:
    """The instrumentation events of the block."""
    seen: list[BaseEvent] = []

    class _Listener(BaseEventHandler):
        def handle(self, event: BaseEvent, **_: Any) -> None:
            seen.append(event)

    listener, dispatcher = _Listener(), get_dispatcher()
    dispatcher.add_event_handler(listener)
    try:
        yield seen
    finally:
        dispatcher.event_handlers.remove(listener)


CHECKS: tuple[Check, ...] = (
    *_rows("answers", _answers),
    *_rows("says what chat says", _agrees),
    *_rows("counts tokens", _counts),
    *_rows("takes options of the call", _takes_options),
    *_rows("stops at stop strings", _stops),
    *_rows("tells tracing", _tells),
    *_rows("streams pieces that join to the whole", _streams, streams=True),
    *_rows("can be left early", _can_be_left, streams=True),
    *_rows("leaves the loop free", _leaves_the_loop_free, is_async=True),
    *_rows("can be cancelled", _can_be_cancelled, is_async=True),
    *_rows("runs several times at once", _several_at_once, is_async=True),
    Check("predict fills templates", _predicts),
    Check("chat reads whole conversations", _reads_conversations),
    Check("metadata describes the model", _describes_itself),
    Check("to_dict serialises", _serialises),
    *TOOL_CHECKS,
)
"""Every check; each name says what must hold."""
