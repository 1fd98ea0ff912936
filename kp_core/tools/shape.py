"""The allowed form of an answer: the tools and the schema a model is offered, and the grammar made from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kp_core.errors import ToolError
from kp_core.tools.base import Tool, ToolChoice
from kp_core.tools.formats import THINK, Thought, ToolFormat

__all__ = ["AnswerShape"]

_DEEPEST = 100
"""Maximum nesting of a schema."""
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
            if _is_deep(candidate):
                raise ToolError(f"Got {name} nested more than {_DEEPEST} levels deep; expected a schema that is not.")
            try:
                json.dumps(candidate)
            except (TypeError, ValueError) as error:
                raise ToolError(f"Got {name} that is no JSON ({error}); expected a JSON Schema.") from error
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

        `token(text)` is the id of a marker that is a special token, else `None`. `thinks` allows a `<think>` block
        first; with `opened` the prompt has begun it.
        """
        options, rules = list[str](), list[str]()
        if self.callable:
            options.append(self._calls(form, token, rules))
        if self.schema is not None:
            options.append("answer")
            rules.append(f"answer: {_literals(form.answer, form, token)} {_json_rule(self.schema)}")
        elif not self.is_forced and self.callable and not form.trigger:
            options.append("PLAIN")
            rules.append(r"PLAIN: /([^{](.|\n)*)?/")
        elif not self.is_forced:
            options.append("TEXT")
            # Forbid the beginning of a call where none is allowed. A special token is no text anyway.
            bans = not self.callable and form.trigger and token(form.trigger) is None
            rules.append(f"TEXT: {_ANY}" + (f" & ~/(.|\n)*{re.escape(form.trigger)}(.|\n)*/" if bans else ""))
        start = " | ".join(options)
        # Text holds no special tokens, so even a free answer needs a rule for reasoning that begins with one.
        is_held = self.is_forced or self.schema is not None or token(THINK[1]) is not None
        if is_held and (thinks or opened):
            begin, end = (json.dumps(mark) if (at := token(mark)) is None else f"<[{at}]>" for mark in THINK)
            block = "thought_block" if token(THINK[1]) is not None else "thought_block[lazy]"
            rules = [
                f"body: {start}",
                *rules,
                f"thought: thought_block /[ \\n]*/\n{block}: {'' if opened else begin} THOUGHT_TEXT {end}",
                f"THOUGHT_TEXT: {_ANY}",
            ]
            start = ("thought" if opened else "thought?") + " body"
        return "\n".join([f"start: {start}", *rules])

    def _calls(self, form: ToolFormat, token: Callable[[str], int | None], rules: list[str]) -> str:
        """Return how an answer with calls begins and continues; adds the rules for it to `rules`."""
        several = bool(form.between) and (self.parallel if self.parallel is not None else not self.is_forced)
        rules += [f"call_{at}: {_call(tool, form, token)}" for at, tool in enumerate(self.callable)]
        rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(self.callable))))
        repeated = f" ({_literals(form.between, form, token)} call)*" if several else ""
        tail = f"call{repeated} {_literals(form.closing, form, token)}".rstrip()
        if self.is_forced or self.schema is not None:
            return f"{_literals(form.opening, form, token)} {tail}".strip()
        if not form.trigger:
            tag = token(form.markers[0]) if form.markers else None
            return f"<[{tag}]>? {tail}" if tag is not None else tail
        rest = _literals(form.opening[len(form.trigger) :], form, token)
        if (tag := token(form.trigger)) is not None:
            return f"TEXT <[{tag}]> {rest} {tail}"
        rules.append(f"trigger[lazy]: TEXT {json.dumps(form.trigger)}")
        return f"trigger {rest} {tail}"


def _call(tool: Tool, form: ToolFormat, token: Callable[[str], int | None]) -> str:
    if form.separator is not None:
        return f"{json.dumps(tool.name)} {_literals(form.separator, form, token)} {_json_rule(tool.parameters)}"
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


# Keys whose values map the user's names to schemas, keys whose values are data, and keys that constrain nothing.
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_DATA = ("const", "enum", "required")
_SAID = ("title", "description", "default", "examples")


def _closed(schema: Any, key: str = "") -> Any:  # noqa: ANN401 - a part of a JSON Schema
    """Close all objects that list their properties, so that the answer has no further ones; `schema` is under `key`.

    Members of `allOf` stay open, because each lists only a part.
    """
    if isinstance(schema, list | tuple):
        return [_closed(member, key) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    if key in _NAMED:
        return {name: _closed(member) for name, member in schema.items()}
    closed = {
        name: member if name in _DATA else _closed(member, name) for name, member in schema.items() if name not in _SAID
    }
    if "properties" in closed and "allOf" not in closed and key != "allOf":
        closed.setdefault("additionalProperties", False)
    return closed


def _literals(text: str, form: ToolFormat, token: Callable[[str], int | None]) -> str:
    """Return `text` as grammar: markers of `form` that are special tokens by their id, everything else quoted."""
    pieces = re.split(f"({'|'.join(map(re.escape, form.markers))})", text) if form.markers else [text]
    ids = {marker: token(marker) for marker in form.markers}
    return " ".join(
        json.dumps(piece, ensure_ascii=False) if ids.get(piece) is None else f"<[{ids[piece]}]>"
        for piece in pieces
        if piece
    )


def _is_deep(schema: object, depth: int = 0) -> bool:
    members = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list | tuple) else ()
    return depth > _DEEPEST or any(_is_deep(member, depth + 1) for member in members)
