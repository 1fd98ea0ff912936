"""What a model may call, what it called, and the pieces of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kp_core.errors import PromptError
from kp_core.tools.logprobs import TokenLogprob

ToolChoice: TypeAlias = str
"""`"auto"`: the model decides; `"any"`: it must call a tool; `"none"`: it may not; else the name of the tool to
call."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; `parameters` is the JSON Schema of its arguments, an object.

    Raises `PromptError` for other parameters.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    marked: bool = field(default=False, compare=False)
    """Whether the KV of the system message with the tools is to be kept; read from a true `cache_control`."""

    def __post_init__(self) -> None:
        parameters = self.parameters
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise PromptError(f"Got parameters {parameters!r} of {self.name!r}; expected a JSON Schema of an object.")
        # Without a type, the schema would also accept a string.
        object.__setattr__(self, "parameters", {"type": "object", **parameters})

    @classmethod
    def of(cls, tool: Mapping[str, Any] | Tool) -> Tool:
        """Read a tool from `{"type": "function", "function": {...}}`, or from the inner mapping alone.

        Raises `PromptError` for anything else.
        """
        if isinstance(tool, Tool):
            return tool
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise PromptError(
                f"Got the tool {tool!r}; expected {{'type': 'function', 'function': {{'name': ..., 'description': ..., "
                "'parameters': <JSON Schema>}}."
            )
        description, parameters = function.get("description") or "", function.get("parameters") or _NO_PARAMETERS
        return cls(function["name"], description, parameters, bool(tool.get("cache_control")))

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
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens since the last step, if the request asks for them; text may be held back longer."""


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
