"""Threads: torch gets no more than the cores that other processes leave free."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_WATCH = """
import time, torch
from kp_core.threads import threads_for_free_cores
before = torch.get_num_threads()
with threads_for_free_cores():
    time.sleep({seconds})
print(before, torch.get_num_threads())
"""


def _threads(seconds: float, **environment: str) -> list[int]:
    """How many threads torch has in a new process before and after it watched the machine for `seconds`."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", _WATCH.format(seconds=seconds)]
    found = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)  # noqa: S603
    return [int(number) for number in found.stdout.split()]


@pytest.fixture
def busy():
    """As many busy processes as there are cores."""
    if not Path("/proc/stat").exists():
        pytest.skip("Only Linux says what other processes use.")
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_torch_computes_with_one_thread_where_others_keep_all_cores_busy():
    assert _threads(1)[1] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_a_number_that_was_chosen_and_a_short_look_change_nothing():
    before, after = _threads(1, OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))))
    assert after == before
    before, after = _threads(0)
    assert after == before
