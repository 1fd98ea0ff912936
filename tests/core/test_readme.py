"""The code of the README runs, and prints what the README says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)


def test_there_is_code_to_run():
    assert BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(("code", "output"), BLOCKS, ids=range(len(BLOCKS)))
def test_code_prints_what_is_shown(code, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own README
    assert printed.getvalue().strip() == output.strip()
