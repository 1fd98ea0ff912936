"""Events for the debug log: what happened, with its counts as fields of the record."""

from __future__ import annotations

import logging
from contextlib import suppress

__all__ = ["log_event"]


def log_event(logger: logging.Logger, name: str, **counts: float | str) -> None:
    """Log an event, e.g. `packs found: units=4, packs=3`. The record has the fields `kp_event` and `kp`, the counts.

    An error of a log handler is not passed on, so that the work goes on.
    """
    if logger.isEnabledFor(logging.DEBUG):
        text = ", ".join(f"{field}={count}" for field, count in counts.items())
        with suppress(Exception):
            logger.debug("%s: %s", name, text, extra={"kp_event": name, "kp": counts})
