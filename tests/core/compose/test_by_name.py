"""Composers are found by name among what is installed, and the core knows none."""

import re
from pathlib import Path

import pytest

import kp_core
from kp_core import Composer, PackStore
from kp_core.errors import OptionError
from kp_core.plan import composer as composers
from kp_core.plan.composer import composer_of
from tests.conftest import tiny_engine

ROOT = Path(kp_core.__file__).parents[1]
TEXTS = ["The first island is green.", "The second island is blue.", "The third island is red."]


@pytest.fixture
def strangers(monkeypatch):
    """Packages of somebody else, as they lie among those installed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "strangers")
    yield
    composers._installed.cache_clear()


@pytest.mark.usefixtures("strangers")
def test_a_composer_of_another_package_is_found_by_its_name(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    handles = [str(store.put(engine.build_pack(text, namespace="isles"))) for text in TEXTS]
    asked = {"view": store.view("isles"), "composer": "mend:packs=2"}
    answer = engine.prefill("\n\n".join((*handles, "Which?")), **asked)
    assert [str(handle) for handle in answer.packs] == handles[1:]
    assert answer.usage.unread_packs == 1
    assert answer.usage.approximate_tokens == len(answer.prompt.spans[1])
    engine.clear_cache()
    assert "composed (mend:packs=2)" in str(engine.explain("\n\n".join((*handles, "Which?")), **asked))
    with pytest.raises(OptionError, match=r"Got composer='mend:r=1'; expected packs= for 'mend'\."):
        composer_of("mend:r=1")


def test_one_that_is_not_installed_is_refused_with_those_that_are():
    with pytest.raises(OptionError, match=r"Got composer='mend'; expected one of .*exact, .* install it again"):
        composer_of("mend")


def test_an_install_that_is_older_than_the_code_is_told_apart(monkeypatch):
    monkeypatch.setattr(composers, "entry_points", lambda **_: ())
    composers._installed.cache_clear()
    with pytest.raises(OptionError, match=r"Got composer='exact'; expected one of none, .* install it again"):
        composer_of("exact")
    composers._installed.cache_clear()


def test_one_that_cannot_be_loaded_is_named(strangers, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mend", None)
    with pytest.raises(OptionError, match="Got composer='mend', which is installed but cannot be loaded"):
        composer_of("mend")


def sources(*packages):
    return {path: path.read_text(encoding="utf-8") for name in packages for path in sorted((ROOT / name).rglob("*.py"))}


def test_the_core_names_no_composer():
    name = re.compile(r"[Pp]acket|[Ss]plice|[Nn]aive|\bselect\b|Select(or|Composer)|AutoComposer|[Cc]alibrations")
    named = {
        f"{path}:{number}: {line.strip()}"
        for path, text in sources("kp_core").items()
        for number, line in enumerate(text.splitlines(), 1)
        if name.search(line) and not line.startswith("    \"composer='")  # What left, and what to use instead.
    }
    assert not named


def test_nobody_asks_what_kind_of_composer_it_is():
    kinds = "|".join(kind.__name__ for kind in _subclasses(Composer))
    asked = re.compile(rf"isinstance\([^)]*?\b({kinds})\b")
    packages = ("kp_core", "kp_cli", "kp_langchain", "kp_llamaindex", "kp_methods", "kp_serve")
    found = {
        f"{path}: {match[0]}"
        for path, text in sources(*packages).items()
        for match in asked.finditer(text)
        if f"class {match[1]}" not in text
    }
    assert not found


def _subclasses(kind):
    for each in kind.__subclasses__():
        if each.__module__.startswith("kp_"):
            yield each
            yield from _subclasses(each)
