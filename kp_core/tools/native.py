"""Parsers of tool arguments that are not JSON; each raises `ValueError` for invalid input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["braced", "tagged"]

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
