"""Events: what happened to packs, with counts, for the debug log and for whoever subscribes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TypeAlias

Listener: TypeAlias = Callable[[str, Mapping[str, float | str]], object]
"""Takes the name of an event and its counts. It is called in the thread that did the work, so it must be quick, and it
must not call an engine or a store."""

_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` for each event of this process, whatever the log's level. Returns a function that ends it."""
    _listeners.append(listener)

    def unsubscribe() -> None:
        with suppress(ValueError):
            _listeners.remove(listener)

    return unsubscribe


def log_event(logger: logging.Logger, name: str, **counts: float | str) -> None:
    """Log an event, e.g. `packs found: units=4, packs=3`. The record has the fields `kp_event` and `kp`, the counts.

    An error of a log handler or a listener is not passed on, so that the work goes on.
    """
    for listener in [*_listeners]:
        with suppress(Exception):
            listener(name, counts)
    if logger.isEnabledFor(logging.DEBUG):
        text = ", ".join(f"{field}={count}" for field, count in counts.items())
        with suppress(Exception):
            logger.debug("%s: %s", name, text, extra={"kp_event": name, "kp": counts})


@lru_cache(8192)
def warn_once(logger: logging.Logger, message: str, *values: str) -> None:
    """Log a warning, once for each of its `values`."""
    logger.warning(message, *values)
