"""What Hypothesis' state machines of the two stores share."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.attack.trouble import clock

__all__ = ["StoreMachine", "walk"]

_RUNS, _STEPS = 8, 25


class StoreMachine(RuleBasedStateMachine):
    """A folder of its own, and a clock that jumps by minutes or a year, either way."""

    def __init__(self) -> None:
        super().__init__()
        self.around = ExitStack()
        self.folder = Path(tempfile.mkdtemp())
        self.around.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.jump = self.around.enter_context(clock())

    @rule(seconds=st.sampled_from((-3e7, -600, 600, 3e7)))
    def the_clock_jumps(self, seconds: float) -> None:
        self.jump(seconds)

    def teardown(self) -> None:
        self.around.close()


def walk(machine: type[StoreMachine], draw: Random) -> int:
    """Walk at random a few times; how many steps that were, at most."""
    own = settings(
        max_examples=_RUNS,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(draw.getrandbits(32))(machine), settings=own)
    return _RUNS
