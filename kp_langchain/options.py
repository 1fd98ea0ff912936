"""Options in LangChain's words, and the core's words for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kp_core import Request
from kp_core.settings import MODEL_OPTIONS, core_choice
from kp_langchain.structured import response_schema

__all__ = ["IGNORED_SETTINGS", "OF_LANGCHAIN", "identity_of", "in_core_words"]

IGNORED_SETTINGS = ("api_key",)
"""Fields of models behind an API; LangChain's own unit tests give them to every model."""

# What LangChain binds for its own records or for the protocol of other providers; nothing here depends on it.
_IGNORED = ("ls_structured_output_format", "strict", "stream", "stream_usage")

OF_LANGCHAIN = ("model", "response_format", *_IGNORED)
"""Options of a call that only LangChain knows."""


def in_core_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` as `Session.generate` takes them; raises `ToolError` for a response format that is none."""
    request = {name: value for name, value in options.items() if name not in OF_LANGCHAIN}
    if "tool_choice" in request:
        request["tool_choice"] = core_choice(request["tool_choice"])
    if options.get("response_format") is not None:
        request["response_schema"] = response_schema(options["response_format"])
    return request


def identity_of(request: Request) -> dict[str, Any]:
    """What tells two requests of one conversation apart, as plain values."""
    values = {name: getattr(request, name) for name in MODEL_OPTIONS}
    steering = None if request.steering is None else str(request.steering)
    plain = {"composer": request.composer.key, "steering": steering}
    return values | plain | {"packs": list(request.packs), "stop": list(request.stop)}
