"""Tools, schemas and reasoning: what a model is offered, the allowed form of its answer, and how answers are read.

A model family writes tool calls and reasoning in a form of its own. A `ToolFormat` describes it as data: the text
before the first call, between calls and after the last, and the form of a call. From it `AnswerShape` makes the grammar
of an answer, and `AnswerReader` splits the text of an answer into visible text, reasoning and tool calls, piece by
piece. The channels of GPT-OSS have a reader of their own.

The parser of transformers (`tokenizer.get_response_parser`) does not serve here. It raises for a call that the token
limit cut off and for a string that holds the mark at the end of calls, and needs a second description of each format.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from kp_core.errors import ToolError

__all__ = [
    "FORMATS",
    "HARMONY",
    "THINK",
    "AnswerReader",
    "AnswerShape",
    "Delta",
    "HarmonyReader",
    "JsonScan",
    "Thought",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolFormat",
    "braced",
    "format_of",
    "tagged",
    "thought_of",
]

ToolChoice: TypeAlias = str
"""`"auto"`: the model decides; `"any"`: it must call a tool; `"none"`: it may not; else the name of the tool to
call."""

_DEEPEST = 100
"""Maximum nesting of a schema."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_ID_ALPHABET = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; `parameters` is the JSON Schema of its arguments, an object.

    Raises `ToolError` for other parameters.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)

    def __post_init__(self) -> None:
        parameters = self.parameters
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise ToolError(f"Got parameters {parameters!r} of {self.name!r}; expected a JSON Schema of an object.")
        # Without a type, the schema would also accept a string.
        object.__setattr__(self, "parameters", {"type": "object", **parameters})

    @classmethod
    def of(cls, tool: Mapping[str, Any] | Tool) -> Tool:
        """Read a tool from `{"type": "function", "function": {...}}`, or from the inner mapping alone.

        Raises `ToolError` for anything else.
        """
        if isinstance(tool, Tool):
            return tool
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ToolError(
                f"Got the tool {tool!r}; expected {{'type': 'function', 'function': {{'name': ..., 'description': ..., "
                "'parameters': <JSON Schema>}}."
            )
        return cls(function["name"], function.get("description") or "", function.get("parameters") or _NO_PARAMETERS)

    def to_dict(self) -> dict[str, Any]:
        """Return the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a model; `arguments` are parsed JSON."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of call number `index`; the first piece has `id` and `name`, and all `arguments` join to JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """One step of a streamed answer: visible text, reasoning, or a piece of a tool call."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True)
class JsonScan:
    """Progress of scanning JSON: whether inside a string, whether behind a backslash there, and the bracket depth.

    `end` is the position in the last piece behind the bracket that closed the outermost one.
    """

    inside: bool = False
    escaped: bool = False
    depth: int = 0
    end: int | None = None

    def feed(self, piece: str) -> JsonScan:
        """Return the scan after `piece`."""
        inside, escaped, depth, end = self.inside, self.escaped, self.depth, None
        for at, sign in enumerate(piece, 1):
            if escaped:
                escaped = False
            elif inside:
                inside, escaped = sign != '"', sign == "\\"
            elif sign == '"':
                inside = True
            elif sign in "{[":
                depth += 1
            elif sign in "}]":
                depth -= 1
                end = at if depth == 0 and end is None else end
        return JsonScan(inside, escaped, depth, end)


def _new_call_id() -> str:
    """Return a random id of nine letters and digits, as the strictest template family demands."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


def _is_deep(schema: object, depth: int = 0) -> bool:
    """Whether lists and mappings are nested more than `_DEEPEST` levels deep."""
    members = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list | tuple) else ()
    return depth > _DEEPEST or any(_is_deep(member, depth + 1) for member in members)


_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BARE_KEY = re.compile(r"(?<=[{,])(\s*)([^\s\"{}\[\],:]+)(\s*:)")


def braced(quote: str) -> Callable[[str, Mapping[str, Any]], Mapping[str, Any]]:
    """Return a parser of `{key:value}`, where `quote` marks strings instead of JSON's quotes; it also takes JSON."""

    def read(text: str, _: Mapping[str, Any]) -> Mapping[str, Any]:
        pieces = text.split(quote) if quote else [text]
        if len(pieces) > 1 or not _is_json(text):
            pieces[::2] = [_BARE_KEY.sub(r'\1"\2"\3', piece) for piece in pieces[::2]]
            pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
        return _object("".join(pieces))

    return read


