"""Reshapes turns to what a chat template supports.

Templates support different things. What one lacks is rendered in exactly this way:

- no system role: the system message opens the first user message, a blank line between them;
- no second or later system message: it is appended to the first message if that is a system message, else it opens the
  next user message, a blank line between them (a user message of its own if none follows);
- no tool role: a tool message becomes a user message, `[tool result: <name>]` on a line before its content;
- no tool calls: each call is appended to the assistant's content, on lines of its own, as
  `<tool_call>`, `{"name": ..., "arguments": ...}`, `</tool_call>`;
- one tool call at a time: each gets a message of its own, with its result behind it;
- no tools: a paragraph at the end of the system message lists them and shows how to call one, in the template's own
  form of calls, else in the form above;
- only alternating roles: neighbouring messages of one role are joined, a blank line between them.

A system message or tool result that a template still leaves out (some show the system message only before the last user
message) opens the next user message, or becomes one; tool calls that it leaves out (some show them only without text)
are appended to the content as above. `ChatTemplate` raises for other messages that are left out, and logs a warning for
text beside tool calls.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kp_core.errors import PromptError
from kp_core.packs.view import PackRef
from kp_core.prompt.conversation import GAP, Turn, tool_call, with_instruction
from kp_core.tools import Tool, ToolFormat

_CALLING = "You can call tools. To call one, write\n{}\nwith arguments that fit its parameters. The tools:"


class TurnShaper:
    """Reshapes turns to what one template supports, as probes show; `render` raises `PromptError` for the others."""

    def __init__(self, render: Callable[[list[dict[str, Any]], Mapping[str, Any]], str]) -> None:
        token = secrets.token_hex(4)
        user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
        # Nine characters, because one family of templates demands that length.

        def calling(*names: str) -> dict[str, Any]:
            arguments = '{"x": 1}' if self._as_text else {"x": 1}
            calls = [tool_call(name, arguments, f"call0000{at}") for at, name in enumerate(names, 1)]
            return {"role": "assistant", "content": "", "tool_calls": calls}

        result = {"role": "tool", "content": token, "name": f"n{token}", "tool_call_id": "call00001"}

        def shows(*messages: dict[str, Any], times: int = 1, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
            with suppress(PromptError):
                return render([*messages], {"add_generation_prompt": False, "tools": tools}).count(token) >= times
            return False

        self.takes_tools = shows(user, tools=[Tool(f"n{token}", token).to_dict()])
        """Whether the template shows tools itself."""
        self._system = shows({"role": "system", "content": token}, user)
        self._as_text = False
        self._calls = shows(user, calling(f"n{token}"))
        if not self._calls:
            # Some templates want arguments as text.
            self._as_text = True
            self._as_text = self._calls = shows(user, calling(f"n{token}"))
        self._one_call = self._calls and not shows(user, calling("f", f"n{token}"))
        self.shows_calls = self.takes_tools or self._calls
        """Whether the template has its own form for tool calls."""
        # Some templates show tool results only after the call.
        self._tool = shows(user, calling(f"n{token}") if self._calls else answer, result)
        self._runs = shows(user, {"role": "user", "content": token})
        system = {"role": "system", "content": token}
        self._second = shows(system, system, user, times=2)
        self._later = shows(system, user, answer, system, user, times=2) and shows(user, answer, system, user)

    def shape(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """Return `turns` with everything that the template lacks rendered as stated above."""
        shaped = [self._shape_tools(turn) for turn in (_one_by_one(turns) if self._one_call else turns)]
        start = next((at for at, turn in enumerate(shaped) if turn.role != "system"), len(shaped))
        kept = [self._system, *([self._second] * (start - 1)), *([self._later] * (len(shaped) - start))]
        lost = [at for at, turn in enumerate(shaped) if turn.role == "system" and not kept[at]]
        if lost and lost[0] and shaped[0].role == "system":
            for at in lost:
                shaped[0] = _joined(shaped[0], shaped[at])
            shaped = [turn for at, turn in enumerate(shaped) if at not in lost]
            lost = []
        return self.moved(shaped, lost)

    def moved(self, turns: Sequence[Turn], lost: Sequence[int]) -> tuple[Turn, ...]:
        """Return `turns` with those at `lost` as text: calls of the assistant, other messages of the user."""
        shaped = list(turns)
        for at in reversed(lost):
            if shaped[at].tool_calls:
                shaped[at] = _with_calls_as_text(shaped[at])
                continue
            user = _result(shaped[at]) if shaped[at].role == "tool" else replace(shaped[at], role="user")
            followers = [other for other in range(at + 1, len(shaped)) if shaped[other].role == "user"]
            # The opening message stays in front, and a result keeps its place.
            if followers and shaped[at].role == "system" and (at or followers[0] == 1):
                shaped[followers[0]] = _joined(user, shaped[followers[0]])
                del shaped[at]
            else:
                shaped[at] = user
        return tuple(shaped if self._runs else _merged(shaped))

    def offer(self, turns: Sequence[Turn], tools: Sequence[Tool], form: ToolFormat) -> tuple[Turn, ...]:
        """List `tools` in the system message, unless the template shows them itself."""
        if self.takes_tools or not tools:
            return tuple(turns)
        listed = "\n".join(json.dumps(tool.to_dict()["function"], ensure_ascii=False) for tool in tools)
        return with_instruction(turns, f"{_CALLING.format(form.example)}\n{listed}")

    def _shape_tools(self, turn: Turn) -> Turn:
        if turn.role == "tool" and not self._tool:
            return _result(turn)
        if turn.tool_calls and not self._calls:
            return _with_calls_as_text(turn)
        if turn.tool_calls and self._as_text:
            written = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in turn.tool_calls]
            pairs = zip(turn.tool_calls, written, strict=True)
            calls = ({**call, "function": {**call["function"], "arguments": text}} for call, text in pairs)
            return replace(turn, tool_calls=tuple(calls))
        return turn


def _result(turn: Turn) -> Turn:
    """A tool message as a user message."""
    return Turn("user", (f"[tool result: {turn.extra.get('name', 'tool')}]\n", *turn.segments))


def _with_calls_as_text(turn: Turn) -> Turn:
    functions = (json.dumps(call["function"], ensure_ascii=False) for call in turn.tool_calls)
    calls = "\n".join(f"<tool_call>\n{function}\n</tool_call>" for function in functions)
    gap = ("\n",) if turn.segments else ()
    return replace(turn, segments=(*turn.segments, *gap, calls), tool_calls=())


def _one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """Split several calls of one message into messages of their own, each followed by its result."""
    separate: list[Turn] = []
    remaining = list(turns)
    while remaining:
        turn = remaining.pop(0)
        results: list[Turn] = []
        while len(turn.tool_calls) > 1 and remaining and remaining[0].role == "tool":
            results.append(remaining.pop(0))
        ids = [call.get("id") for call in turn.tool_calls]
        for at, call in enumerate(turn.tool_calls[:-1]):
            separate.append(replace(turn, segments=() if at else turn.segments, tool_calls=(call,)))
            # Results without an id are in the order of their calls.
            matching = [result for result in results if result.extra.get("tool_call_id", ids[at]) == ids[at]][:1]
            results = [result for result in results if result not in matching]
            separate += matching
        separate.append(replace(turn, segments=(), tool_calls=turn.tool_calls[-1:]) if len(ids) > 1 else turn)
        separate += results
    return separate


def _joined(first: Turn, second: Turn) -> Turn:
    last = first.segments[-1] if first.segments else ""
    # Memory ends its line, as in `with_instruction`.
    ends_line = isinstance(last, PackRef) and last.text.endswith("\n")
    gap = (GAP,) if first.segments and second.segments and not ends_line else ()
    return replace(
        first,
        segments=(*first.segments, *gap, *second.segments),
        tool_calls=(*first.tool_calls, *second.tool_calls),
        marked=first.marked or second.marked,
    )


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    merged: list[Turn] = []
    for turn in turns:
        if merged and merged[-1].role == turn.role and turn.role != "tool":
            merged[-1] = _joined(merged[-1], turn)
        else:
            merged.append(turn)
    return merged
