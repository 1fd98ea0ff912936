"""Composers by name, as settings and command lines write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kp_core.compose.base import Composer
from kp_core.errors import OptionError

__all__ = ["composer_of"]

_CLASS = "Composer"


def composer_of(name: str) -> Composer:
    """The composer that a key names: `"splice"`, `"blend"`, `"blend:r=0.3,rule=deviation"`.

    The classes that `kp_core.compose` exports have names: `BlendComposer` is `blend`. Raises `OptionError` for an
    unknown name or parameter.
    """
    from kp_core import compose

    named: dict[str, Callable[..., Composer]] = {
        each.removesuffix(_CLASS).lower(): getattr(compose, each)
        for each in compose.__all__
        if each.endswith(_CLASS) and each != _CLASS
    }
    method, _, rest = name.partition(":")
    parameters: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            parameters[key] = float(value)
        except ValueError:
            parameters[key] = value
    try:
        return named[method](**parameters)
    except (KeyError, TypeError) as error:
        raise OptionError(
            f"Got composer={name!r}; expected one of {', '.join(named)}, `blend` with parameters as in "
            "'blend:r=0.3,rule=deviation', or a composer of your own with `exact`, `key`, `regions` and `fill`."
        ) from error
