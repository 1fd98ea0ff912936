"""An agent whose process ended goes on in another one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MESSAGES = [
    {"role": "system", "content": "Answer with a few words."},
    {"role": "user", "content": "Which keeper counted most ships?"},
]


def step(*arguments: str) -> dict:
    command = [sys.executable, "-m", "tests.core.engines.restart_worker", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow  # Loads the real model twice; `test_keeping.py` does the same in one process with a tiny one.
def test_an_agent_of_ten_searches_goes_on_in_another_process(tmp_path):
    """It reads all knowledge from the store, computes none of it, and sees what a cold run would compute."""
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps(MESSAGES), encoding="utf-8")
    before = step(str(tmp_path / "store"), str(messages), "run")
    assert before["pack_tokens"] > 250
    after = step(str(tmp_path / "store"), str(messages), "go on")
    assert after["reused_tokens"] == after["pack_tokens"] == before["pack_tokens"]
    assert after["computed_tokens"] == after["prompt_tokens"]
    assert after["same"]
