"""Renders chat templates, which are code that comes with a model, in Jinja's sandbox within limits of time and size.

Jinja's sandbox limits neither time nor size, but has hooks for calls, filters and operators. `_metered` adds hooks for
loops, output, names and `~`. Limits between the lines of a template would not do: a single filter, method or operator
can fill the memory or run for hours.
"""

from __future__ import annotations

import contextvars
import json
import re
import string
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["LimitError", "literals", "render"]

_SECONDS = 5.0  # CPU time.
_SIZE, _TIMES = 2**28, 64  # Characters that a template may produce, plus so many per input character.
_SHARE = 16  # One value may use a sixteenth of the remaining characters.
_BITS = 2**16  # Limit for an integer.
_GENERATION = re.compile(r"({%[-+]?\s*)(end)?generation\b")
# Operators, methods and filters that may produce, or compare, as many characters as the product of their inputs' sizes.
_PRODUCTS = frozenset(
    {
        *("*", "batch", "center", "expandtabs", "indent", "join", "ljust", "replace", "rfind", "rindex", "rjust"),
        *("rpartition", "rsplit", "slice", "to_bytes", "tojson", "translate", "wordwrap", "zfill"),
    }
)


class LimitError(SecurityError):
    """The template computes too long or produces too much text."""


class _Budget:
    """The remaining time and size of one rendering."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._sizes: dict[int, tuple[object, int]] = {}
        self.largest = self.size(variables)
        self._left = _SIZE + _TIMES * self.largest
        self._deadline = time.thread_time() + _SECONDS

    def size(self, value: object) -> int:
        """Return the number of characters of a value and all values in it, cached because values are immutable."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return 1 if value.bit_length() <= _BITS else sys.maxsize
        if not isinstance(value, Collection) or isinstance(value, range | Context):
            return 1
        if id(value) not in self._sizes:
            members = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
            self._sizes[id(value)] = (value, len(value) + sum(map(self.size, members)))
        return self._sizes[id(value)][1]

    def check(self, size: int) -> None:
        """Raise `LimitError` if fewer than `size` characters are left."""
        if size > self._left:
            raise LimitError("it makes more text than any conversation needs")

    def check_time(self) -> None:
        """Raise `LimitError` if the time is up."""
        if time.thread_time() > self._deadline:
            raise LimitError(f"it computes for more than {_SECONDS:g} seconds")

    def charge(self, value: object) -> None:
        """Subtract a new value's own length from the budget; raises `LimitError` if all its parts are too large."""
        size = self.size(value)
        self.check(size * _SHARE)
        self.largest = max(self.largest, size)
        self._left -= len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 1


_BUDGET: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget")


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render the template `source` with `variables`.

    Raises the errors of Jinja, `LimitError` for too much time or text, and its base class `SecurityError` for access to
    what the sandbox forbids.
    """
    template = _compiled(source)
    token = _BUDGET.set(_Budget(variables))
    try:
        return str(template.render(variables))
    finally:
        _BUDGET.reset(token)


@lru_cache
def literals(source: str) -> str:
    """Return all literal text of a template, joined by null characters."""
    tree = _Sandbox().parse(source)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(texts))


@lru_cache
def _compiled(source: str) -> Any:  # noqa: ANN401 - a jinja2.Template
    return _Sandbox().from_string(source)


def _metered(tree: nodes.Template) -> nodes.Template:
    """Insert a (metered) filter wherever Jinja makes, repeats or names a value without a call."""
    for node in [*tree.find_all((nodes.For, nodes.Output, nodes.Assign, nodes.With, nodes.Concat))]:
        if isinstance(node, nodes.For):
            node.body.insert(0, nodes.Output([_filtered(nodes.Const("", lineno=node.lineno), "string")]))
            node.test = node.test and _filtered(node.test, "kp made")
        elif isinstance(node, nodes.Output):
            node.nodes = [_filtered(child, "string") for child in node.nodes]
        elif isinstance(node, nodes.Assign):
            node.node = _filtered(node.node, "kp made")
        elif isinstance(node, nodes.With):
            node.values = [_filtered(child, "kp made") for child in node.values]
        elif isinstance(node, nodes.Concat):
            node.nodes = [_filtered(nodes.List(node.nodes, lineno=node.lineno), "join")]
    return tree


def _filtered(node: Any, name: str) -> nodes.Filter:  # noqa: ANN401 - a nodes.Expr
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["kp made"] = lambda value: value
        # The filter `format` works like the operator `%`; the method `format` has another syntax.
        self.filters = {name: _limited("%" if name == "format" else name, run) for name, run in self.filters.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _dict, "namespace": _Names}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        # `{% generation %}` marks the text that a model is trained on.
        source = _GENERATION.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true"), source)
        return _metered(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        values = [right, left] if operator == "*" and isinstance(left, int) else [left, right]
        name = "" if operator != "**" and numbers else operator
        return _within(name, values, lambda: super(_Sandbox, self).call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        return _within(name, [owner, *args, *named.values()], lambda: super(_Sandbox, self).call(
            context, function, *args, **named
        ))  # fmt: skip


def _limited(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def limited(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        return _within(name, [*args, *named.values()], lambda: run(*args, **named))

    return limited


def _within(name: str, values: Sequence[Any], run: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Run the operator, method or filter `name` on `values`, of which the first is its main operand, within the budget.

    Returns an iterator as a list, which has a length.
    """
    budget = _BUDGET.get()
    budget.check_time()
    budget.check(_most(name, values, budget))
    result = run()
    if isinstance(result, Iterator):
        result = list(result)
    budget.charge(result)
    return result


