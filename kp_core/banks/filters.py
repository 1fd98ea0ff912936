"""Filters: a dictionary that selects facts.

    {"year": 1999}                                    the field `year` is 1999
    {"year": {"$gte": 1990, "$lt": 2000}}             every condition on the field holds
    {"source": {"$in": ["a.md", "b.md"]}}             the field is one of these
    {"tags": {"$contains": "sea"}}                    the field contains this text or element
    {"year": {"$number": {"$gte": 1990}}}             the field as a number, also if it is a string
    {"year": 1999, "lang": "en"}                      every field matches
    {"$or": [{"lang": "en"}, {"$not": {"lang": "de"}}]}

Operators on a field: `$eq`, `$ne`, `$gt`, `$gte`, `$lt`, `$lte`, `$in`, `$nin`, `$exists` (`True` or `False`),
`$contains`, `$icontains` (ignores case), `$number`; between filters: `$and`, `$or`, `$not`. A field is a metadata field
of the fact, else `id`, `title`, `source`, `namespace`, `version`, `expires` or `digest` (of its text). `kp:source` and
so on always mean the fact's own field, whatever its metadata. A fact without the field matches only `$ne`, `$nin` and
`{"$exists": False}`. `$gt`, `$gte`, `$lt` and `$lte` order numbers among numbers and strings among strings; a mixed
pair never matches. A list, or a string that is a JSON array, contains its elements; any other string contains its
substrings. `$number` counts booleans as 0 and 1.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kp_core.banks.base import Fact, Filter, Value
from kp_core.errors import FactError

Predicate = Callable[[Fact], bool]
_Test = Callable[[Value | None], bool]

_DEEPEST = 100
_OWN_FIELDS = ("id", "title", "source", "namespace", "version", "expires", "digest")
ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
"""The meaning of each ordering operator."""
_OPERATORS = ("$eq", "$ne", *ORDERED, "$in", "$nin", "$exists", "$contains", "$icontains", "$number")


def predicate(where: Filter, depth: int = 0) -> Predicate:
    """Return a function that tests a fact against `where`; raises `FactError` for an invalid filter."""
    if depth > _DEEPEST:
        raise FactError(f"Got a filter nested more than {_DEEPEST} levels deep; expected one that is not.")
    if not isinstance(where, Mapping):
        raise FactError(f'Got the filter {where!r}; expected a dictionary, e.g. {{"source": "a.md"}}.')
    tests = [_part(name, condition, depth + 1) for name, condition in where.items()]
    return lambda fact: all(test(fact) for test in tests)


def _part(name: object, wanted: object, depth: int) -> Predicate:
    if name == "$not":
        negated = predicate(wanted, depth)  # type: ignore[arg-type]  # it refuses what is no filter
        return lambda fact: not negated(fact)
    if name in {"$and", "$or"}:
        if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not wanted:
            raise FactError(f"Got {wanted!r} under {name}; expected a list of filters.")
        predicates = [predicate(inner, depth) for inner in wanted]
        together = all if name == "$and" else any
        return lambda fact: together(matches(fact) for matches in predicates)
    if not isinstance(name, str) or name.startswith("$"):
        raise FactError(f"Got {name!r} in a filter; expected the name of a field, $and, $or or $not.")
    test = _tests(name, wanted if isinstance(wanted, Mapping) else {"$eq": wanted})
    return lambda fact: test(_field(fact, name))


def _field(fact: Fact, name: str) -> Value | None:
    field = name.removeprefix("kp:")
    if field in _OWN_FIELDS and (field != name or name not in fact.metadata):
        value: Value | None = getattr(fact, field)
        return value
    return fact.metadata.get(name)


def _tests(name: str, conditions: object) -> _Test:
    if not isinstance(conditions, Mapping) or not conditions:
        raise FactError(f"Got no condition on {name!r}; expected e.g. {{{name!r}: {{'$gt': 3}}}}.")
    tests = [_test(name, op, value) for op, value in conditions.items()]
    return lambda held: all(test(held) for test in tests)


def _test(name: str, how: object, wanted: object) -> _Test:  # noqa: PLR0911 - one for each kind of operator
    if how == "$number":
        number = _tests(name, wanted)
        return lambda held: number(_number(held))
    if how in {"$in", "$nin"}:
        if isinstance(wanted, str) or not isinstance(wanted, Sequence | set | frozenset):
            raise FactError(f"Got {wanted!r} under {how} of {name!r}; expected a list of values.")
        # True == 1 in Python, but a boolean is not a number here.
        values = {(isinstance(item, bool), _value(name, item)) for item in wanted}
        return lambda held: (
            (isinstance(held, str | int | float) and (isinstance(held, bool), held) in values) is (how == "$in")
        )
    value = _value(name, wanted)
    if how == "$exists":
        return lambda held: (held is not None) is bool(value)
    if how in {"$eq", "$ne"}:
        return lambda held: _equal(held, value) is (how == "$eq")
    if how == "$contains":
        return lambda held: _contains(held, value)
    if how == "$icontains":
        return lambda held: (
            isinstance(held, str) and _contains(held.lower(), value.lower() if isinstance(value, str) else value)
        )
    compare = ORDERED.get(str(how))
    if compare is None:
        raise FactError(f"Got the operator {how!r} on {name!r}; expected one of {', '.join(_OPERATORS)}.")
    return lambda held: _comparable(held, value) and compare(held, value)


def _value(name: str, value: object) -> Value:
    if not isinstance(value, str | int | float | bool):
        raise FactError(f"Got {value!r} to compare {name!r} with; expected a string, a number or a boolean.")
    return value


def _number(held: Value | None) -> Value | None:
    if isinstance(held, str):
        with suppress(ValueError):
            return float(held)
        return None
    return int(held) if isinstance(held, bool) else held


def _contains(held: Value | None, value: Value) -> bool:
    if isinstance(held, list | tuple):
        return any(_equal(item, value) for item in held)
    if not isinstance(held, str):
        return False
    if held.startswith("["):
        with suppress(ValueError, RecursionError):
            return any(_equal(item, value) for item in json.loads(held))
    return isinstance(value, str) and value in held


def _equal(held: Value | None, value: Value) -> bool:
    # True == 1 in Python, but a boolean is not a number here.
    return held == value and isinstance(held, bool) == isinstance(value, bool)


def _comparable(held: Value | None, value: Value) -> bool:
    numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in (held, value))
    return numbers or (isinstance(held, str) and isinstance(value, str))
