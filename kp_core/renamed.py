"""Names of the release before: they work for one release more, with a `DeprecationWarning` that tells the new one."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

__all__ = ["keep_modules", "old_names", "renamed"]

P = ParamSpec("P")
R = TypeVar("R")


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keywords by their old names, e.g. `@renamed(inside="compiled_for")`."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            for old in names.keys() & options.keys():
                _warn(f"`{old}=` of {function.__name__}", f"`{names[old]}=`")
                options[names[old]] = options.pop(old)
            return function(*arguments, **options)

        return call

    return wrap


def old_names(module: str, **names: object) -> Callable[[str], object]:
    """The `__getattr__` of a module that has `names`, each with what it stands for now."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"`{module}.{name}`", f"`{getattr(names[name], '__name__', names[name])}`")
        return names[name]

    return find


def keep_modules(moved: Mapping[str, str]) -> None:
    """Let modules be imported by their old names, e.g. `{"kp_core.banks": "kp_core.facts"}`."""
    # First, as the folder of a package that has two names would be read twice.
    sys.meta_path.insert(0, _Moved(moved))


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that have another name now."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """See `MetaPathFinder`."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its new name."""
        _warn(f"`{spec.name}`", f"`{self._moved[spec.name]}`")
        module = importlib.import_module(self._moved[spec.name])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was run when it was imported; it keeps its own specification."""
        module.__spec__ = self._specs[module.__spec__.name] if module.__spec__ else None


def _warn(old: str, new: Any) -> None:  # noqa: ANN401
    warnings.warn(f"{old} is now called {new}.", DeprecationWarning, stacklevel=3)