def _most(name: str, values: Sequence[Any], budget: _Budget) -> int:
    """Return an upper bound for the characters of the result."""
    if name in ("**", "round"):
        bits = [value.bit_length() for value in values if isinstance(value, int)]
        return sys.maxsize if max(bits, default=1) * _number(values) > _BITS else 1
    if name in ("%", "format", "format_map"):
        # A field may name an attribute of a value, whose size was measured when it was set.
        text = next((value for value in values if isinstance(value, str)), "")
        return _most_formatted(name, text, budget.largest)
    if name == "sum":  # For lists, each step copies the sum so far.
        lengths = [len(value) for value in values if isinstance(value, Collection)]
        return max(lengths, default=1) * sum(map(budget.size, values))
    if name in _PRODUCTS:
        *_, second, first = 1, *sorted(map(budget.size, values))
        return first * max(second, 1) * (_number(values) + 1)
    return sum(map(budget.size, values))


def _number(values: Sequence[Any]) -> int:
    """Return the largest integer argument (a width, a count or an exponent), not counting the main operand."""
    return max((value for value in values[1:] if isinstance(value, int) and value > 0), default=0)


def _most_formatted(name: str, text: str, size: int) -> int:
    """Return an upper bound for the characters of `text` when values of this `size` fill its fields."""
    if name == "%":
        fields, borrowed = re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", text), "*"
    else:
        fields, borrowed = [form or "" for _, _, form, _ in string.Formatter().parse(text)], "{"
    if any(borrowed in field for field in fields):  # A width that is one of the values.
        return sys.maxsize
    width = max((int(digits) for digits in re.findall(r"\d+", " ".join(fields))), default=0)
    return len(text) + len(fields) * (width + size)


def _raise(message: str) -> None:
    raise JinjaError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:  # noqa: ANN401, FBT001, FBT002
    if layout.get("indent") is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)
    budget, chunks = _BUDGET.get(), []
    for chunk in json.JSONEncoder(ensure_ascii=ensure_ascii, **layout).iterencode(value):
        budget.charge(chunk)  # Nesting makes the indentation of a line long.
        chunks.append(chunk)
    return "".join(chunks)


def _dict(*args: Any, **named: Any) -> dict[Any, Any]:  # noqa: ANN401
    """`dict` for templates: not the class, because the attributes of a class lead out of the sandbox."""
    return dict(*args, **named)


class _Names(Namespace):
    """A Jinja namespace that refuses names of Python internals."""

    __repr__ = object.__repr__  # Namespaces can be nested, so their text must not show the content.

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401
        super().__init__()
        for name, value in dict(*args, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"names of a namespace cannot begin with an underscore, got {name!r}")
        super().__setitem__(name, value)
