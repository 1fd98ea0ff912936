"""`kp` as a fixture, and a small collection for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kp_cli.app import run
from tests.core.banks.conftest import emptied, server

__all__ = ["emptied", "server"]

FACTS = [
    {"id": "mill", "text": "The mill of Aldburgh has four sails.", "title": "Mill", "year": 1802},
    {"id": "bird", "text": "The bird on the flag of Aldburgh is a heron.", "title": "Flag", "year": 1911},
    {"id": "tide", "text": "The Grey Tide is a novel by Ada Finch.", "title": "Novel", "year": 1987},
    {"id": "bread", "text": "Aldburgh bakes its bread on Thursdays.", "title": "Bread", "year": 1987},
]

Kp = Callable[..., tuple[int, str, str]]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def started(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """`kp` in a process of its own, which an interrupt reaches."""
    # Shells have what they start in the background ignore interrupts, and tests may run there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = [sys.executable, "-m", "kp_cli", *arguments]
        return subprocess.Popen(command, env=ENVIRONMENT, **options)  # noqa: S603 - our own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def kp(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kp]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    # What comes after a second depends on how busy a machine is.
    monkeypatch.setattr("kp_cli._FIRST_S", 3600)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        said = capfd.readouterr()
        return code, said.out, said.err

    yield call
    # A command sets the logging of its process, which here is that of all tests.
    logging.getLogger("kp_core").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the facts and the collection made of them, to be copied."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    with contextlib.chdir(folder):
        assert run(["build", "bank", "facts.jsonl"]) == 0
    return folder


@pytest.fixture
def bank(built: Path, kp: Kp, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path / "bank"


def as_json(result: tuple[int, str, str]) -> dict[str, Any]:
    assert result[0] == 0, result
    return json.loads(result[1])
