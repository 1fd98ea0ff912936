"""Every notebook runs from top to bottom, and draws its plot."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "cookbooks"
NOTEBOOKS = sorted(FOLDER.glob("*/*.ipynb"))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)  # Minutes on two cores that nobody else uses.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    stored = [_printed(cell) for cell in notebook.cells]
    # Notebooks read what stands beside their folder, and write where they run.
    (tmp_path / "demo").symlink_to(FOLDER / "demo")
    (tmp_path / "here").mkdir()
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path / "here")}}).execute()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    # The same cells print; what they print may hold seconds.
    assert [bool(_printed(cell)) for cell in notebook.cells] == [bool(printed) for printed in stored]


def _printed(cell):
    return "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout")
