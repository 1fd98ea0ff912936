"""Chat templates are code that comes with a model: here they run in Jinja's sandbox, within limits of time and size.

What templates find here (filters, `raise_exception`, `strftime_now`, tags) is what transformers gives them.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["LimitError", "literals", "render"]

_SECONDS = 5.0  # Of computing.
_SIZE, _TIMES = 2**28, 64  # Characters that a template may make, and more for what it was given.
_RARELY = 64  # Steps between two looks at the clock.
_BITS = 2**16  # Of a number.
_PARTS = 2**18  # Values within a value that is shown.
_BY_NUMBER = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "wordwrap", "zfill")
)


class LimitError(SecurityError):
    """A template that takes too long, or makes too much."""


class _Budget:
    def __init__(self, given: int) -> None:
        self.left, self._deadline, self._asked = _SIZE + _TIMES * given, time.thread_time() + _SECONDS, 0

    def check(self, size: int) -> None:
        if size > self.left:
            raise LimitError("it makes more text than any conversation needs")
        self._asked += 1
        if self._asked % _RARELY == 0 and time.thread_time() > self._deadline:
            raise LimitError(f"it computes for more than {_SECONDS:g} seconds")

    def charge(self, size: int) -> None:
        self.check(size)
        self.left -= size


_BUDGET: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget")


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that the template `source` makes of `variables`.

    Raises whatever Jinja raises: `LimitError` for a template that computes for more than five seconds or makes hundreds
    of millions of characters, its kind `SecurityError` for one that reaches for what the sandbox does not give.
    """
    template = _compiled(source)
    token = _BUDGET.set(_Budget(_size(variables)))
    try:
        return str(template.render(variables))
    finally:
        _BUDGET.reset(token)


@lru_cache
def literals(source: str) -> str:
    """All that a template may write of its own, joined by null characters."""
    tree = _Sandbox().parse(source)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(texts))


@lru_cache
def _compiled(source: str) -> Any:  # noqa: ANN401 - a jinja2.Template
    return _Sandbox().from_string(source)


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; here it is its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters = {name: _limited(name, each) for name, each in self.filters.items()}
        self.filters |= {"kp each": _each, "kp said": _said, "kp joined": _joined}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Names}
        del self.globals["lipsum"]
        self._weight = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        self._weight = _weight(tree)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "kp each", _weight(loop))
        for output in list(tree.find_all(nodes.Output)):
            said = output.nodes
            output.nodes = [e if isinstance(e, nodes.TemplateData) else _filtered(e, "kp said") for e in said]
        for joined in list(tree.find_all(nodes.Concat)):
            parts = nodes.List(joined.nodes, lineno=joined.lineno)
            joined.nodes = [_filtered(parts, "kp joined")]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        budget = _BUDGET.get()
        if operator == "+":
            budget.charge(_length(left) + _length(right))
        elif operator == "%":
            budget.charge(_format_size([left, right]) if isinstance(left, str) else 1)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            budget.charge(1 if bits <= _BITS else sys.maxsize)
        elif isinstance(left, int) or isinstance(right, int):
            many, one = (left, right) if isinstance(left, int) else (right, left)
            budget.charge(max(many, 1) * _length(one))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        if isinstance(function, Macro):
            _BUDGET.get().charge(self._weight + 1)
            return super().call(context, function, *args, **named)
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        return _within(name, [owner, *args, *named.values()], lambda: super(_Sandbox, self).call(
            context, function, *args, **named
        ))  # fmt: skip


def _limited(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def limited(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        return _within(name, [*args, *named.values()], lambda: made(*args, **named))

    return limited


def _within(name: str, values: Sequence[Any], run: Callable[[], Any]) -> Any:  # noqa: ANN401
    """What `run` gives, where it cannot be too much: `values` are what the filter or method of this `name` works on."""
    budget = _BUDGET.get()
    if name in ("format", "format_map"):
        budget.check(_format_size(values))
    elif name == "join":
        budget.check(_size(values) + sum(map(_length, values)) ** 2 // 4)
    elif name == "replace":
        texts = sorted(_length(each) for each in values if isinstance(each, str))
        budget.check(texts[-1] * max(texts[-2], 1) if len(texts) > 1 else 1)
    elif name in _BY_NUMBER:
        number = max((each for each in values if isinstance(each, int)), default=0)
        budget.check((_size(values) + 1) * (number + 1))
    made = run()
    budget.charge(_length(made))
    return made


def _format_size(values: Sequence[Any]) -> int:
    """More characters than formatting gives: a width for each field, or all that is put in."""
    text = next((each for each in values if isinstance(each, str)), "")
    numbers = [int(each) for each in re.findall(r"\d{1,18}", text)] + [
        each for each in itertools.islice(_parts(values), _PARTS) if type(each) is int
    ]
    return (text.count("%") + text.count("{")) * (max(numbers, default=0) + _size(values)) + len(text)


def _length(value: object) -> int:
    if isinstance(value, int):
        return value.bit_length() // 8 + 1
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _size(value: object) -> int:
    """Characters of a value, those of all that is in it included; more than any budget where those are too many."""
    size = 0
    for number, each in enumerate(_parts(value)):
        if number > _PARTS:
            return sys.maxsize
        size += _length(each)
    return size


def _parts(value: object) -> Iterator[object]:
    left = [value]
    while left:
        yield (each := left.pop())
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each


def _weight(node: nodes.Node) -> int:
    """Characters that the template itself writes there, once."""
    return sum(len(each.data) for each in node.find_all(nodes.TemplateData))


def _filtered(node: Any, name: str, *args: int) -> nodes.Filter:  # noqa: ANN401 - a nodes.Expr
    given = [nodes.Const(each, lineno=node.lineno) for each in args]
    return nodes.Filter(node, name, given, [], None, None, lineno=node.lineno)


def _each(values: Iterable[Any], weight: int) -> Iterator[Any]:
    # Looked up here, and not when it goes on: a constant loop must not be unrolled when the template is compiled.
    budget = _BUDGET.get()

    def counted() -> Iterator[Any]:
        for value in values:
            budget.charge(weight + 1)
            yield value

    return counted()


def _said(value: Any) -> Any:  # noqa: ANN401
    _BUDGET.get().charge(len(value) if isinstance(value, str) else _size(value))
    return value


def _joined(parts: Sequence[Any]) -> str:
    _BUDGET.get().charge(_size(list(parts)))
    return "".join(map(str, parts))


def _raise(message: str) -> None:
    raise JinjaError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:  # noqa: ANN401, FBT001, FBT002
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


class _Dict:
    """What `dict` is to templates: no class, whose attributes would lead out of the sandbox."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*args, **named)


class _Names(Namespace):
    """A namespace whose names cannot be those of Python's internals."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401
        for name in dict(*args, **named):
            _check_name(name)
        super().__init__(*args, **named)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"names of a namespace cannot begin with an underscore, got {name!r}")
