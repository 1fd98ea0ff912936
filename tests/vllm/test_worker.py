"""vLLM's column of `benchmarks.concurrency`."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import vllmserver
from kp_core import bundled_model
from tests.conftest import DEMO
from tests.vllm.conftest import SETTINGS


@pytest.mark.nightly
def test_every_row_gets_its_tokens_a_second(tmp_path):
    prompts = [[1, 9690, 198, 2683 + number, 335] for number in range(3)]
    rows = [{"prompts": prompts, "warm": prompts[:1], "at_once": at_once} for at_once in (3, 1)]
    asked = {"model": str(bundled_model()), "dtype": "float32", "tokens": 4, "rows": rows}
    source, target = tmp_path / "asked.json", tmp_path / "rates.json"
    source.write_text(json.dumps(asked))
    command = [sys.executable, str(DEMO.parents[1] / "benchmarks" / "vllm_worker.py"), str(source), str(target)]
    subprocess.run(command, check=True, env=os.environ | vllmserver.SETTINGS | SETTINGS, timeout=560)  # noqa: S603 - our own command
    rates = json.loads(target.read_text())
    assert len(rates) == 2
    assert min(rates) > 0
