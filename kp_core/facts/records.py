"""Conversion of facts to Chroma's records and back, and of filters to Chroma's `where`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kp_core.facts.base import Fact, Filter

__all__ = ["OURS", "from_others_record", "from_record", "pushed_down", "to_record"]

OURS = "kp:"
"""Prefix of our names in metadata of records and collections."""

_LARGEST = 2**63
_COMPARED = ("$eq", "$gt", "$gte", "$lt", "$lte")
_FIELDS = ("title", "source", "version", "expires", "digest", "bank")


def to_record(fact: Fact) -> dict[str, Any]:
    """Return the metadata of a fact's record: the user's unchanged, ours under names that begin with `kp:`.

    Values that Chroma cannot store, such as `None`, nested lists or large integers, go into `kp:more` as JSON.
    """
    more = {name: value for name, value in fact.metadata.items() if not _holds(name, value)}
    fields = {
        "title": fact.title or None,
        "source": fact.source or None,
        "expires": fact.expires,
        "version": fact.version,
        "digest": fact.digest,
        "more": json.dumps(more, ensure_ascii=False, default=dict) if more else None,
        "has_more": bool(more) or None,
    }
    plain = {name: value for name, value in fact.metadata.items() if name not in more}
    return plain | {OURS + name: value for name, value in fields.items() if value is not None}


def from_record(fact_id: str, text: str, metadata: Mapping[str, Any] | None, namespace: str) -> Fact:
    """Return the fact of a record."""
    extra = dict(metadata or {})
    own_fields = {name.removeprefix(OURS): extra.pop(name) for name in list(extra) if name.startswith(OURS)}
    more = json.loads(own_fields.get("more", "{}"))
    arguments = {name: own_fields[name] for name in ("title", "source", "expires", "version") if name in own_fields}
    return Fact(text, metadata=extra | more, id=fact_id, namespace=namespace, **arguments)


def from_others_record(fact_id: str, text: str, metadata: Mapping[str, Any] | None, namespace: str) -> Fact:
    """Return the fact of a foreign record; `title` and `source` are the metadata of these names."""
    values = {name: value for name, value in (metadata or {}).items() if name and name != "_node_content"}
    title, source = (str(values.get(name) or "") for name in ("title", "source"))
    return Fact(text, title=title, source=source, metadata=values, id=fact_id, namespace=namespace)


def pushed_down(where: Filter | None) -> dict[str, Any] | None:
    """Return the part of a filter that Chroma can check; every match of `where` passes it. `None` if there is none."""
    return _together(
        "$and", [pushed for name, condition in (where or {}).items() if (pushed := _pushed(name, condition))]
    )


def _pushed(name: str, wanted: object) -> dict[str, Any] | None:
    if name in {"$and", "$or"} and isinstance(wanted, Sequence):
        pushed = [pushed_down(inner) for inner in wanted]
        expressible = [entry for entry in pushed if entry is not None]
        return None if name == "$or" and len(expressible) < len(pushed) else _together(name, expressible)
    if name.startswith("$") or name.removeprefix(OURS) in {"id", "namespace"}:
        return None
    conditions = wanted if isinstance(wanted, Mapping) else {"$eq": wanted}
    plain = {op: list(v) if isinstance(v, tuple | set | frozenset) else v for op, v in conditions.items()}
    supported = [(op, value) for op, value in plain.items() if _understood(op, value)]
    # Our records store the fact's own fields under `kp:` names; foreign collections store title and source under plain
    # ones.
    bare = name.removeprefix(OURS)
    names = [bare, OURS + bare] if name in _FIELDS or bare in {"title", "source"} else [name]
    tests = [test for key in names if (test := _together("$and", [{key: {op: value}} for op, value in supported]))]
    if tests and (name == bare or bare not in _FIELDS):
        # The predicate checks values stored as JSON.
        tests.append({OURS + "has_more": True})
    return _together("$or", tests)


def _together(how: str, tests: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Combine several tests into one; `None` for no tests."""
    return {how: tests} if len(tests) > 1 else tests[0] if tests else None


def _understood(how: str, value: object) -> bool:
    # Records do not store an empty title or source.
    if "" in (value if isinstance(value, list) else [value]):
        return False
    # Chroma orders only numbers.
    compares = how in _COMPARED and _scalar(value) and (how == "$eq" or not isinstance(value, str | bool))
    return compares or (how == "$in" and _is_uniform(value))


def _scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)  # Servers are asked in JSON, which has no other floats.
    return isinstance(value, str | bool) or (isinstance(value, int) and -_LARGEST <= value < _LARGEST)


def _holds(name: str, value: object) -> bool:
    # Chroma does not accept names that begin with `$` or `#`.
    if not name or name.startswith((OURS, "chroma:", "$", "#")):
        return False
    return _scalar(value) or _is_uniform(value)


def _is_uniform(value: object) -> bool:
    """Whether the value is a list of scalars of one type."""
    return isinstance(value, list) and len({type(item) for item in value}) == 1 and all(map(_scalar, value))
