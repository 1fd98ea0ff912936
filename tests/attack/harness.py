"""Runs cases of one class of attacks, and counts what became of them."""

from __future__ import annotations

import importlib
import itertools
import logging
import pkgutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol, cast

from kp_core.errors import KnowledgePackError
from tests.attack import classes

__all__ = ["NAMES", "Case", "HungError", "LostError", "Tally", "WrongError", "load", "refused", "run"]

NAMES = sorted(each.name for each in pkgutil.iter_modules(classes.__path__))
"""The classes there are: the files in `classes/`."""

CASE_SECONDS = 120
"""A case that takes longer hangs; the slowest honest one takes a second or two on a quiet core."""

Case = Callable[[Random], int | None]


class WrongError(AssertionError):
    """An answer that is not the right one."""


class LostError(AssertionError):
    """Something that was acknowledged and is not there."""


class HungError(BaseException):
    """A case that does not end; no `except Exception` may swallow it."""


class Attacks(Protocol):
    """What a file of `classes/` holds."""

    SHORT: int

    def attack(self, folder: Path) -> AbstractContextManager[Case]:
        """What tries one case, in an empty folder of its own."""


@dataclass
class Tally:
    """How many inputs were tried, and how many came out badly; the first few of those, for people."""

    tried: int = 0
    wrong: int = 0
    uncaught: int = 0
    lost: int = 0
    hung: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """All but what was tried."""
        return self.wrong + self.uncaught + self.lost + self.hung


def load(name: str) -> Attacks:
    """The class of this name."""
    return cast("Attacks", importlib.import_module(f"{classes.__name__}.{name}"))


@contextmanager
def refused(*more: type[BaseException]) -> Iterator[None]:
    """What is inside may be refused by an error of ours, or by one of `more`."""
    try:
        yield
    except (KnowledgePackError, *more) as error:
        if not str(error):
            raise WrongError(f"{type(error).__name__} says nothing") from error


def run(
    name: str,
    seed: str | int,
    folder: Path,
    *,
    numbers: range | None = None,
    seconds: float | None = None,
    tell: Callable[[int, float, Tally], None] = lambda _number, _seconds, _tally: None,
) -> Tally:
    """Try the cases `numbers`, or all from their start on for so many seconds.

    `tell` hears of each that is done: its number, the seconds since the first began, and the tally.
    """
    tally, first = Tally(), 0 if numbers is None else numbers.start
    with _quiet(), load(name).attack(folder) as case:
        began = time.monotonic()
        for number in itertools.count(first) if seconds is not None else numbers or ():
            _judge(tally, case, f"{name} --seed {seed} --case {number}", Random(f"{seed}/{name}/{number}"))
            tell(number, took := time.monotonic() - began, tally)
            if seconds is not None and took > seconds:
                break
    return tally


@contextmanager
def _quiet() -> Iterator[None]:
    """Repairs warn and are logged; what an attack breaks is repaired often."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _judge(tally: Tally, case: Case, name: str, draw: Random) -> None:
    before = signal.signal(signal.SIGALRM, _hang)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    tried, kind = 1, None
    try:
        tried = case(draw) or 1
    except LostError as error:
        kind, found = "lost", error
    except (WrongError, AssertionError) as error:
        kind, found = "wrong", error
    except HungError as error:
        kind, found = "hung", error  # type: ignore[assignment]
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        kind, found = "uncaught", error  # type: ignore[assignment]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:  # Of whoever watches over us, e.g. pytest.
            signal.setitimer(signal.ITIMER_REAL, remaining)
    tally.tried += tried
    if kind is not None:
        setattr(tally, kind, getattr(tally, kind) + 1)
        place = traceback.extract_tb(found.__traceback__)[-1]
        said = f"{type(found).__name__}: {found}".encode(errors="backslashreplace").decode()[:300]
        tally.said.append(f"{kind}: --only {name}: {said} ({Path(place.filename).name}:{place.lineno})")


def _hang(_signal: int, _frame: object) -> None:
    raise HungError(f"not done after {CASE_SECONDS} s")
