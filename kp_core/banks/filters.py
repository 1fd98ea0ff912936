"""Filters: a dictionary that selects facts, as Chroma does.

    {"year": 1999}                                    the field `year` is 1999
    {"year": {"$gte": 1990, "$lt": 2000}}             every condition on the field holds
    {"source": {"$in": ["a.md", "b.md"]}}             the field is one of these
    {"tags": {"$contains": "sea"}}                    the field is a list with this element
    {"year": 1999, "lang": "en"}                      every field matches
    {"$or": [{"lang": "en"}, {"year": {"$gt": 2000}}]}

Operators on a field: `$eq`, `$ne`, `$gt`, `$gte`, `$lt`, `$lte`, `$in`, `$nin`, `$contains`; between filters: `$and`,
`$or`. A field is a metadata field of the fact, else `id`, `title`, `source`, `namespace`, `version`, `expires` or
`digest` (of its text). `kp:source` and so on always mean the fact's own field, whatever its metadata. A fact without
the field matches only `$ne` and `$nin`. `$gt`, `$gte`, `$lt` and `$lte` compare numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kp_core.banks.base import Fact, Filter, Value
from kp_core.errors import FactError

Predicate = Callable[[Fact], bool]

_DEEPEST = 100
_OWN_FIELDS = ("id", "title", "source", "namespace", "version", "expires", "digest")
ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
"""The meaning of each ordering operator."""
_OPERATORS = ("$eq", "$ne", *ORDERED, "$in", "$nin", "$contains")


def predicate(where: Filter | None, depth: int = 0) -> Predicate:
    """Return a function that tests a fact against `where`, `None` for any; raises `FactError` for an invalid filter."""
    if depth > _DEEPEST:
        raise FactError(f"Got a filter nested more than {_DEEPEST} levels deep; expected one that is not.")
    where = {} if where is None else where
    if not isinstance(where, Mapping):
        raise FactError(f'Got the filter {where!r}; expected a dictionary, e.g. {{"source": "a.md"}}.')
    tests = [_part(name, condition, depth + 1) for name, condition in where.items()]
    return lambda fact: all(test(fact) for test in tests)


def _part(name: object, wanted: object, depth: int) -> Predicate:
    if name in {"$and", "$or"}:
        if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not wanted:
            raise FactError(f"Got {wanted!r} under {name}; expected a list of filters.")
        predicates = [predicate(inner, depth) for inner in wanted]
        together = all if name == "$and" else any
        return lambda fact: together(matches(fact) for matches in predicates)
    if not isinstance(name, str) or name.startswith("$"):
        raise FactError(f"Got {name!r} in a filter; expected the name of a field, $and or $or.")
    conditions = wanted if isinstance(wanted, Mapping) else {"$eq": wanted}
    if not conditions:
        raise FactError(f"Got no condition on {name!r}; expected e.g. {{{name!r}: {{'$gt': 3}}}}.")
    tests = [_test(name, how, value) for how, value in conditions.items()]
    return lambda fact: all(test(_field(fact, name)) for test in tests)


def _field(fact: Fact, name: str) -> Value | None:
    field = name.removeprefix("kp:")
    if field in _OWN_FIELDS and (field != name or name not in fact.metadata):
        value: Value | None = getattr(fact, field)
        return value
    return fact.metadata.get(name)


def _test(name: str, how: object, wanted: object) -> Callable[[Value | None], bool]:
    if how in {"$in", "$nin"}:
        if isinstance(wanted, str) or not isinstance(wanted, Sequence | set | frozenset):
            raise FactError(f"Got {wanted!r} under {how} of {name!r}; expected a list of values.")
        values = {_typed(_value(name, item)) for item in wanted}
        return lambda held: (isinstance(held, str | int | float) and _typed(held) in values) is (how == "$in")
    value = _value(name, wanted)
    if how in {"$eq", "$ne"}:
        return lambda held: (_typed(held) == _typed(value)) is (how == "$eq")
    if how == "$contains":
        return lambda held: isinstance(held, list | tuple) and _typed(value) in map(_typed, held)
    compare = ORDERED.get(str(how))
    if compare is None:
        raise FactError(f"Got the operator {how!r} on {name!r}; expected one of {', '.join(_OPERATORS)}.")
    if not _is_number(value):
        raise FactError(f"Got {value!r} under {how} of {name!r}; expected a number.")
    return lambda held: _is_number(held) and compare(held, value)


def _value(name: str, value: object) -> Value:
    if not isinstance(value, str | int | float | bool):
        raise FactError(f"Got {value!r} to compare {name!r} with; expected a string, a number or a boolean.")
    return value


def _typed(value: Value | None) -> tuple[bool, Value | None]:
    # True == 1 in Python, but a boolean is not a number here.
    return isinstance(value, bool), value


def _is_number(value: Value | None) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
