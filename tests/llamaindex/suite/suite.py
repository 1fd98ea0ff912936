"""What a check is, what it is given, and how all are run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.llms import LLM

__all__ = ["ENDPOINTS", "Check", "Endpoint", "NonconformityError", "Outcome", "Reply", "Subject", "expect", "run_suite"]


class NonconformityError(AssertionError):
    """An LLM does not do what LlamaIndex's users may count on."""


@dataclass(frozen=True)
class Subject:
    """The LLM under test: `make` builds a fresh one, deterministic, with answers of a few dozen tokens at most.

    `revive` builds one from `to_dict()`, for LLMs whose `from_dict` needs something that is not serialised. `limit` is
    the option that bounds the tokens of an answer. `could_say` is for an LLM that rounds by what else it computes, so
    that its answer beside others may be another one than alone: whether a text is its answer to a question but for
    rounding.
    """

    make: Callable[[], LLM]
    revive: Callable[[dict[str, Any]], LLM] | None = None
    question: str = "Name three colours."
    limit: str = "max_tokens"
    could_say: Callable[[str, str], bool] = lambda _question, _text: False

    def agrees(self, question: str, said: str, expected: str) -> bool:
        """Whether two answers to a question are the same, or this one could be said as well."""
        return said == expected or self.could_say(question, said)


@dataclass(frozen=True)
class Check:
    """One thing that must hold; awaiting `check(subject)` raises `NonconformityError`, or what the LLM raises."""

    name: str
    run: Callable[[Subject], Awaitable[None]] = field(repr=False)

    def __str__(self) -> str:
        return self.name

    async def __call__(self, subject: Subject) -> None:
        """Run the check on `subject`."""
        await self.run(subject)


@dataclass(frozen=True)
class Outcome:
    """What became of one check; `problem` is empty when it passed."""

    name: str
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the check passed."""
        return not self.problem


@dataclass(frozen=True)
class Reply:
    """All responses of one call, one for endpoints that do not stream."""

    responses: tuple[ChatResponse | CompletionResponse, ...]

    @property
    def last(self) -> ChatResponse | CompletionResponse:
        """The response that holds everything."""
        return self.responses[-1]

    @property
    def text(self) -> str:
        """What was said in all."""
        return text_of(self.last)

    @property
    def usage(self) -> Mapping[str, Any]:
        """The token counts of the call, as `raw["usage"]`."""
        raw = self.last.raw
        expect(isinstance(raw, Mapping), f"raw is a {type(raw).__name__}; expected a mapping with 'usage'")
        usage = raw.get("usage") if isinstance(raw, Mapping) else None
        expect(isinstance(usage, Mapping), f"raw['usage'] is {usage!r}; expected a mapping of counts")
        return usage if isinstance(usage, Mapping) else {}


@dataclass(frozen=True)
class Endpoint:
    """One of the eight ways to ask."""

    chat: bool
    is_async: bool
    streams: bool

    def __str__(self) -> str:
        prefix = ("a" if self.is_async else "") + ("stream_" if self.streams else "")
        return prefix + ("chat" if self.chat else "complete")

    async def __call__(self, llm: LLM, prompt: str | Sequence[ChatMessage], **options: Any) -> Reply:
        """Ask, and read the answer to its end."""
        asked: Any = prompt
        if self.chat and isinstance(prompt, str):
            asked = [ChatMessage(prompt)]
        answer = getattr(llm, str(self))(asked, **options)
        if self.is_async:
            answer = await answer
        if not self.streams:
            return Reply((answer,))
        return Reply(tuple([part async for part in answer] if self.is_async else list(answer)))


ENDPOINTS = tuple(
    Endpoint(chat, is_async, streams)
    for chat in (False, True)
    for is_async in (False, True)
    for streams in (False, True)
)


def expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001
    """Raise `NonconformityError(otherwise)` unless it `holds`."""
    if not holds:
        raise NonconformityError(otherwise)


def text_of(response: ChatResponse | CompletionResponse) -> str:
    """The text of a response of either kind."""
    return (response.message.content or "") if isinstance(response, ChatResponse) else response.text


async def read(stream: Iterator[Any] | AsyncIterator[Any]) -> list[Any]:
    """All items of a stream of either kind."""
    return [item async for item in stream] if isinstance(stream, AsyncIterator) else list(stream)


def run_suite(subject: Subject, checks: Sequence[Check], *, timeout_s: float = 120) -> list[Outcome]:
    """Run all `checks`, each on its own loop, and say what became of each; no failure ends the run."""
    return [_run(check, subject, timeout_s) for check in checks]


def _run(check: Check, subject: Subject, timeout_s: float) -> Outcome:
    async def within() -> None:
        await asyncio.wait_for(check(subject), timeout_s)

    try:
        asyncio.run(within())
    except Exception as problem:  # noqa: BLE001 - whatever an LLM raises is a result here
        return Outcome(check.name, f"{type(problem).__name__}: {problem}")
    return Outcome(check.name)
