"""Processes that write to a fact store or a pack store and are killed, beside one that reads: see `benchmarks.kills`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from benchmarks.kills import kill_facts, kill_packs
from tests.attack.harness import Case, LostError, WrongError

SHORT = 1


@contextmanager
def attack(folder: Path) -> Iterator[Case]:
    """See `harness.Attacks`."""

    def case(draw: Random) -> None:
        kill, place = draw.choice(((kill_facts, "facts"), (kill_packs, "packs")))
        figures = kill(1, draw.getrandbits(32), folder / place)
        if figures["lost"]:
            raise LostError(f"{place}: {figures}")
        if any(figures.get(name) for name in ("unclean", "misread", "left", "foreign")):
            raise WrongError(f"{place}: {figures}")

    yield case
