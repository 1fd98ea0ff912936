"""A few cases of each class of attacks, always the same ones; `python -m tests.attack` tries new ones for hours."""

import pytest

from tests.attack.harness import NAMES, load, run


@pytest.mark.parametrize("name", NAMES)
def test_attacks_come_to_nothing(name, tmp_path):
    tally = run(name, 0, tmp_path, numbers=range(load(name).SHORT))
    assert tally.tried >= load(name).SHORT
    assert not tally.bad, "\n".join(tally.said)
