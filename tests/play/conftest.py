"""A playground over the bundled model, its page, and Debian's chromium to open it with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kp_cli.play.world import QUESTIONS, SAMPLE, World
from kp_core.banks.embed import SentenceTransformerEmbedder

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture(scope="session")
def embedder():
    return SentenceTransformerEmbedder()


@pytest.fixture(scope="session")
def played(smol_here, embedder, tmp_path_factory) -> World:
    """The playground as `kp play` opens it."""
    world = World(smol_here, embedder, tmp_path_factory.mktemp("play"))
    for _ in world.add(SAMPLE):
        pass
    return world


@pytest.fixture(scope="session")
def site(played, tmp_path_factory) -> Iterator[str]:
    """Where its page is."""
    pytest.importorskip("gradio", reason="the playground needs gradio")
    os.environ["GRADIO_TEMP_DIR"] = str(tmp_path_factory.mktemp("uploads"))
    from kp_cli.play.page import serve

    page = serve(played, questions=QUESTIONS)
    yield page.local_url
    page.close(verbose=False)


@pytest.fixture(scope="module")  # Its event loop runs in this thread, where other tests start loops of their own.
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright")
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium; `make setup-browser` installs it")
    with sync_api.sync_playwright() as driver:
        # Containers have no user namespaces for its sandbox; it opens pages of ours alone.
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()
