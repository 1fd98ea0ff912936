"""Handles outlive their facts: an old conversation reads a line in place of what was deleted."""

import os
import time

import pytest

from kp_core import Fact, Handle, MemoryFactStore, PackStore
from kp_core.banks.delivery import Delivery
from kp_core.errors import PackError, PackNotFoundError
from kp_methods.edit import edit_fact
from tests.conftest import tiny_engine
from tests.kits import HashEmbedder

KEEPER, NEXT = "The lighthouse of Veyl is kept by Orla Venn.", "The lighthouse of Veyl is kept by Tam Reed."
DELETED, REPLACED = "This passage was deleted.", "This passage was replaced:\n"


@pytest.fixture
def library(tmp_path):
    facts = MemoryFactStore(HashEmbedder())
    library = Delivery(facts, tiny_engine(), PackStore(tmp_path / "packs"), namespace="veyl", compiled_for="user")
    library.add([Fact(KEEPER, id="keeper"), Fact("The mill of Veyl has four sails.", id="mill")], progress=False)
    return library


def read(library, handle, *namespaces, role="tool", **options):
    """What a model reads in place of `handle`, as a tool brought it."""
    view = library.store.view(*(namespaces or ("veyl",)))
    messages = [{"role": "user", "content": "Who?"}, {"role": role, "content": f"[{handle}]"}]
    settings = {"unresolved": "error", "max_tokens": 1, **options}
    said = library.engine.generate(messages, view=view, **settings)
    text = library.engine.template.text(said.prompt)
    return text[text.rindex("[") + 1 : text.rindex("]")], said


def handle_of(library, text=KEEPER):
    return library.store.handle(text, "veyl")


def test_a_deleted_fact_is_a_line_in_an_old_conversation(library):
    handle = handle_of(library)
    assert read(library, handle)[0] == KEEPER
    library.delete(["keeper"])
    text, said = read(library, handle)
    assert text == DELETED
    assert (said.usage.pack_tokens, said.usage.unresolved_handles) == (0, 0)
    with pytest.raises(PackNotFoundError, match="its text was deleted"):
        read(library, handle, packs=[str(handle)])


def test_no_file_of_the_store_says_what_was_deleted(library):
    handle, folder = handle_of(library), library.store.path
    read(library, handle, keep="always", packs=[handle_of(library, "The mill of Veyl has four sails.")])
    ids = library.store.get(handle).token_ids
    assert len(ids) > 8
    library.delete(["keeper"])
    files = [file for file in folder.rglob("*") if file.is_file()]
    [mark] = [file for file in files if handle.id in file.name]
    assert mark.read_bytes() == b""
    for file in files:
        data = file.read_bytes()
        assert KEEPER.encode() not in data
        assert str(list(ids))[1:-1].encode() not in data
        assert str(handle).encode() not in data


def test_a_handle_that_never_was_still_raises(library):
    library.delete(["keeper"])
    never = Handle("veyl", "a" * 21)
    with pytest.raises(PackNotFoundError, match="no such pack"):
        read(library, never)
    assert read(library, never, unresolved="text")[0] == str(never)


@pytest.mark.parametrize("how", ["update", "overwrite", "edit"])
def test_a_replaced_fact_is_read_as_it_is_now(how, library):
    handle = handle_of(library)
    if how == "update":
        library.update(Fact(NEXT, id="keeper", namespace="veyl"))
    elif how == "overwrite":
        library.add([Fact(NEXT, id="keeper")], overwrite=True, progress=False)
    else:
        edit_fact(library, "keeper", "Orla Venn", "Tam Reed")
        assert read(library, handle)[0] == KEEPER  # Until `gc`.
        library.gc()
    text, said = read(library, handle)
    assert text.startswith(REPLACED)
    assert "Tam Reed" in text
    assert said.usage.pack_tokens > 5
    [fact] = library.facts.facts(ids=["keeper"])
    library.update(Fact("The lighthouse is dark.", id="keeper", namespace="veyl"))
    assert read(library, handle)[0] == REPLACED + "The lighthouse is dark."
    library.delete(["keeper"])
    assert read(library, handle)[0] == DELETED
    assert read(library, handle_of(library, fact.text))[0] == DELETED


def test_the_mark_is_set_when_the_last_fact_goes_and_lifted_when_the_text_comes_back(library):
    handle = handle_of(library)
    library.add([Fact(KEEPER, id="again", source="other.md")], progress=False)
    library.delete(["keeper"])
    assert read(library, handle)[0] == KEEPER
    assert library.store.buried(handle) is False
    library.delete(["again"])
    assert read(library, handle)[0] == DELETED
    library.add([Fact(KEEPER, id="third")], progress=False)
    assert read(library, handle)[0] == KEEPER
    assert library.store.buried(handle) is False


def test_facts_that_were_replaced_by_one_another(library):
    handles = handle_of(library), handle_of(library, NEXT)
    library.update(Fact(NEXT, id="keeper", namespace="veyl"))
    library.update(Fact(KEEPER, id="keeper", namespace="veyl"))
    assert [read(library, handle)[0] for handle in handles] == [KEEPER, REPLACED + KEEPER]
    library.delete(["keeper"])
    assert [read(library, handle)[0] for handle in handles] == [DELETED, DELETED]


def test_a_mark_says_nothing_to_other_namespaces_and_roles(library):
    handle = handle_of(library)
    library.delete(["keeper"])
    elsewhere = library.store.handle(KEEPER, "other")
    with pytest.raises(PackNotFoundError, match="no such pack"):
        read(library, elsewhere, "veyl", "other")
    with pytest.raises(PackNotFoundError, match="'veyl' is not allowed"):
        read(library, handle, "other")
    assert read(library, handle, role="assistant")[0] == str(handle)


def test_a_mark_lapses(library, tmp_path):
    handle, folder = handle_of(library), library.store.path / "deleted"
    library.delete(["keeper"])
    for file in folder.rglob("*"):
        os.utime(file, (time.time() - 91 * 24 * 3600,) * 2)
    with pytest.raises(PackNotFoundError, match="no such pack"):
        read(library, handle)
    longer = PackStore(library.store.path, tombstone_days=100)
    assert longer.buried(handle) is True
    library.store.bury(Handle("veyl", handle.id[:2] + "a" * 19))
    assert longer.buried(handle) is False
    none = Delivery(library.facts, library.engine, PackStore(tmp_path / "none", tombstone_days=0), namespace="veyl")
    none.compile(none.all_units(), progress=False)
    none.delete(["mill"])
    assert list(none.store.blobs.list("deleted/")) == []
    for days in (-1, float("nan")):
        with pytest.raises(PackError, match="tombstone_days"):
            PackStore(tmp_path / "none", tombstone_days=days)


def test_as_memory_the_new_pack_stands_with_the_others(library):
    handle = handle_of(library)
    library.update(Fact(NEXT, id="keeper", namespace="veyl"))
    text, said = read(library, handle, placement="system")
    assert text == f"{REPLACED}{handle_of(library, NEXT)}"
    assert said.usage.pack_tokens > 5
