"""The options of one call: which there are, and the request they make over a model's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kp_langchain.structured import response_schema

__all__ = ["SAMPLING", "core_choice", "request_of"]

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "timeout")
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
_KNOWLEDGE = ("packs", "placement", "compact", "mismatch", "thinking", "steering", "scope", "reuse", "deterministic")
_PER_CALL = (*SAMPLING, *_TOOLS, *_KNOWLEDGE, "model")
# What LangChain binds for its own records or for the protocol of other providers; nothing here depends on it.
_IGNORED = frozenset({"ls_structured_output_format", "strict", "stream", "stream_usage"})


def request_of(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` overridden by the options of one call, in the core's words; packs of both, the model's first.

    Raises `TypeError` for options that do not exist, `ToolError` for a response format that is none.
    """
    unknown = sorted(set(options) - set(_PER_CALL) - _IGNORED)
    if unknown:
        raise TypeError(f"Got the options {', '.join(unknown)}; expected some of {', '.join(_PER_CALL)}, stop.")
    asked = {name: value for name, value in options.items() if name not in _IGNORED and name != "model"}
    request = {**settings, **asked, "packs": (*settings["packs"], *asked.get("packs", ())) or None}
    if "tool_choice" in request:
        request["tool_choice"] = core_choice(request["tool_choice"])
    if (wanted := request.pop("response_format", None)) is not None:
        request["response_schema"] = response_schema(wanted)
    return {name: value for name, value in request.items() if value is not None}


def core_choice(tool_choice: object) -> str:
    """The core's word for a tool choice, in whichever way LangChain or OpenAI say it."""
    if isinstance(tool_choice, dict):
        function = tool_choice.get("function", tool_choice)
        return str(function.get("name", tool_choice.get("type", "auto")))
    if isinstance(tool_choice, bool):
        return "any" if tool_choice else "none"
    return {"None": "auto", "required": "any"}.get(str(tool_choice), str(tool_choice))
