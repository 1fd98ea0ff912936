"""Facts that overwrite those with their ids, and packs of texts that several facts share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from kp_core import ChromaFactStore, Fact, FactStore, MemoryFactStore, PackStore
from kp_core.banks.delivery import Delivery
from kp_core.banks.embed import as_embedder
from kp_core.errors import FactError, ModelError
from tests.conftest import tiny_engine, until

EMBEDDER = as_embedder(DeterministicFakeEmbedding(size=32))


@pytest.fixture(params=["memory", "chroma"])
def facts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FactStore]:
    if request.param == "memory":
        yield MemoryFactStore(DeterministicFakeEmbedding(size=32), bank_size=3)
    else:
        with ChromaFactStore(tmp_path / "facts", EMBEDDER, bank_size=3) as store:
            yield store


@pytest.fixture
def delivery(facts: FactStore, tmp_path: Path) -> Delivery:
    return Delivery(facts, tiny_engine(), PackStore(tmp_path / "packs"), kv="lazy", namespace="isles")


def lines(count: int, **about: object) -> list[Fact]:
    return [Fact(f"Line {number}.", id=f"i{number}", namespace="isles", metadata=about) for number in range(count)]


def test_ids_count_and_not_texts(facts: FactStore) -> None:
    first = facts.add(lines(12, tags=["a", None]), overwrite=True)
    facts.rebuild()
    again = facts.add(lines(12, tags=["a", None]), overwrite=True)
    assert (first.added, again.added, again.duplicates) == (12, 0, 12)
    changed = [Fact("Line 4.", id="twin", namespace="isles"), Fact("New.", id="i3", namespace="isles")]
    changed += [Fact("Line 5.", id="i5", namespace="isles"), Fact("New!", id="i3", namespace="isles")]
    assert facts.add(changed, overwrite=True).added == 3
    assert len(facts) == 13
    held = {fact.id: (fact.text, fact.version, dict(fact.metadata)) for fact in facts.facts()}
    assert held["twin"] == ("Line 4.", 1, {})
    assert held["i4"] == ("Line 4.", 1, {"tags": ["a", None]})
    assert held["i3"] == ("New!", 2, {})
    assert held["i5"] == ("Line 5.", 1, {})
    assert facts.verify() == []  # type: ignore[attr-defined]  # each of them stands in one bank
    assert sorted(fact.id for name in facts.banks() for fact in facts.bank_facts(name)) == sorted(held)


def test_the_pack_of_a_text_goes_with_its_last_fact(delivery: Delivery) -> None:
    delivery.add([*lines(4), Fact("Line 1.", id="twin", namespace="isles")], overwrite=True)
    assert len(list(delivery.store)) == 4
    # A search names a text once.
    assert [found.unit.text for found in delivery.search("Line 1.", 2)].count("Line 1.") == 1
    delivery.delete(["i1"])
    assert len(list(delivery.store)) == 4
    delivery.add([Fact("Other.", id="twin")], overwrite=True)
    assert {fact.text for fact in delivery.facts.facts()} == {"Line 0.", "Other.", "Line 2.", "Line 3."}
    assert {delivery.store.get(handle).text for handle in delivery.store} == {
        fact.text for fact in delivery.facts.facts()
    }


def test_facts_without_a_pack_are_deleted(facts: FactStore, delivery: Delivery) -> None:
    facts.add(lines(3))
    assert [fact.id for fact in delivery.delete(["i1"])] == ["i1"]
    assert len(facts) == 2


@pytest.mark.parametrize("how", ["ids", "source", "overwrite", "add"])
def test_an_expired_fact_goes_with_its_pack(delivery: Delivery, how: str) -> None:
    late = Fact("Late.", id="late", source="a.md", namespace="isles", expires=1.0)
    delivery.facts.add([late])
    [handle] = delivery.compile([late], stored=False, progress=False)
    if how in {"ids", "source"}:
        by = {"ids": ["late"]} if how == "ids" else {"source": "a.md"}
        assert [fact.id for fact in delivery.delete(**by)] == ["late"]  # type: ignore[arg-type]
    else:
        delivery.add([Fact("New.", id="late" if how == "overwrite" else "new")], overwrite=how == "overwrite")
    assert handle not in list(delivery.store)
    assert delivery.facts.delete(["late"]) == (how == "overwrite")


def test_very_many_facts_are_deleted_in_batches(tmp_path: Path) -> None:
    asked = list[int]()

    class Asked(MemoryFactStore):
        def facts(self, **wanted: Any) -> Iterator[Fact]:
            digests = (wanted.get("where") or {}).get("kp:digest")
            asked.extend([len(digests["$in"])] if isinstance(digests, dict) else [])
            return super().facts(**wanted)

    facts = Asked(EMBEDDER)
    facts.add(lines(2100))
    made = Delivery(facts, tiny_engine(), PackStore(tmp_path), kv="lazy", namespace="isles")
    made.compile(lines(2100)[::2099], progress=False)
    assert len(list(made.store)) == 2
    assert len(made.delete(map("i{}".format, range(2100)))) == 2100
    assert (list(made.store), asked) == ([], [1000, 1000, 100])


def test_a_text_under_two_ids_stands_in_a_unit_once(facts: FactStore, tmp_path: Path) -> None:
    store, made = PackStore(tmp_path / "packs"), lines(4)
    delivery = Delivery(facts, tiny_engine(), store, unit="bank", kv="lazy")
    delivery.add([*made, Fact("Line 1.", id="twin", namespace="isles")])
    assert sorted(fact.id for name in facts.banks() for fact in facts.bank_facts(name)) == [
        *(f"i{n}" for n in range(4)),
        "twin",
    ]
    packs = {handle: store.get(handle) for handle in store}
    assert sorted(line for pack in packs.values() for line in pack.text.splitlines()) == [fact.text for fact in made]
    delivery.delete(["twin"])
    assert set(store) == set(packs)
    delivery.delete(["i1"])
    assert set(store) == {handle for handle, pack in packs.items() if "Line 1." not in pack.text}


def test_nothing_is_stored_without_an_engine_to_compile_it(facts: FactStore, delivery: Delivery) -> None:
    with pytest.raises(FactError, match="no engine"):
        Delivery(facts, None, delivery.store).add(lines(2))
    assert len(facts) == 0


@pytest.mark.slow
def test_a_search_finds_where_background_work_finds_no_room(facts: FactStore, delivery: Delivery) -> None:
    facts.add(lines(3))
    engine, go = tiny_engine(), threading.Event()
    later = Delivery(facts, engine, delivery.store, namespace="isles", precompile="idle")
    with suppress(ModelError):
        while True:
            engine.when_idle(lambda: go.wait(60) and None)
    handles = [found.handle for found in later.search("Line 1.", 2)]
    go.set()
    until(lambda: later.search("Line 1.", 2) and all(later.store.get(handle).kv for handle in handles if handle))


@pytest.mark.parametrize("fact_id", ["", "mill"])
def test_a_correction_stays_when_its_source_is_read_again(facts: FactStore, fact_id: str) -> None:
    said = Fact("The mill has four sails.", id=fact_id, namespace="isles")
    facts.add([said, *lines(3)])
    facts.update(replace(said, text="The mill has six sails."))
    report = facts.add([said, *lines(4)])
    assert (report.added, report.duplicates, report.superseded) == (1, 3, (said.id,))
    assert facts.get(said.id, namespace="isles").text == "The mill has six sails."
    with pytest.raises(FactError, match="`kp build --replace`"):  # never corrected, so one of the texts is a mistake
        facts.add([Fact("Another line.", id="i0", namespace="isles")])


def test_what_a_correction_replaced_is_not_compiled_again(delivery: Delivery) -> None:
    said = Fact("The mill has four sails.", namespace="isles")
    delivery.add([said])
    delivery.update(replace(said, text="The mill has six sails."))
    delivery.add([said])
    assert [delivery.store.get(handle).text for handle in delivery.store] == ["The mill has six sails."]


def test_deleting_a_document_leaves_the_equal_text_of_another(delivery: Delivery) -> None:
    delivery.add([*(Fact("Key by nine.", source=source) for source in ("a.md", "b.md", "c.md")), *lines(3)])
    found = delivery.search("Key by nine.", 3)
    assert len({result.unit.text for result in found}) == 3
    for source, left in (("a.md", 2), ("b.md", 1)):
        assert len(delivery.delete(source=source)) == 1
        assert len(list(delivery.facts.facts(where={"source": {"$ne": ""}}))) == left
        assert delivery.search("Key by nine.", 1)[0].handle == found[0].handle
        assert (delivery.gc(), found[0].handle in delivery.store) == ([], True)
    delivery.delete(source="c.md")
    assert found[0].handle not in delivery.store
