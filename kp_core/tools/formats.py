"""How model families write tool calls.

A format is data: the text before the first call, between calls and behind the last, and the key of the arguments. One
grammar and one reader serve all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["FORMATS", "ToolFormat", "format_of"]


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls: `opening call (between call)* closing`.

    A call is the JSON object `{"name": ..., <arguments_key>: {...}}`, or, where `separator` is set, the bare name, the
    separator and the JSON of the arguments. `markers` may be tokens of their own in the tokenizer.
    """

    name: str
    opening: str
    between: str
    closing: str
    arguments_key: str = "arguments"
    separator: str = ""
    markers: tuple[str, ...] = ()

    @property
    def trigger(self) -> str:
        """What shows that a call begins; empty for formats whose answer is a call from its first character on."""
        return self.markers[0] if self.markers and self.opening.startswith(self.markers[0]) else ""

    @property
    def head(self) -> re.Pattern[str]:
        """Matches a call up to where its arguments begin; group 1 is the name."""
        if self.separator:
            return re.compile(rf"\s*([^\s\[{{]+?)\s*{re.escape(self.separator)}\s*(?={{)")
        return re.compile(
            rf'[\s,;\[]*{{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"{self.arguments_key}"\s*:\s*(?={{)', re.DOTALL
        )


HERMES = ToolFormat(
    "hermes",
    opening="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen and most others; also what models without a format of their own are taught in the system message."""

LLAMA3 = ToolFormat(
    "llama3", opening="", between="; ", closing="", arguments_key="parameters", markers=("<|python_tag|>",)
)
"""Llama 3.1 and later: the bare JSON of the call, possibly behind `<|python_tag|>`."""

MISTRAL = ToolFormat("mistral", opening="[TOOL_CALLS] [", between=", ", closing="]", markers=("[TOOL_CALLS]",))
"""Mistral up to its version 7 tokenizer: a JSON list of calls."""

MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    opening="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    closing="",
    separator="[ARGS]",
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
"""Later Mistral models: `[TOOL_CALLS]name[ARGS]{...}` for each call."""

FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)


def format_of(template: str) -> ToolFormat:
    """The format that the Jinja source of a chat template speaks; Hermes where it knows none."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": ' in template):
        return LLAMA3
    return HERMES
