"""Composers by name, as settings and command lines write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kp_core.compose.base import Composer
from kp_core.compose.blend import BlendComposer
from kp_core.compose.exact import ExactComposer
from kp_core.compose.naive import NaiveComposer
from kp_core.compose.splice import SpliceComposer
from kp_core.errors import OptionError

__all__ = ["NAMES", "composer_of"]

NAMES: Mapping[str, Callable[..., Composer]] = {
    "exact": ExactComposer,
    "naive": NaiveComposer,
    "splice": SpliceComposer,
    "blend": BlendComposer,
}


def composer_of(name: str) -> Composer:
    """The composer that a key names: `"splice"`, `"blend"`, `"blend:r=0.3,rule=deviation"`.

    Raises `OptionError` for an unknown name or parameter.
    """
    method, _, rest = name.partition(":")
    parameters: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            parameters[key] = float(value)
        except ValueError:
            parameters[key] = value
    try:
        return NAMES[method](**parameters)
    except (KeyError, TypeError) as error:
        raise OptionError(
            f"Got composer={name!r}; expected one of {', '.join(NAMES)}, `blend` with parameters as in "
            "'blend:r=0.3,rule=deviation', or a composer of your own with `exact`, `key`, `regions` and `fill`."
        ) from error
