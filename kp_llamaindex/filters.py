"""Metadata filters over the facts of a bank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from llama_index.core.vector_stores.types import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

__all__ = ["passes"]


def passes(filters: MetadataFilters, metadata: Mapping[str, Any]) -> bool:
    """Whether `metadata` passes `filters`, which may be nested; each filter means what LlamaIndex says it does.

    A string is compared with a number as the number it spells, since banks keep strings. What cannot be compared at all
    does not pass.
    """
    matches = (
        passes(part, metadata) if isinstance(part, MetadataFilters) else _matches(part, metadata)
        for part in filters.filters
    )
    condition = filters.condition or FilterCondition.AND
    if condition == FilterCondition.AND:
        return all(matches)
    return any(matches) == (condition == FilterCondition.OR)


def _matches(wanted: MetadataFilter, metadata: Mapping[str, Any]) -> bool:
    found = metadata.get(wanted.key)
    samples = wanted.value if isinstance(wanted.value, list) else [wanted.value]
    if isinstance(found, str) and samples and all(isinstance(sample, int | float) for sample in samples):
        with suppress(ValueError):
            found = float(found)
    check = build_metadata_filter_fn(lambda _: {wanted.key: found}, MetadataFilters(filters=[wanted]))
    try:
        return bool(check(""))
    except TypeError:
        return False
