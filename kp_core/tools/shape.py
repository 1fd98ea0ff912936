"""What an answer must look like, and the grammar that holds it to that.

The grammar is in the Lark dialect of llguidance, with JSON Schemas inside it; an engine compiles it for its tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kp_core.errors import ToolError
from kp_core.tools.base import DEEPEST, Tool, ToolChoice, is_deep
from kp_core.tools.formats import THINK, Thought, ToolFormat

__all__ = ["AnswerShape"]

# The spacing of `json.dumps`, which is what chat templates show models. Free spacing lets small models pad for ever.
_SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANY = r"/(.|\n)*/"


@dataclass(frozen=True)
class AnswerShape:
    """Tools on offer, whether one must be called, and the JSON Schema of the answer, if it has one.

    `parallel` allows several calls in one answer; by default only where the model itself decides to call.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool | None = None
    schema: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        tools: Iterable[Tool | Mapping[str, Any]] = (),
        choice: ToolChoice = "auto",
        *,
        schema: Mapping[str, Any] | bool | None = None,
        parallel: bool | None = None,
    ) -> AnswerShape:
        """The shape that a request asks for; raises `ToolError` for what contradicts itself."""
        offered = tuple(Tool.of(tool) for tool in tools)
        names = [tool.name for tool in offered]
        if len(set(names)) < len(names):
            raise ToolError(f"Got the tools {', '.join(names)}; expected a different name for each.")
        known = ("auto", "none", "any", *names) if names else ("auto", "none")
        if choice not in known:
            raise ToolError(f"Got tool_choice={choice!r}; expected one of: {', '.join(known)}.")
        if schema is not None and choice not in ("auto", "none"):
            raise ToolError(
                f"Got response_schema with tool_choice={choice!r}; an answer is a call or an object, not both."
            )
        if schema is True:
            schema = {"type": "object"}
        if schema is not None and not isinstance(schema, Mapping):
            raise ToolError(f"Got response_schema={schema!r}; expected a JSON Schema, or True for any object.")
        for name, each in (("response_schema", schema), *((tool.name, tool.parameters) for tool in offered)):
            if is_deep(each):
                raise ToolError(f"Got {name} nested more than {DEEPEST} levels deep; expected a schema that is not.")
            try:
                json.dumps(each)
            except (TypeError, ValueError) as error:
                raise ToolError(f"Got {name} that JSON cannot say ({error}); expected a JSON Schema.") from error
        return cls(offered, choice, parallel, schema)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called; with `"none"` they are on show only."""
        if self.choice == "none":
            return ()
        named = tuple(tool for tool in self.tools if tool.name == self.choice)
        return named or self.tools

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.tools) and self.choice not in ("auto", "none")

    def is_free(self, form: ToolFormat, thought: Thought | None) -> bool:
        """Whether any text is an answer: a model with calls or thoughts of its own form is not held to ours."""
        is_own = form.read is not None or thought not in (None, THINK)
        return self.schema is None and (not self.tools or (is_own and not self.is_forced))

    def grammar(self, form: ToolFormat, token: Callable[[str], int | None], *, thinks: bool, opened: bool) -> str:
        """The Lark grammar of answers of this shape, with calls in `form`.

        `token(text)` is the id of a marker that is a special token, else `None`. `thinks` admits a `<think>` block at
        the beginning; with `opened` the prompt has begun it already.
        """
        options, rules = self._calls(form, token) if self.callable else ([], [])
        if self.schema is not None:
            options.append("answer")
            rules.append(f"answer: {_literals(form.answer, form.markers, token)} {_json_rule(self.schema)}")
        elif not self.is_forced:
            name, text = self._free_text(form, token)
            options.append(name)
            rules.append(f"{name}: {text}")
        start = " | ".join(options)
        # Text holds no special token, so a free answer has to be told of thoughts that begin with one.
        is_held = self.is_forced or self.schema is not None or token(THINK[1]) is not None
        if is_held and (thinks or opened):
            begin, end = (_literals(mark, THINK, token) for mark in THINK)
            block = "thought_block" if token(THINK[1]) is not None else "thought_block[lazy]"
            rules = [
                f"body: {start}",
                *rules,
                f"thought: thought_block /[ \\n]*/\n{block}: {'' if opened else begin} THOUGHT_TEXT {end}",
                f"THOUGHT_TEXT: {_ANY}",
            ]
            start = ("thought" if opened else "thought?") + " body"
        return "\n".join([f"start: {start}", *rules])

    def _free_text(self, form: ToolFormat, token: Callable[[str], int | None]) -> tuple[str, str]:
        """What an answer without calls may be, as the name of a terminal and its pattern."""
        if not self.callable:
            # No call may begin. A trigger that is a special token is no text anyway.
            bans = form.trigger and token(form.trigger) is None
            return "TEXT", f"{_ANY} & ~/(.|\n)*{re.escape(form.trigger)}(.|\n)*/" if bans else _ANY
        return ("TEXT", _ANY) if form.trigger else ("PLAIN", r"/([^{](.|\n)*)?/")

    def _calls(self, form: ToolFormat, token: Callable[[str], int | None]) -> tuple[list[str], list[str]]:
        """How an answer with calls begins and goes on, and the rules for it."""
        several = bool(form.between) and (self.parallel if self.parallel is not None else not self.is_forced)
        rules = [f"call_{at}: {_call(tool, form, token)}" for at, tool in enumerate(self.callable)]
        rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(self.callable))))
        between, closing = _literals(form.between, form.markers, token), _literals(form.closing, form.markers, token)
        repeated = f" ({between} call)*" if several else ""
        tail = f"call{repeated} {closing}".rstrip()
        if self.is_forced or self.schema is not None:
            return [f"{_literals(form.opening, form.markers, token)} {tail}".strip()], rules
        if not form.trigger:
            tag = token(form.markers[0]) if form.markers else None
            return [f"<[{tag}]>? {tail}" if tag is not None else tail], rules
        rest = _literals(form.opening[len(form.trigger) :], form.markers, token)
        tag = token(form.trigger)
        if tag is not None:
            return [f"TEXT <[{tag}]> {rest} {tail}"], rules
        rules.append(f"trigger[lazy]: TEXT {json.dumps(form.trigger)}")
        return [f"trigger {rest} {tail}"], rules


def _call(tool: Tool, form: ToolFormat, token: Callable[[str], int | None]) -> str:
    if form.separator is not None:
        return f"{json.dumps(tool.name)} {_literals(form.separator, form.markers, token)} {_json_rule(tool.parameters)}"
    # References inside the schema are relative to its root, so the definitions move to the root of the call.
    parameters = {key: value for key, value in tool.parameters.items() if key not in ("$defs", "definitions")}
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return _json_rule(
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, form.arguments_key: parameters},
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
            **definitions,
        }
    )


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**_closed(schema), **_SPACING}, ensure_ascii=False)}"


# Keys whose values map names of the user's to schemas, and keys whose values are data.
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_DATA = ("const", "enum", "required", "examples")
_SAID = ("title", "description", "default", "examples")


def _closed(schema: Mapping[str, Any], *, merged: bool = False) -> dict[str, Any]:
    """`schema` with objects closed that list their properties: the answer holds nothing beyond what was asked for.

    Members of `allOf` stay open (`merged`), as each lists a part only.
    """
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SAID:
            continue
        if key in _NAMED and isinstance(value, Mapping):
            made[key] = {name: _closed(one) if isinstance(one, Mapping) else one for name, one in value.items()}
        elif key in _DATA or not isinstance(value, Mapping | list | tuple):
            made[key] = value
        elif isinstance(value, Mapping):
            made[key] = _closed(value)
        else:
            made[key] = [_closed(one, merged=key == "allOf") if isinstance(one, Mapping) else one for one in value]
    if "properties" in made and "allOf" not in made and not merged:
        made.setdefault("additionalProperties", False)
    return made


def _literals(text: str, markers: Sequence[str], token: Callable[[str], int | None]) -> str:
    """`text` as grammar: markers that are special tokens by their id, all else quoted."""
    parts, rest = [], text
    while rest:
        at, marker = min(((rest.find(m), m) for m in markers if m in rest), default=(len(rest), ""))
        if at:
            parts.append(json.dumps(rest[:at], ensure_ascii=False))
        if marker:
            number = token(marker)
            parts.append(json.dumps(marker) if number is None else f"<[{number}]>")
        rest = rest[at + len(marker) :]
    return " ".join(parts)
