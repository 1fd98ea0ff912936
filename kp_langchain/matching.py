"""LangGraph's filters and match conditions, applied to items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langgraph.store.base import MatchCondition

from kp_core.errors import FactError
from kp_core.facts.filters import ORDERED

__all__ = ["has_labels", "matches"]


def has_labels(labels: tuple[str, ...], wanted: MatchCondition) -> bool:
    """Whether a namespace begins or ends with the labels of `wanted`; `*` matches any label."""
    path = wanted.path
    part = labels[: len(path)] if wanted.match_type == "prefix" else labels[max(0, len(labels) - len(path)) :]
    return len(part) == len(path) and all(label in {pattern, "*"} for pattern, label in zip(part, path, strict=True))


def matches(held: object, wanted: object) -> bool:
    """Whether a field of an item matches LangGraph's filter `wanted`. Raises `FactError` for an unknown operator."""
    if isinstance(wanted, Mapping):
        if any(str(operator).startswith("$") for operator in wanted):
            return all(_compares(held, operator, value) for operator, value in wanted.items())
        return isinstance(held, Mapping) and all(matches(held.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list | tuple):
        return isinstance(held, list) and len(held) == len(wanted) and all(map(matches, held, wanted))
    return held == wanted


def _compares(held: Any, how: str, wanted: Any) -> bool:  # noqa: ANN401 - what JSON can say
    if how in {"$eq", "$ne"}:
        return (held == wanted) is (how == "$eq")
    if how not in ORDERED:
        raise FactError(f"Got {how!r} in a filter; expected one of $eq, $ne, {', '.join(ORDERED)}.")
    try:
        return bool(ORDERED[how](float(held), float(wanted)))
    except (TypeError, ValueError, OverflowError):
        return False
