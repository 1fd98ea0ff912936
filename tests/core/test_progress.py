"""Progress where nobody looks at a terminal."""

import io

from kp_core import progress
from kp_core.progress import bar_of


def test_without_a_terminal_progress_is_lines(monkeypatch):
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    assert list(bar_of("Counting", 3, "sheep", iter("abc"))) == ["a", "b", "c"]
    with bar_of("Answering", 9, "answer", done=4) as bar:
        bar.update(5)
    lines = said.getvalue().splitlines()
    assert "\r" not in said.getvalue()
    assert len(lines) == len(set(lines)) >= 2
    assert any(line.startswith("Counting") and "3/3" in line for line in lines)
    assert any(line.startswith("Answering") and "9/9" in line for line in lines)


def test_short_work_says_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    assert list(bar_of("Counting", 3, "sheep", iter("abc"))) == ["a", "b", "c"]
    assert list(bar_of("Counting", 3, "sheep", iter("abc"), shown=False)) == ["a", "b", "c"]
    assert not said.getvalue()
