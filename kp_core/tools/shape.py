"""The allowed form of an answer: the tools and the schema a model is offered, and the grammar made from them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeGuard

from kp_core.errors import PromptError
from kp_core.tools.base import Tool, ToolChoice
from kp_core.tools.formats import THINK, Thought, ToolFormat

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
        schema: Mapping[str, Any] | type | bool | None = None,
        parallel: bool | None = None,
    ) -> AnswerShape:
        """Read the shape from the options of a request; raises `PromptError` for contradictions."""
        offered = tuple(Tool.of(tool) for tool in tools)
        names = [tool.name for tool in offered]
        if len(set(names)) < len(names):
            raise PromptError(f"Got the tools {', '.join(names)}; expected a different name for each.")
        choices = ("auto", "none", "any", *names) if names else ("auto", "none")
        if choice not in choices:
            raise PromptError(f"Got tool_choice={choice!r}; expected one of: {', '.join(choices)}.")
        if schema is not None and choice not in ("auto", "none"):
            raise PromptError(
                f"Got response_schema with tool_choice={choice!r}; an answer is a call or an object, not both."
            )
        if schema is True:
            schema = {"type": "object"}
        elif isinstance(schema, type) and hasattr(schema, "model_json_schema"):  # A class of Pydantic.
            schema = schema.model_json_schema()
        if schema is not None and not isinstance(schema, Mapping):
            raise PromptError(
                f"Got response_schema={schema!r}; expected a JSON Schema, a Pydantic class, or True for any object."
            )
        for name, candidate in (("response_schema", schema), *((tool.name, tool.parameters) for tool in offered)):
            if _is_deep(candidate):
                raise PromptError(f"Got {name} nested more than {_DEEPEST} levels deep; expected a schema that is not.")
            try:
                json.dumps(candidate)
            except (TypeError, ValueError) as error:
                raise PromptError(f"Got {name} that is no JSON ({error}); expected a JSON Schema.") from error
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
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, form.arguments_key: tool.parameters},
        "required": ["name", form.arguments_key],
    }
    # References in the parameters are relative to the parameters.
    return _json_rule(call, f"#/properties/{form.arguments_key}")


def _json_rule(schema: Mapping[str, Any], root: str = "#") -> str:
    return f"%json {json.dumps({**_closed(schema, root), **_SPACING}, ensure_ascii=False)}"


def refused_part(grammar: str, compiles: Callable[[str], bool]) -> str:
    """Where the schema is that keeps `grammar` from compiling: the tool, if it is one, and a JSON pointer.

    Empty if no single part is at fault.
    """
    for rule in grammar.split("\n"):
        head, is_schema, text = rule.partition("%json ")
        if not is_schema or compiles(f"start: {rule.partition(': ')[2]}"):
            continue
        schema = json.loads(text)
        path = _faulty(schema, schema, compiles)
        if not head.startswith("call_"):
            return f"at {_pointer(path)} of the answer's schema"
        named = re.search(r'"(?:[^"\\]|\\.)*"', head)
        tool = json.loads(named[0]) if named else schema["properties"]["name"]["const"]
        return f"at {_pointer(path if named else path[2:])} of the parameters of the tool {tool!r}"
    return ""


def _faulty(schema: Any, part: Any, compiles: Callable[[str], bool]) -> list[str]:  # noqa: ANN401 - parts of a JSON Schema
    """The path to the deepest part of `part` without which `schema` compiles."""
    # Definitions first: what refers to them is at fault too.
    keys = sorted(part, key=lambda key: key not in _NAMED[1:3]) if isinstance(part, dict) else range(len(part))
    for key in keys:
        member = part[key]
        if key in _DATA or not isinstance(member, dict | list):
            continue
        rest: list[str] | None
        if key in _NAMED or isinstance(member, list):  # These hold schemas, and are none.
            rest = _faulty(schema, member, compiles)
        else:
            part[key] = {}
            is_at_fault = compiles(f"start: %json {json.dumps(schema)}")
            part[key] = member
            rest = _faulty(schema, member, compiles) if is_at_fault else None
        if rest or (rest is not None and key not in _NAMED and not isinstance(member, list)):
            return [str(key), *rest]
    return []


def _pointer(path: Iterable[str]) -> str:
    return "#" + "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in path)


# Keys whose values map the user's names to schemas, keys whose values are data, and keys that constrain nothing.
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_DATA = ("const", "enum", "required")
_SAID = ("title", "description", "default", "examples")
# The formats that a grammar can hold a string to. JSON Schema takes all others for annotations.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")


def _closed(schema: Any, root: str, key: str = "") -> Any:  # noqa: ANN401 - a part of a JSON Schema
    """The part of a schema that a grammar enforces; `schema` is under `key`, and `root` is what references start from.

    All objects that list their properties are closed, so that the answer has no further ones. Members of `allOf` stay
    open, because each lists only a part.
    """
    if isinstance(schema, list | tuple):
        return [_closed(member, root, key) for member in schema]
    if not isinstance(schema, Mapping):
        return root + schema[1:] if key == "$ref" and isinstance(schema, str) and schema.startswith("#") else schema
    if key in _NAMED:
        return {name: _closed(member, root) for name, member in schema.items()}
    choices = [name for name in ("anyOf", "oneOf") if name in schema] if "properties" in schema else []
    closed = {
        name: member if name in _DATA else _closed(member, root, "allOf" if name in choices else name)
        for name, member in schema.items()
        if name not in _SAID and (name != "format" or member in _FORMATS)
    }
    _exclude_bounds(closed)
    if "properties" in closed and "allOf" not in closed and key != "allOf":
        if len(choices) == 1 and all(map(_is_part, closed[choices[0]])):
            _close_members(closed, choices[0])
        else:
            closed.setdefault("additionalProperties", False)
    return closed


def _is_part(schema: object) -> bool:
    return isinstance(schema, dict) and not schema.keys() - {"type", "properties", "required", "additionalProperties"}


def _close_members(schema: dict[str, Any], name: str) -> None:
    """Close the members of `anyOf` or `oneOf` beside properties instead of `schema`: each lists only what it adds.

    Members of `oneOf` that require different properties exclude those of each other, so that one alone is true.
    """
    members = schema[name]
    needed = [set(member.get("required", ())) for member in members]
    others = [set[str]().union(*needed[:at], *needed[at + 1 :]) - own for at, own in enumerate(needed)]
    is_apart = name == "oneOf" and all(a - b for a, b in permutations(needed, 2))
    for member, foreign in zip(members, others, strict=True):
        if is_apart or "additionalProperties" not in schema:
            properties = {**dict.fromkeys(schema["properties"], True), **member.get("properties", {})}
            left_out = foreign if is_apart else ()
            member["properties"] = {key: each for key, each in properties.items() if key not in left_out}
            member["additionalProperties"] = False
    if is_apart:
        schema["anyOf"] = schema.pop(name)


def _exclude_bounds(schema: dict[str, Any]) -> None:
    """Replace excluded bounds that an answer may be read as: 150.000000000000001 is 150 to all who read floats.

    A whole bound within one of the other bound is replaced on either side: there, llguidance allows it itself.
    """
    for excluded, included, others, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        bound = schema.get(excluded)
        if isinstance(bound, bool) or not _is_float(bound):
            continue
        gaps = [sign * (schema[name] - bound) for name in others if _is_float(schema.get(name))]
        if 0 < sign * bound < 1e15:  # Integers keep theirs.
            inside = bound * (1 + 1e-15)
        elif gaps and 0 < min(gaps) < 1 and float(bound).is_integer():
            inside = bound + sign * min(1e-6, min(gaps) / 1000)
        else:
            continue
        del schema[excluded]
        other = schema.get(included)
        if not isinstance(other, int | float) or (inside > other if sign > 0 else inside < other):
            schema[included] = inside


def _is_float(number: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold."""
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max


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
