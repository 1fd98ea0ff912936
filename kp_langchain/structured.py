"""Structured output: a schema in, parsed objects out."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import BaseOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from kp_core.errors import ToolError

__all__ = ["answer_parser", "call_parser", "response_schema", "with_raw"]


def response_schema(response_format: Any) -> Mapping[str, Any] | bool:  # noqa: ANN401 - as OpenAI's clients take it
    """The JSON Schema in a `response_format`: OpenAI's mapping, a Pydantic class, a TypedDict or a plain JSON Schema.

    `True` is any JSON object. Raises `ToolError` for anything else.
    """
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
        if kind == "json_object":
            return response_schema(response_format["schema"]) if response_format.get("schema") else True
        if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
            schema = response_format["json_schema"].get("schema")
            if isinstance(schema, Mapping):
                return schema
    try:
        # `strict` is OpenAI's switch; every schema is strict here.
        return {key: value for key, value in convert_to_json_schema(response_format).items() if key != "strict"}
    except (TypeError, ValueError) as error:
        raise ToolError(
            f"Got response_format={response_format!r}; expected a Pydantic class, a TypedDict, a JSON Schema with a "
            "'title', or OpenAI's {'type': 'json_schema', 'json_schema': {'schema': ...}}."
        ) from error


def call_parser(schema: Any, name: str) -> BaseOutputParser[Any]:  # noqa: ANN401
    """A parser for calls of the tool `name`, which was made from `schema`."""
    if _is_model(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def answer_parser(schema: Any) -> BaseOutputParser[Any]:  # noqa: ANN401
    """A parser for answers that are JSON of `schema`."""
    if _is_model(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def with_raw(model: Runnable[Any, AIMessage], parser: BaseOutputParser[Any]) -> Runnable[Any, dict[str, Any]]:
    """A runnable that returns `{"raw", "parsed", "parsing_error"}`: it reports answers that do not parse, and does not
    raise.
    """
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")


def _is_model(schema: object) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)
