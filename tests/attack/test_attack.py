"""A few cases of each class of attacks, always the same ones; `python -m tests.attack` tries new ones for hours."""

import json
import time
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

import pytest

from kp_core.errors import FactError
from tests.attack import harness
from tests.attack.__main__ import main
from tests.attack.harness import NAMES, HungError, LostError, WrongError, load, refused, run
from tests.attack.mutate import value, warped


@pytest.mark.parametrize("quarters", [(0, 1), pytest.param((1, 4), marks=pytest.mark.nightly)], ids=["few", "rest"])
# Processes that are killed take their time; `test_chroma.py` kills one with every change.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "kills" else ()) for name in NAMES]
)
def test_attacks_come_to_nothing(name, quarters, tmp_path):
    first, end = (quarter * load(name).SHORT for quarter in quarters)
    tally = run(name, 0, tmp_path, numbers=range(first, end))
    assert tally.tried >= end - first
    assert not tally.bad, "\n".join(tally.said)


def test_each_way_to_come_out_badly_is_counted(tmp_path, monkeypatch):
    def case(draw):
        kind = draw.choice((WrongError("w"), LostError("l"), KeyError("u"), HungError("h"), FactError("ours"), None))
        with refused():
            if kind is not None:
                raise kind
        return 2

    @contextmanager
    def attack(folder):
        yield case

    monkeypatch.setattr(harness, "load", lambda _name: SimpleNamespace(attack=attack))
    tally = run("planted", 0, tmp_path, numbers=range(60))
    bad = [tally.wrong, tally.lost, tally.uncaught, tally.hung]
    assert all(count > 0 for count in bad)
    assert tally.bad == sum(bad) == len(tally.said) < 60
    assert tally.tried == 60 + (60 - tally.bad)
    [again] = run("planted", 0, tmp_path, numbers=range(59, 60)).said or [""]
    assert again in (tally.said[-1], "")


def test_a_case_draws_the_same_whatever_was_warped_before():
    def drawn(number):
        draw = Random(number)
        return warped(draw, {"messages": [{"content": []}], "n": []}, (value(draw),))

    first = [repr(drawn(number)) for number in range(300)]
    assert [repr(drawn(number)) for number in range(300)] == first


def test_what_hangs_is_given_up(tmp_path, monkeypatch):
    @contextmanager
    def attack(folder):
        yield lambda _draw: time.sleep(60)

    monkeypatch.setattr(harness, "load", lambda _name: SimpleNamespace(attack=attack))
    monkeypatch.setattr(harness, "CASE_SECONDS", 0.05)
    assert run("planted", 0, tmp_path, numbers=range(1)).hung == 1


@pytest.mark.slow
def test_the_long_run_prints_a_table(tmp_path, capfd):
    code = main(["--only", "handles", "--minutes", "0.001", "--seed", "3", "--json", str(tmp_path / "out.json")])
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["handles"]["tried"] > 0
    assert code == (sum(figures["handles"][name] for name in ("wrong", "uncaught", "lost", "hung")) > 0)
    assert f"{figures['handles']['tried']:,}" in capfd.readouterr().out
