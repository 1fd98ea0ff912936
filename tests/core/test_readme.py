"""The code of the README and of the guides runs, and prints what they say it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("guide-*.md"))]
CODE = re.compile(r"```python\n(.*?)```\n+```text\n(.*?)```", re.DOTALL)
BLOCKS = [
    pytest.param(*block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(CODE.findall(page.read_text(encoding="utf-8")))
]


def test_every_page_has_code_that_runs():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert 0 < text.count("```python") == len(CODE.findall(text)), page


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = PAGES[0].read_text(encoding="utf-8")
    assert text.count("\n") < 150
    for page in PAGES:
        said = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:)([^)#]+)|(?:src|srcset)=\"([^\"]+)\"", said):
            assert (page.parent / "".join(link)).exists(), f"{page.name}: {link}"


@pytest.mark.slow
@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_code_prints_what_is_shown(code, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own pages
    assert printed.getvalue().strip() == output.strip()
