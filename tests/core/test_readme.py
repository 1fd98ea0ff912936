"""Code in the README and the documentation runs and prints what it says; links lead somewhere; the site builds."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kp_core
from tests.conftest import _smol

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "cookbooks").rglob("*.md")]
}
CODE = [(name, code) for name, text in PAGES.items() for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
BLOCKS = [
    pytest.param(name, code, output, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, (code, output) in enumerate(
        re.findall(r"```python\n((?:(?!```).)*)```\n+```text\n(.*?)```", text, re.DOTALL)
    )
]
# What a page loads when it is opened: not the links in it.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:)?//|<link[^>]*rel=\"?stylesheet[^>]*//|@import"
)


@pytest.fixture
def one_engine(monkeypatch):
    """Blocks load the bundled model as anybody would; here that takes its seconds once, and each begins empty."""

    def load(dtype=None):
        engine = _smol(dtype)
        engine.clear_cache()
        return engine

    monkeypatch.setattr(kp_core, "load_engine", load)


def test_there_is_code_to_run():
    assert {page for page, *_ in (block.values for block in BLOCKS)} >= {
        "README.md",
        "docs/agents.md",
        "docs/editing.md",
        "docs/index.md",
        "docs/langchain.md",
        "docs/llamaindex.md",
        "docs/loading.md",
        "docs/python.md",
        "docs/several-packs.md",
        "docs/steering.md",
        "docs/storage.md",
        "docs/vector-stores.md",
    }


def test_the_readme_is_short():
    assert PAGES["README.md"].count("\n") < 150


def test_the_documentation_is_short():
    """Words of all pages but the changelog, the specification, the reference and the notebooks' folders."""
    reference = ("docs/format.md", "docs/options.md", "docs/models.md", "docs/reference/")
    pages = [text for page, text in PAGES.items() if not page.startswith(("CHANGELOG", "cookbooks/", *reference))]
    assert sum(len(text.split()) for text in pages) <= 16_000


def test_the_navigation_is_short():
    """The site has the pages that its navigation names, and no others."""
    named = re.findall(r"^ *- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) == {page[len("docs/") :] for page in PAGES if page.startswith("docs/")} | {"security.md"}
    assert len(named) <= 22


def test_the_way_of_a_request_is_ten_files():
    """`docs/architecture.md` and the files that it lists can be read in one sitting."""
    page = PAGES["docs/architecture.md"]
    files = re.findall(r"^\d+\. `(kp_\S+\.py)`", page, re.MULTILINE)
    assert len(set(files)) == 10
    assert sum(text.count("\n") for text in [page, *((ROOT / file).read_text() for file in files)]) <= 4_500


@pytest.mark.parametrize(("page", "code"), CODE, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CODE)])
def test_code_is_python(page, code):
    compile(code, page, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code", "output"), BLOCKS)
def test_code_prints_what_is_shown(page, code, output, one_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), {})  # noqa: S102 - our own pages
    assert printed.getvalue().strip() == output.strip()


@pytest.mark.slow
def test_a_second_run_prints_what_the_readme_says(one_engine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [(code, shown, said)] = re.findall(
        r"```python\n((?:(?!```).)*)```\n+```text\n[^\n]*?(\d+ of \d+)[^\n]*\n```\n\nA second run says (\d+)",
        PAGES["README.md"],
        re.DOTALL,
    )
    for expected in (shown, re.sub(r"^\d+", said, shown)):
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own page
        assert expected in capsys.readouterr().out


@pytest.mark.slow
def test_commands_print_what_is_shown(tmp_path):
    """Those of the shell's page; handles, scores and times differ."""
    [(commands, output)] = re.findall(r"```sh\n((?:(?!```).)*)```\n+```text\n(.*?)```", PAGES["docs/cli.md"], re.DOTALL)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ran = subprocess.run(  # noqa: S603
        ["/bin/sh", "-ec", commands], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, check=True
    )
    shown, printed = (
        re.sub(r"kp:\S+|\d+\.\d+| +$", "", text.strip(), flags=re.MULTILINE) for text in (output, ran.stdout.decode())
    )
    assert printed == shown


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", PAGES[page], flags=re.DOTALL)
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    missing = [target for target in targets if target and not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    """MkDocs checks links and anchors between pages; `--strict` fails on any that leads nowhere."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    # No proxy leads anywhere, so whatever asks for something from the network fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    pages = {page.relative_to(tmp_path / "site").as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    assert not [name for name, html in pages.items() if FETCHED.search(html)]
    # What is generated is there: a class, one of its methods, an error.
    assert 'id="kp_langchain.store.KnowledgePackStore.sweep_ttl"' in pages["reference/adapters.html"]
    assert 'id="kp_core.errors.FactStoreLockedError"' in pages["reference/core.html"]
