"""Every notebook runs from top to bottom, and draws its plot."""

import ast
import contextlib
import io
import warnings
from inspect import isawaitable
from pathlib import Path

import pytest

import kp_core

FOLDER = Path(__file__).parents[2] / "cookbooks"
NOTEBOOKS = sorted(FOLDER.glob("*/*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 4


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Notebooks read what stands beside their folder, and write where they run."""
    (tmp_path / "demo").symlink_to(FOLDER / "demo")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.slow
@notebooks
async def test_a_notebook_runs_on_a_thin_model(path, here, thin_model, monkeypatch):
    """In this process, which has its libraries loaded already."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    import nbformat
    from llama_index.core import Settings

    load = kp_core.load_engine
    monkeypatch.setattr(kp_core, "load_engine", lambda **options: load(thin_model, device="cpu", **options))
    monkeypatch.setattr(Settings, "_callback_manager", None)
    cells, names, printed = nbformat.read(path, as_version=4).cells, {"__name__": "__main__"}, []
    with warnings.catch_warnings(), mpl.rc_context({"backend": "agg"}):
        plt.close("all")
        for cell in cells:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                if cell.cell_type == "code":
                    code = compile(cell.source, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                    if isawaitable(waited := eval(code, names)):  # noqa: S307 - our own pages
                        await waited
            printed.append(out.getvalue())
        assert plt.get_fignums()
        plt.close("all")
    # The same cells print; what they print depends on the model.
    assert [bool(each) for each in printed] == [bool(_printed(cell)) for cell in cells]


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # Minutes on two cores that nobody else uses.
@notebooks
def test_a_notebook_runs(path, here):
    """As a reader runs it: in a kernel of its own, on the bundled model."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    stored = [_printed(cell) for cell in notebook.cells]
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(here)}}).execute()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    # The same cells print; what they print may hold seconds.
    assert [bool(_printed(cell)) for cell in notebook.cells] == [bool(printed) for printed in stored]


def _printed(cell):
    return "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout")
