"""Composers by name, as settings and command lines write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kp_core.compose.base import Composer
from kp_core.errors import OptionError

__all__ = ["composer_of"]

_CLASS = "Composer"


def composer_of(name: str) -> Composer:
    """The composer that a key names: `"splice"`, `"blend"`, `"blend:r=0.3,rule=deviation"`, `"packet:wrapper=FILE"`.

    The classes that `kp_core.compose` exports have names: `BlendComposer` is `blend`. One with a method `load` is made
    by that. Raises `OptionError` for an unknown name or parameter, `WrapperError` for a wrapper that cannot be read.
    """
    from kp_core import compose

    exported = {each.removesuffix(_CLASS).lower(): getattr(compose, each) for each in compose.__all__ if _CLASS in each}
    named: dict[str, Callable[..., Composer]] = {
        each: getattr(made, "load", made) for each, made in exported.items() if not getattr(made, "_is_protocol", False)
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
            "'blend:r=0.3,rule=deviation', 'packet:wrapper=FILE', or a composer of your own with `exact`, `key`, "
            "`regions` and `fill`."
        ) from error
