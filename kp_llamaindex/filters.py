"""LlamaIndex's metadata filters as filters over facts."""

from __future__ import annotations

import json
from typing import Any

from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from kp_core.errors import FactError

__all__ = ["to_where"]

_COMPARED = {
    FilterOperator.EQ: "$eq",
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
    FilterOperator.IN: "$in",
    FilterOperator.CONTAINS: "$contains",
    FilterOperator.TEXT_MATCH: "$contains",
    FilterOperator.TEXT_MATCH_INSENSITIVE: "$icontains",
}
_NEGATED = {FilterOperator.NE: FilterOperator.EQ, FilterOperator.NIN: FilterOperator.IN}
_TOGETHER = {FilterOperator.ALL: "$and", FilterOperator.ANY: "$or"}
_OF_LISTS = {FilterOperator.IN, FilterOperator.NIN, FilterOperator.ALL, FilterOperator.ANY}
_OF_BOTH = {FilterOperator.EQ, FilterOperator.NE}


def to_where(filters: MetadataFilters) -> dict[str, Any]:
    """Convert `filters`, which may be nested, to a filter of facts (see `kp_core.facts.filters`).

    Each operator means what LlamaIndex says. A string is compared with a number as the number it spells; values that
    cannot be compared do not match. Raises `FactError` for an operator that cannot be used with its value.
    """
    parts = [to_where(part) if isinstance(part, MetadataFilters) else _where(part) for part in filters.filters]
    if not parts:
        return {}
    if filters.condition == FilterCondition.NOT:
        return {"$not": {"$or": parts}}
    return {"$or" if filters.condition == FilterCondition.OR else "$and": parts}


def _where(wanted: MetadataFilter) -> dict[str, Any]:
    key, operator, value = wanted.key, wanted.operator, wanted.value
    if operator == FilterOperator.IS_EMPTY:
        return {"$or": [{key: {"$exists": False}}, {key: ""}, {key: "[]"}]}
    if value is None or (operator not in _OF_BOTH and isinstance(value, list) is not (operator in _OF_LISTS)):
        expected = "a list" if operator in _OF_LISTS else "one value"
        raise FactError(f"Got the filter {key!r} {operator.value} {value!r}; expected {expected} to compare with.")
    if operator in _NEGATED:
        return {"$not": _where(wanted.model_copy(update={"operator": _NEGATED[operator]}))}
    if operator in _TOGETHER:
        parts = [{key: {"$contains": item}} for item in value] if isinstance(value, list) else []
        nothing: dict[str, Any] = {"$exists": True} if operator == FilterOperator.ALL else {"$in": []}
        return {_TOGETHER[operator]: parts} if parts else {key: nothing}
    if isinstance(value, list) and operator == FilterOperator.EQ:
        return {key: json.dumps(value)}  # A fact stores a list as JSON.
    condition: dict[str, Any] = {_COMPARED[operator]: value}
    samples = value if isinstance(value, list) else [value]
    if "contains" not in _COMPARED[operator] and samples and not isinstance(samples[0], str):
        condition = {"$number": condition}
    return {key: condition}
