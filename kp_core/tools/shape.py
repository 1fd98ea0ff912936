"""The required form of an answer, and the grammar that enforces it.

The grammar is in the Lark dialect of llguidance, with JSON Schemas inside it; the engine compiles it for its tokenizer.
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

# The spacing of `json.dumps`, which chat templates show models. With free spacing, small models may pad forever.
_SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANY = r"/(.|\n)*/"


@dataclass(frozen=True)
class AnswerShape:
    """The offered tools, whether one must be called, and the JSON Schema of the answer, if any.

    `parallel` allows several calls in one answer; the default allows them only if the model decides whether to call.
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
        """Read the shape from the options of a request; raises `ToolError` for contradictions."""
        offered = tuple(Tool.of(tool) for tool in tools)
        names = [tool.name for tool in offered]
        if len(set(names)) < len(names):
            raise ToolError(f"Got the tools {', '.join(names)}; expected a different name for each.")
        choices = ("auto", "none", "any", *names) if names else ("auto", "none")
        if choice not in choices:
            raise ToolError(f"Got tool_choice={choice!r}; expected one of: {', '.join(choices)}.")
        if schema is not None and choice not in ("auto", "none"):
            raise ToolError(
                f"Got response_schema with tool_choice={choice!r}; an answer is a call or an object, not both."
            )
        if schema is True:
            schema = {"type": "object"}
        if schema is not None and not isinstance(schema, Mapping):
            raise ToolError(f"Got response_schema={schema!r}; expected a JSON Schema, or True for any object.")
        for name, candidate in (("response_schema", schema), *((tool.name, tool.parameters) for tool in offered)):
            if is_deep(candidate):
                raise ToolError(f"Got {name} nested more than {DEEPEST} levels deep; expected a schema that is not.")
            try:
                json.dumps(candidate)
            except (TypeError, ValueError) as error:
                raise ToolError(f"Got {name} that JSON cannot say ({error}); expected a JSON Schema.") from error
        return cls(offered, choice, parallel, schema)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called; with `"none"` the tools are only shown."""
        if self.choice == "none":
            return ()
        chosen = tuple(tool for tool in self.tools if tool.name == self.choice)
        return chosen or self.tools

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.tools) and self.choice not in ("auto", "none")

    def is_free(self, form: ToolFormat, thought: Thought | None) -> bool:
        """Whether any text is allowed: a model with its own syntax for calls or reasoning is not held to a grammar."""
        is_own = form.read is not None or thought not in (None, THINK)
        return self.schema is None and (not self.tools or (is_own and not self.is_forced))

    def grammar(self, form: ToolFormat, token: Callable[[str], int | None], *, thinks: bool, opened: bool) -> str:
        """Return the Lark grammar of answers of this shape, with calls in `form`.

        `token(text)` is the id of a marker that is a special token, else `None`. `thinks` allows a `<think>` block at
        the beginning; with `opened` the prompt has already begun it.
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
        # Text holds no special tokens, so even a free answer needs a rule for reasoning that begins with one.
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
        """Return the text of an answer without calls, as the name of a terminal and its pattern."""
        if not self.callable:
            # Forbid the beginning of a call. A trigger that is a special token is no text anyway.
            bans = form.trigger and token(form.trigger) is None
            return "TEXT", f"{_ANY} & ~/(.|\n)*{re.escape(form.trigger)}(.|\n)*/" if bans else _ANY
        return ("TEXT", _ANY) if form.trigger else ("PLAIN", r"/([^{](.|\n)*)?/")

    def _calls(self, form: ToolFormat, token: Callable[[str], int | None]) -> tuple[list[str], list[str]]:
        """Return how an answer with calls begins and continues, and the rules for it."""
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


# Keys whose values map the user's names to schemas, and keys whose values are data.
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_DATA = ("const", "enum", "required", "examples")
_SAID = ("title", "description", "default", "examples")


def _closed(schema: Mapping[str, Any], *, merged: bool = False) -> dict[str, Any]:
    """Close all objects of `schema` that list their properties, so that the answer has no further properties.

    Members of `allOf` stay open (`merged`), because each lists only a part.
    """
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SAID:
            continue
        if key in _NAMED and isinstance(value, Mapping):
            closed[key] = {
                name: _closed(inner) if isinstance(inner, Mapping) else inner for name, inner in value.items()
            }
        elif key in _DATA or not isinstance(value, Mapping | list | tuple):
            closed[key] = value
        elif isinstance(value, Mapping):
            closed[key] = _closed(value)
        else:
            closed[key] = [
                _closed(inner, merged=key == "allOf") if isinstance(inner, Mapping) else inner for inner in value
            ]
    if "properties" in closed and "allOf" not in closed and not merged:
        closed.setdefault("additionalProperties", False)
    return closed


def _literals(text: str, markers: Sequence[str], token: Callable[[str], int | None]) -> str:
    """Return `text` as grammar: markers that are special tokens by their id, everything else quoted."""
    literals, rest = [], text
    while rest:
        at, marker = min(((rest.find(m), m) for m in markers if m in rest), default=(len(rest), ""))
        if at:
            literals.append(json.dumps(rest[:at], ensure_ascii=False))
        if marker:
            number = token(marker)
            literals.append(json.dumps(marker) if number is None else f"<[{number}]>")
        rest = rest[at + len(marker) :]
    return " ".join(literals)
