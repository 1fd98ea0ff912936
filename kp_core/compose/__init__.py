"""Composers: they make the KV of packs that stand at other positions than they were compiled for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from kp_core.compose.auto import AutoComposer
from kp_core.compose.packet import PacketComposer, laid_out
from kp_core.compose.select import SelectComposer
from kp_core.compose.splice import SpliceComposer
from kp_core.errors import OptionError, gone
from kp_core.plan.composer import Composer, ExactComposer, Region, placed

__all__ = [
    "AutoComposer",
    "Composer",
    "ExactComposer",
    "PacketComposer",
    "Region",
    "SelectComposer",
    "SpliceComposer",
    "composer_of",
    "laid_out",
    "placed",
]

_NAMED: Mapping[str, Callable[..., Composer]] = {
    "auto": AutoComposer,
    "exact": ExactComposer,
    "packet": PacketComposer.load,
    "select": SelectComposer,
    "splice": SpliceComposer,
}


def composer_of(name: str) -> Composer:
    """The composer of that name: `"splice"`, `"select:packs=2"`, `"packet:wrapper=FILE"`.

    Raises `OptionError` for an unknown name or parameter, `WrapperError` for a wrapper that cannot be read.
    """
    method, _, arguments = name.partition(":")
    parameters: dict[str, Any] = {}
    for part in filter(None, arguments.split(",")):
        key, _, value = part.partition("=")
        try:
            parameters[key] = float(value)
        except ValueError:
            parameters[key] = value
    try:
        return _NAMED[method](**parameters)
    except OptionError:
        raise  # It says which parameter is wrong.
    except (KeyError, TypeError) as error:
        if method in _NAMED and parameters:
            known = ", ".join(f"{key}=" for key in signature(_NAMED[method]).parameters) or "no parameter"
            raise OptionError(f"Got composer={name!r}; expected {known} for {method!r}.") from error
        raise OptionError(
            f"Got composer={name!r}; expected one of {', '.join(_NAMED)}, with parameters as in "
            "'select:packs=2', 'packet:wrapper=FILE', or a composer of your own with `exact`, `key`, `regions` and "
            f"`fill`.{gone('composer', method)}"
        ) from error
