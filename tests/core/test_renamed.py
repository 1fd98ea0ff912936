import importlib
import subprocess
import sys

import pytest

import kp_core
from tests.conftest import tiny_engine


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("banks", "facts"),
        ("banks.rerank", "facts.rerank"),
        ("bankpacks", "delivery"),
        ("embed", "facts.embed"),
        ("sources", "facts.sources"),
        ("store", "packs.store"),
        ("template", "prompt.template"),
    ],
)
def test_modules_by_their_old_names(old, new):
    # In a process of its own, as a module is found by its old name once.
    said = f"import warnings, kp_core; warnings.simplefilter('always'); import kp_core.{old}"
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False)  # noqa: S603
    assert f"`kp_core.{old}` is now called `kp_core.{new}`" in found.stderr
    sys.modules.pop(f"kp_core.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"now called `kp_core.{new}`"):
        module = importlib.import_module(f"kp_core.{old}")
    assert module is importlib.import_module(f"kp_core.{new}")
    assert module.__spec__.name == f"kp_core.{new}"


def test_values_by_their_old_names():
    with pytest.warns(DeprecationWarning, match="`kp_core.Head` is now called `Prefix`"):
        assert kp_core.Head is kp_core.Prefix
    from kp_core.engines import hf

    with pytest.warns(DeprecationWarning, match="now called `load_session`"):
        assert hf.HFEngine is hf.load_session
    with pytest.raises(AttributeError, match="'kp_core' has no attribute 'Tail'"):
        _ = kp_core.Tail


def test_keywords_by_their_old_names():
    engine = tiny_engine()
    with pytest.warns(DeprecationWarning, match="`inside=` of build_pack is now called `compiled_for=`"):
        old = engine.build_pack("Two islands.", inside="system", lazy=True)
    assert old.prefix == engine.build_pack("Two islands.", compiled_for="system", lazy=True).prefix
    assert kp_core.renamed.renamed(a="b")(lambda b: b)(b=3) == 3
