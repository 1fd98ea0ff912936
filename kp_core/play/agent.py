"""An agent that searches the documents of a playground, one step at a time."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from kp_core.engines.request import Generation
from kp_core.errors import FactError
from kp_core.play.world import Answer, World
from kp_core.tools import Tool

__all__ = ["Agent", "Step"]

MOST_SEARCHES = 5

_SEARCH = Tool(
    "search",
    "Find a page that says something about the words.",
    {"type": "object", "properties": {"words": {"type": "string", "maxLength": 40}}, "required": ["words"]},
)
_SYSTEM = "You answer questions from pages that you search for."
_ANSWER = "Now answer in one short sentence: "


@dataclass(frozen=True)
class Step:
    """One step: what was searched for and found, or the answer; its cost, and the tokens plain text would have sent."""

    number: int
    generation: Generation
    text_tokens: int
    words: str = ""
    found: str = ""


@dataclass
class Agent:
    """Searches until it has read five documents, or all; then answers. A small model would not decide to go on itself.

    The prompt holds handles, and its tool calls are compacted, so it stays as long as it was; beside it the same
    conversation is counted as text.
    """

    world: World
    task: str
    steps: list[Step] = field(default_factory=list)
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _text: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.task.strip():
            raise FactError("Got no task; expected a question that the agent shall answer.")
        asked = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": self.task.strip()}]
        self._messages, self._text = list(asked), list(asked)

    @property
    def is_done(self) -> bool:
        """Whether it has answered."""
        return bool(self.steps) and not self.steps[-1].words

    def step(self) -> Generator[Answer, None, None]:
        """Take the next step: what the model writes, as it comes; the step is in `steps` at the end.

        Raises `FactError` when there is nothing to read, and as `Session.stream`.
        """
        read = [step.found for step in self.steps]
        left = self.world.search(self.task, 1, without=read) if len(read) < MOST_SEARCHES else []
        tail = [] if left else [{"role": "user", "content": _ANSWER + self.task.strip()}]
        options: dict[str, Any] = {"tools": [_SEARCH], "tool_choice": "search" if left else "none", "max_tokens": 128}
        request = {"messages": self._messages + tail, "view": self.world.view, "compact": True, **options}
        generation = None
        for answer in self.world.watch("packs", request):
            generation = answer.generation
            yield answer
        if generation is None:
            return
        text_tokens = self.world.plain_tokens(self._text + tail, **options)
        words = str(generation.tool_calls[0].arguments.get("words", "")) if generation.tool_calls else ""
        found = self.world.search(words if words.strip() else self.task, 1, without=read) if left else []
        for document in found:
            call = {"role": "assistant", "content": "", "tool_calls": [_call(words)]}
            self._messages += [call, _result(str(document.handle))]
            self._text += [call, _result(self.world.text_of(document))]
        name = found[0].name if found else ""
        self.steps.append(
            Step(len(self.steps) + 1, generation, text_tokens, (words or self.task) if found else "", name)
        )


def _call(words: str) -> dict[str, Any]:
    return {"type": "function", "id": "search", "function": {"name": "search", "arguments": {"words": words}}}


def _result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "search", "tool_call_id": "search", "content": content}
