import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from itertools import chain

import pytest

import kp_core
import kp_serve
from tests.mutants import FAULTS, ROOT

INSIDE_VLLM = ("kp_serve.blocks", "kp_serve.connector")
HEAVY = ("transformers", "chromadb", "langchain_core", "llama_index", "sentence_transformers", "sklearn", "vllm")


LIGHT = ("kp_core", "kp_core.engines", "kp_core.banks", "kp_core.packs.store", "kp_core.banks.embed", "kp_serve.engine")


def test_imports_are_light():
    """One after the other in one process: the first that is not shows in what it prints."""
    script = (
        "import importlib, sys\n"
        f"for module in {LIGHT}:\n"
        "    importlib.import_module(module)\n"
        f"    print(module, [name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    assert found.stdout.splitlines() == [f"{module} []" for module in LIGHT]


def test_packages_alone_say_what_they_export():
    packages = (kp_core, kp_serve)
    for about in chain.from_iterable(pkgutil.walk_packages(each.__path__, f"{each.__name__}.") for each in packages):
        if about.name in INSIDE_VLLM and importlib.util.find_spec("vllm") is None:
            continue
        module = importlib.import_module(about.name)
        exported = getattr(module, "__all__", ())
        assert not exported or about.ispkg or module is kp_core.errors, f"{about.name} is no package, and has __all__"
        assert len(set(exported)) == len(exported), about.name
        assert all(hasattr(module, name) for name in exported), about.name


def test_no_module_imports_itself_through_others():
    """Imports at the level of modules; those for type checkers and inside functions do not count."""
    paths = {path.relative_to(ROOT): path for path in ROOT.glob("kp_*/**/*.py")}
    modules = {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= (whole & modules.keys()) or ({node.module} & modules.keys())
    assert len(graph) > 100
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # Raises `CycleError`, which names the modules.


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'kp_core' has no attribute 'Tail'"):
        _ = kp_core.Tail


def test_errors_tell_what_to_do():
    from kp_core import errors

    for name in errors.__all__:
        assert name in (errors.__doc__ or ""), f"{name} is not drawn in the tree"
        assert issubclass(getattr(errors, name), errors.KnowledgePackError | Warning)
    assert len(errors.__all__) <= 14
    with pytest.raises(ImportError, match=r"`kp_core.errors.CacheBudgetError` is gone in 0.3; catch ModelError"):
        errors.CacheBudgetError  # noqa: B018 - the access is refused


def test_every_fault_of_the_mutants_can_be_put_into_the_code():
    assert len(FAULTS) == 42
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.text) == 1, fault


@pytest.mark.parametrize(
    ("adapter", "framework", "extra"),
    [("kp_langchain", "langchain_core", "langchain"), ("kp_llamaindex", "llama_index", "llamaindex")],
)
def test_an_adapter_without_its_framework_says_what_to_install(adapter, framework, extra):
    script = (
        f"import sys; sys.modules[{framework!r}] = None\n"
        f"try:\n    import {adapter}\nexcept ImportError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    assert f'pip install "knowledge-packs[{extra}]"' in found.stdout


def test_make_says_which_python_it_needs(tmp_path):
    old = tmp_path / "python3.10"
    old.write_text(
        "#!/bin/sh\n"
        f'exec {sys.executable} -c \'import sys; sys.version_info = (3, 10, 14, "final", 0); exec(sys.argv[1])\' "$2"\n'
    )
    old.chmod(0o755)
    command = ["make", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}", "demo"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    first, *_ = ran.stderr.splitlines()
    assert first == f"Knowledge Packs needs Python 3.11 or later; {old} is 3.10. Name another: make PYTHON=python3.12"
    assert not (tmp_path / "venv").exists()


SEAMS = {
    r"cast\(\s*[\"']?\w*(Engine|Composer|FactStore|Blobs|Session)\b": "",
    r"getattr\(\s*(self\.)?_?(session|engine|composer|facts|store|blobs)(\.\w+)*, [^,()]+, ": "",
    r"\b_?(engine|session)\.engine\b": r"kp_core/(session|engines)/|packet/training\.py",
}
"""What no source says of what stands behind a seam, with the files that may: a Protocol says what there is."""


@pytest.mark.parametrize("pattern", SEAMS)
def test_what_stands_behind_a_seam_is_asked_by_its_protocol(pattern):
    sources = [file.relative_to(ROOT) for file in ROOT.glob("kp_*/**/*.py")]
    assert len(sources) > 100
    but = SEAMS[pattern]
    told = [
        f"{file}: {match[0]}"
        for file in sources
        if not (but and re.search(but, file.as_posix()))
        for match in re.finditer(pattern, (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not told