def tagged(text: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse `<parameter=key>`, value, `</parameter>`, or JSON; `schema` says which values are strings."""
    if text.lstrip().startswith("{"):
        return _object(text)
    if _PARAMETER.sub("", text).strip():
        raise ValueError(f"Got {text!r}; expected parameters.")
    properties = schema.get("properties") or {}
    return {key: _value(value, properties.get(key)) for key, value in _PARAMETER.findall(text)}


def _value(text: str, schema: object) -> Any:  # noqa: ANN401 - JSON of any shape
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    return json.loads(text) if _is_json(text) else text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _object(text: str) -> Mapping[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"Got {text!r}; expected an object.")  # noqa: TRY004 - it is text that cannot be read
    return value


Thought: TypeAlias = tuple[str, str]
"""The marks before and after reasoning at the beginning of an answer."""


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls: `opening call (between call)* closing`.

    A call is the JSON object `{"name": ..., <arguments_key>: {...}}`. With a `separator`, it is the bare name, the
    separator and the JSON of the arguments; `before` then stands directly before a name. Without `between` an answer
    has at most one call. `markers` may be special tokens of the tokenizer.

    Some models write arguments in a syntax of their own. `read` then parses the arguments, given also the schema of the
    tool, and `ending` stands behind them. Such a model must write JSON only if it must call a tool. `answer` stands
    before an answer without a call.
    """

    name: str
    opening: str
    between: str
    closing: str
    arguments_key: str = "arguments"
    separator: str | None = None
    before: str = ""
    markers: tuple[str, ...] = ()
    read: Callable[[str, Mapping[str, Any]], Mapping[str, Any]] | None = None
    ending: str = ""
    answer: str = ""

    @property
    def trigger(self) -> str:
        """The text that shows that a call begins; empty if a call begins the answer without one."""
        return self.markers[0] if self.markers and self.opening.startswith(self.markers[0]) else ""

    @property
    def head(self) -> re.Pattern[str]:
        """Matches a call up to the beginning of its arguments; group 1 is the name."""
        if self.separator is not None:
            before = re.escape(self.before)
            lead = rf"\s*+(?:(?!{before})|.*?{before})" if before else ""
            behind = "" if self.read and self.separator else "(?={)"
            return re.compile(rf"{lead}\s*([^\s\[{{<>]+?)\s*{re.escape(self.separator.strip())}\s*{behind}", re.DOTALL)
        return re.compile(
            rf'[\s,;\[]*{{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"{self.arguments_key}"\s*:\s*(?={{)', re.DOTALL
        )

    @property
    def example(self) -> str:
        """An example of a call to show the model."""
        name, arguments = "<the name of the tool>", "<its arguments>"
        call = f'{{"name": {name}, "{self.arguments_key}": {arguments}}}'
        if self.separator is not None:
            call = f"{name}{self.separator}{arguments}"
        return f"{self.opening}{call}{self.closing}"


HERMES = ToolFormat(
    "hermes",
    opening="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen 2.5 and 3, and most others; the system message also teaches it to models without a format of their
own."""

QWEN_TAGS = ToolFormat(
    "qwen-tags",
    opening="<tool_call>\n<function=",
    between="\n</function>\n</tool_call>\n<tool_call>\n<function=",
    closing="\n</function>\n</tool_call>",
    separator=">\n",
    before="<function=",
    markers=("<tool_call>", "</tool_call>"),
    read=tagged,
    ending="</function>",
)
"""Qwen3-Coder and Qwen 3.5: `<function=name>`, and a `<parameter=key>` for each argument."""

LLAMA3 = ToolFormat(
    "llama3", opening="", between="; ", closing="", arguments_key="parameters", markers=("<|python_tag|>",)
)
"""Llama 3.1 and later: the bare JSON of the call, possibly after `<|python_tag|>`."""

LLAMA4 = ToolFormat(
    "llama4",
    opening="",
    between="; ",
    closing="",
    arguments_key="parameters",
    markers=("<|python_start|>", "<|python_end|>"),
)
"""Llama 4: as Llama 3, possibly between `<|python_start|>` and `<|python_end|>`."""

MISTRAL = ToolFormat("mistral", opening="[TOOL_CALLS] [", between=", ", closing="]", markers=("[TOOL_CALLS]",))
"""Mistral up to its version 7 tokenizer: a JSON list of calls."""

MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    opening="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    closing="",
    separator="[ARGS]",
    before="[TOOL_CALLS]",
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
"""Later Mistral models: `[TOOL_CALLS]name[ARGS]{...}` for each call."""

# The names stand between full-width bars, with low blocks for blanks.
_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP = (
    f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")
    for name in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)
_DEEPSEEK = (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END)

DEEPSEEK = ToolFormat(
    "deepseek",
    opening=f"{_CALLS}{_CALL}function{_SEP}",
    between=f"\n```{_CALL_END}\n{_CALL}function{_SEP}",
    closing=f"\n```{_CALL_END}{_CALLS_END}",
    separator="\n```json\n",
    before=f"{_CALL}function{_SEP}",
    markers=_DEEPSEEK,
)
"""DeepSeek V3 and R1: the arguments in a code block."""

DEEPSEEK_31 = ToolFormat(
    "deepseek-3.1",
    opening=f"{_CALLS}{_CALL}",
    between=f"{_CALL_END}{_CALL}",
    closing=f"{_CALL_END}{_CALLS_END}",
    separator=_SEP,
    before=_CALL,
    markers=_DEEPSEEK,
)
"""DeepSeek V3.1 and later."""

GEMMA4 = ToolFormat(
    "gemma4",
    opening="<|tool_call>call:",
    between="<tool_call|><|tool_call>call:",
    closing="<tool_call|>",
    separator="",
    before="call:",
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    read=braced('<|"|>'),
    ending="<tool_call|>",
)
"""Gemma 4: `call:name{key:value}`, with strings between `<|"|>`."""

FUNCTION_GEMMA = ToolFormat(
    "function-gemma",
    opening="<start_function_call>call:",
    between="<end_function_call><start_function_call>call:",
    closing="<end_function_call>",
    separator="",
    before="call:",
    markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    read=braced("<escape>"),
    ending="<end_function_call>",
)
"""FunctionGemma: as Gemma 4, with other marks."""

HARMONY = ToolFormat(
    "harmony",
    opening="<|channel|>commentary to=functions.",
    between="",
    closing="",
    separator=" <|constrain|>json<|message|>",
    markers=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"),
    read=braced(""),
    ending="<|call|>",
    answer="<|channel|>final<|message|>",
)
"""GPT-OSS: messages in channels; a call is one of them (see `HarmonyReader`)."""

FORMATS = (
    HERMES,
    QWEN_TAGS,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    MISTRAL_ARGS,
    DEEPSEEK,
    DEEPSEEK_31,
    GEMMA4,
    FUNCTION_GEMMA,
    HARMONY,
)

THINK: Thought = ("<think>", "</think>")
_THOUGHTS: tuple[Thought, ...] = (THINK, ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))


def format_of(template: str) -> ToolFormat:
    """Return the tool-call format in the Jinja source of a chat template; Hermes if there is none."""
    signs = (
        ("<|channel|>", HARMONY),
        ("<|tool_call>", GEMMA4),
        ("<start_function_call>", FUNCTION_GEMMA),
        (_CALLS, DEEPSEEK if "```json" in template else DEEPSEEK_31),
        ("[TOOL_CALLS]", MISTRAL_ARGS if "[ARGS]" in template else MISTRAL),
        ("<function=", QWEN_TAGS),
        ("<tool_call>", HERMES),
        ("<|python_start|>", LLAMA4),
        ("<|python_tag|>", LLAMA3),
        ('"parameters": ', LLAMA3),
    )
    return next((form for sign, form in signs if sign in template), HERMES)


def thought_of(template: str) -> Thought | None:
    """Return the reasoning marks of a model with this chat template, or `None`; GPT-OSS has channels instead."""
    return next((marks for marks in _THOUGHTS if marks[1] in template), None)


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

        `token(text)` is the id of a marker that is a special token, else `None`. `thinks` allows a `<think>` block at
        the beginning; with `opened` the prompt has already begun it.
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


class AnswerReader:
    """Reads an answer while it is written.

    `form` is the format of calls, or `None` without tools: then markup is text. `tools` maps the callable tools to
    their parameters. `thought` marks reasoning; `opened` means that the prompt ends inside a `<think>` block. The
    reader holds back text that may still become markup, so it never has to revoke a piece.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        *,
        thought: Thought | None = None,
        opened: bool = False,
    ) -> None:
        self._form, self._tools = form, tools
        self._buffer = ""
        self._thinks = thought is not None or opened
        self._open, self._close = thought or THINK
        self._step: Callable[[], Iterator[Delta]] = self._reasoning if opened else self._begin
        self._scan = JsonScan()
        self._call: tuple[str, str, list[str]] = ("", "", [])  # Id, name and pieces of the arguments of an open call.
        self.text, self.reasoning = "", ""
        self.calls: list[ToolCall] = []

    def push(self, piece: str) -> list[Delta]:
        """Add `piece`; return everything that is certain now."""
        self._buffer += piece
        return self._run()

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the answer.

        An incomplete call is dropped, and so is an incomplete mark before a call if more than half of it is there.
        """
        deltas = self._run()
        if self._step == self._native:
            deltas += self._native(is_over=True)
        rest, self._buffer = self._buffer, ""
        if self._step == self._reasoning:
            return [*deltas, *self._think(rest)]
        if self._step in (self._begin, self._text):
            if 2 * (begun := _begun(rest, self._trigger)) > len(self._trigger):
                rest = rest[: len(rest) - begun].rstrip()
            return [*deltas, *self._say(rest)]
        return deltas

    @property
    def _trigger(self) -> str:
        return self._form.trigger if self._form is not None else ""

    def _run(self) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            step, before = self._step, len(self._buffer)
            deltas += step()
            if self._step == step and len(self._buffer) == before:
                return deltas

    def _begin(self) -> Iterator[Delta]:
        """At the start of the answer: it may be reasoning, a bare call, or text."""
        lead = self._buffer.lstrip()
        if self._thinks and lead.startswith(self._open):
            self._buffer, self._step = lead[len(self._open) :], self._reasoning
        elif self._thinks and self._open.startswith(lead):
            return
        elif self._form is not None and not self._form.trigger:
            self._begin_bare(self._form, lead)
        elif lead or not self._thinks:
            self._step = self._text
        yield from ()

    def _begin_bare(self, form: ToolFormat, lead: str) -> None:
        """For formats without an opening: the answer is a call if it begins like a call of an existing tool."""
        lead = lead.removeprefix(form.markers[0]).lstrip() if form.markers else lead
        head = form.head.match(lead)
        if head is not None:
            if json.loads(f'"{head[1]}"') in self._tools:
                self._buffer, self._step = lead, self._head
            else:
                self._step, self._form = self._text, None
        elif lead and not ('{"name":"'.startswith("".join(lead.split())[:9]) and lead.count('"') < 8):
            self._step, self._form = self._text, None  # It cannot go on to be the head of a call.

    def _reasoning(self) -> Iterator[Delta]:
        self._buffer = self._buffer if self.reasoning else self._buffer.lstrip("\n")
        thought, is_over = self._until(self._close)
        if is_over:
            thought = thought.rstrip("\n")
            self._step, self._thinks = self._after_thought, False
        yield from self._think(thought)

    def _after_thought(self) -> Iterator[Delta]:
        """Skip blank lines between reasoning and answer."""
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._step = self._begin
        yield from ()

    def _text(self) -> Iterator[Delta]:
        if self._trigger:
            text, calls = self._until(self._trigger)
            if calls:
                text, self._step = text.rstrip(), self._head
        else:
            text, self._buffer = self._buffer, ""
        yield from self._say(text)

    def _head(self) -> Iterator[Delta]:
        """Before a call: the next thing is a name."""
        if self._form is None:
            raise AssertionError("calls are read in a format")
        for marker in (self._form.trigger, self._form.closing.strip()):
            lead = self._buffer.lstrip()
            if marker and lead.startswith(marker):
                self._buffer = lead[len(marker) :]
        head = self._form.head.match(self._buffer)
        if head is None:
            return
        name = json.loads(f'"{head[1]}"') if self._form.separator is None else head[1]
        step = self._arguments if self._form.read is None else self._native
        self._buffer, self._step, self._scan = self._buffer[head.end() :], step, JsonScan()
        self._call = (_new_call_id(), name, [])
        yield Delta(tool_call=ToolCallDelta(len(self.calls), self._call[0], name))

    def _arguments(self) -> Iterator[Delta]:
        identity, name, pieces = self._call
        self._scan = self._scan.feed(self._buffer)
        end = self._scan.end
        piece, self._buffer = (self._buffer, "") if end is None else (self._buffer[:end], self._buffer[end:])
        if piece:
            pieces.append(piece)
            yield Delta(tool_call=ToolCallDelta(len(self.calls), arguments=piece))
        if end is not None:
            # Without a grammar, arguments may be invalid JSON; then there is no call.
            with suppress(ValueError):
                self.calls.append(ToolCall(identity, name, json.loads("".join(pieces))))
            self._step = self._between

    def _native(self, *, is_over: bool = False) -> Iterator[Delta]:
        """Inside a call with arguments in a syntax of its own: parse them when they are complete."""
        if self._form is None or self._form.read is None:
            raise AssertionError("arguments are read in a format")
        identity, name, _ = self._call
        ends = [match.span() for match in re.finditer(re.escape(self._form.ending), self._buffer)]
        for stop, rest in [*ends, (len(self._buffer), len(self._buffer))] if is_over else ends:
            try:
                arguments = self._form.read(self._buffer[:stop].strip(), self._tools.get(name, {}))
            except ValueError:  # The ending stood inside a string.
                continue
            yield Delta(tool_call=ToolCallDelta(len(self.calls), arguments=json.dumps(arguments)))
            self.calls.append(ToolCall(identity, name, arguments))
            self._step, self._buffer = self._head, self._buffer[rest:]
            return

    def _between(self) -> Iterator[Delta]:
        """After the arguments: skip the brace that ends the call, if the format has one."""
        if self._form is not None and self._form.separator is not None:
            self._step = self._head
        elif self._buffer.lstrip().startswith("}"):
            self._buffer, self._step = self._buffer.lstrip()[1:], self._head
        yield from ()

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take the text before `mark`; without the mark, keep trailing blanks and what may be its beginning."""
        before, separator, after = self._buffer.partition(mark)
        if separator:
            self._buffer = after
            return before, True
        stop = len(self._buffer[: len(self._buffer) - _begun(self._buffer, mark)].rstrip())
        before, self._buffer = self._buffer[:stop], self._buffer[stop:]
        return before, False

    def _say(self, text: str) -> Iterator[Delta]:
        if text:
            self.text += text
            yield Delta(text=text)

    def _think(self, text: str) -> Iterator[Delta]:
        if text:
            self.reasoning += text
            yield Delta(reasoning=text)


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin `mark`."""
    return next((n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n])), 0)


_END, _MESSAGE = "<|end|>", "<|message|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")


class HarmonyReader(AnswerReader):
    """Reads the channels of GPT-OSS ("Harmony").

    An answer is a sequence of messages, each `<|channel|>name ... <|message|>content<|end|>`. The channel `analysis` is
    reasoning, a message with a recipient (`to=functions.name`) is a call, and all others are text.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(HARMONY, tools, thought=("", _END))
        self._step = self._head

    def finish(self) -> list[Delta]:
        """See `AnswerReader.finish`."""
        if self._step == self._head and self._is_first and not self._buffer.lstrip().startswith("<"):
            self._step = self._text
        return super().finish()

    @property
    def _is_first(self) -> bool:
        return not (self.text or self.reasoning or self.calls)

    @property
    def _trigger(self) -> str:
        return _END

    def _begin(self) -> Iterator[Delta]:
        """A message header follows the arguments of a call, as after every message."""
        return self._head()

    def _after_thought(self) -> Iterator[Delta]:
        self._step = self._head
        yield from ()

    def _head(self) -> Iterator[Delta]:
        """Read up to the content of a message; an answer without a header is text."""
        lead = self._buffer.lstrip()
        if self._is_first and lead and not any(sign.startswith(lead) or lead.startswith(sign) for sign in _BEGINNINGS):
            self._step = self._text
            return
        head, separator, rest = self._buffer.partition(_MESSAGE)
        if not separator:
            return
        self._buffer = rest
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient is not None and recipient[1] in self._tools:
            self._step, self._call = self._native, (_new_call_id(), recipient[1], [])
            yield Delta(tool_call=ToolCallDelta(len(self.calls), self._call[0], recipient[1]))
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._step = self._reasoning
            yield from self._think("\n" if self.reasoning else "")
        else:
            self._step = self._text
            yield from self._say("\n\n" if self.text else "")
