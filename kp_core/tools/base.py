"""What a model may call, what it called, and the pieces of an answer, with log-probabilities in the form of OpenAI."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kp_core.errors import PromptError

ToolChoice: TypeAlias = str
"""`"auto"`: the model decides; `"any"`: it must call a tool; `"none"`: it may not; else the name of the tool to
call."""

Scores: TypeAlias = Sequence[tuple[int, float]]
"""The log-probability of a token of an answer, and of the likeliest tokens in its place, each as (id, logprob)."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte, in tokenizers that write other tokens as text."""
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""The byte behind each sign in tokenizers that write bytes as GPT-2 does."""
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
class TokenLogprob:
    """A token and the natural logarithm of its probability, before temperature, penalties and grammar."""

    token_id: int
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in its place, best first: as many as `top_logprobs` says."""

    @property
    def text(self) -> str:
        """Text of the token; a part of a character is `U+FFFD`, and `bytes` has it whole."""
        return self.bytes.decode("utf-8", "replace")

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's form: `token`, `bytes`, `logprob` and `top_logprobs`, a list of the same without the last."""
        return _plain(self) | {"top_logprobs": [_plain(token) for token in self.top]}


def _plain(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}


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


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:  # noqa: ANN401 - see `Engine.tokenizer`
    """A function that returns the bytes of a token, none for an id without one.

    Those of all tokens of an answer join to its text.
    """
    backend, added = tokenizer.backend_tokenizer, frozenset(tokenizer.added_tokens_decoder)
    is_byte_level = backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()

    def bytes_of(token: int) -> bytes:
        written = backend.id_to_token(token) or ""
        if token in added:
            return written.encode()
        if is_byte_level:
            return bytes(_BYTE_LEVEL[sign] for sign in written)
        if match := BYTE_TOKEN.fullmatch(written):
            return bytes.fromhex(match[1])
        return written.replace("▁", " ").encode()

    return bytes_of


def scored_token(scores: Scores, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    """The first of `scores`, with the others as `top`."""
    (token, logprob), *others = scores
    top = tuple(TokenLogprob(other, bytes_of(other), value) for other, value in others)
    return TokenLogprob(token, bytes_of(token), logprob, top)
