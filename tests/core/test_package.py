import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import kp_core

INSIDE_VLLM = ("kp_core.engines.vllm.blocks", "kp_core.engines.vllm.connector")
HEAVY = ("transformers", "chromadb", "langchain_core", "llama_index", "sentence_transformers", "sklearn", "vllm")


LIGHT = ("kp_core", "kp_core.engines", "kp_core.facts", "kp_core.packs.store", "kp_core.facts.embed")


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


def test_every_module_says_what_it_exports():
    for about in pkgutil.walk_packages(kp_core.__path__, "kp_core."):
        if about.name in INSIDE_VLLM and importlib.util.find_spec("vllm") is None:
            continue
        module = importlib.import_module(about.name)
        exported = getattr(module, "__all__", None)
        if exported is None:
            assert about.ispkg, f"{about.name} has no __all__"
            continue
        assert len(set(exported)) == len(exported), about.name
        assert all(hasattr(module, name) for name in exported), about.name


def test_a_name_that_is_not_there_is_an_attribute_error():
    for module in (kp_core, kp_core.packs):
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'Tail'"):
            _ = module.Tail


def test_errors_tell_what_to_do():
    from kp_core import errors

    for name in errors.__all__:
        assert name in (errors.__doc__ or ""), f"{name} is not drawn in the tree"
        assert issubclass(getattr(errors, name), errors.KnowledgePackError)
