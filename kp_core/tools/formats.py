"""How each model family writes tool calls and reasoning, as data.

A `ToolFormat` is the text before the first call, between calls and after the last, and the form of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

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
    has at most one call. `markers` may be special tokens. For a model that writes arguments in its own syntax, `read`
    parses them, given the schema of the tool, and `ending` stands behind them. `answer` stands before an answer without
    a call.
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

LLAMA4 = replace(LLAMA3, name="llama4", markers=("<|python_start|>", "<|python_end|>"))
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


def _gemma(name: str, begin: str, end: str, quote: str) -> ToolFormat:
    return ToolFormat(
        name,
        opening=f"{begin}call:",
        between=f"{end}{begin}call:",
        closing=end,
        separator="",
        before="call:",
        markers=(begin, end, quote),
        read=braced(quote),
        ending=end,
    )


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
"""Gemma 4: `call:name{key:value}`, with strings between `<|"|>`."""

FUNCTION_GEMMA = _gemma("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>")
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
