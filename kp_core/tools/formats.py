"""How model families write tool calls and reasoning.

A format is data: the text before the first call, between calls and behind the last, and how a call is written. One
grammar and one reader serve all of them, but for the channels of GPT-OSS, which have a reader of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kp_core.tools.native import braced, tagged

__all__ = ["FORMATS", "HARMONY", "THINK", "Thought", "ToolFormat", "format_of", "thought_of"]

Thought: TypeAlias = tuple[str, str]
"""What stands before reasoning at the beginning of an answer, and behind it."""


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls: `opening call (between call)* closing`.

    A call is the JSON object `{"name": ..., <arguments_key>: {...}}`, or, where `separator` is not `None`, the bare
    name, the separator and the JSON of the arguments; `before` then is what stands directly before a name. Without
    `between` there is one call at a time. `markers` may be tokens of their own in the tokenizer.

    A model that writes arguments in a language of its own has `read`, which takes them and the schema of the tool, and
    `ending`, which stands behind them: it is held to JSON only where it must call. `answer` stands before an answer
    that is no call.
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
        """What shows that a call begins; empty for formats whose answer is a call from its first character on."""
        return self.markers[0] if self.markers and self.opening.startswith(self.markers[0]) else ""

    @property
    def head(self) -> re.Pattern[str]:
        """Matches a call up to where its arguments begin; group 1 is the name."""
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
        """A call as a model is shown it."""
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
"""Hermes, Qwen 2.5 and 3, and most others; also what models without a format of their own are taught in the system
message."""

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
"""Llama 3.1 and later: the bare JSON of the call, possibly behind `<|python_tag|>`."""

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

# Between full-width bars, with low blocks for blanks.
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
"""GPT-OSS: messages in channels, of which a call is one (see `kp_core.tools.harmony`)."""

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
    """The format that the Jinja source of a chat template speaks; Hermes where it knows none."""
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
    """How a model with this chat template marks its reasoning, if it reasons; GPT-OSS has channels instead."""
    return next((marks for marks in _THOUGHTS if marks[1] in template), None)
