"""Packs from facts: which a pack holds, whether its KV is stored, and when it goes."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch

from kp_core import (
    ChromaFactStore,
    Fact,
    FactStore,
    Handle,
    Hit,
    KnowledgePack,
    MemoryFactStore,
    Message,
    PackStore,
    load_engine,
)
from kp_core.banks.compiling import Unit, compile_facts, open_facts
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError, OptionError, PackError, PromptError
from kp_core.events import subscribe
from kp_core.packs.pack import PackKey
from kp_core.prompt.encoding import PromptEncoder
from kp_core.prompt.template import ChatTemplate
from kp_core.session.session import Session
from kp_methods import edit
from kp_methods.edit import edit_fact
from tests.conftest import tiny_engine, until
from tests.kits import CHATML, HashEmbedder, tiny_model, tiny_tokenizer

FACTS = [
    Fact(f"Part {number} of {source or 'nothing'}.", source=source, namespace=namespace)
    for namespace in ("default", "other")
    for number in range(4)
    for source in ("a.md", "b.md", "")
]


@pytest.fixture
def facts() -> MemoryFactStore:
    facts = MemoryFactStore(HashEmbedder(), bank_size=6)
    facts.add(FACTS)
    return facts


def packs(facts: MemoryFactStore, folder: Path, **options: object) -> Delivery:
    return Delivery(facts, tiny_engine(), PackStore(folder), **{"kv": "lazy", **options})  # type: ignore[arg-type]


def test_a_fact_is_a_pack(facts: MemoryFactStore, tmp_path: Path) -> None:
    made = packs(facts, tmp_path)
    found = made.search("Part 2 of a.md.", 3)
    assert [each.hit for each in found] == facts.search("Part 2 of a.md.", 3)
    for each in found:
        assert each.unit == each.hit.fact
        assert each.handle is not None
        assert each.handle.namespace == each.hit.fact.namespace
        assert each.content == str(each.handle)
        pack = made.store.get(each.handle)
        assert (pack.text, pack.is_lazy) == (each.unit.text, True)


def test_a_bank_is_a_pack(facts: MemoryFactStore, tmp_path: Path) -> None:
    made = packs(facts, tmp_path, unit="bank")
    found = made.search("Part 1 of b.md.", 2)
    banks = facts.bank_of([each.hit.fact for each in found])
    assert len(set(banks)) == 2
    for bank, each in zip(banks, found, strict=True):
        assert (each.unit.title, each.unit.namespace) == (bank, each.hit.fact.namespace)
        assert each.unit.text == "\n".join(fact.text for fact in facts.bank_facts(bank))
        assert bank.startswith(f"{each.unit.namespace}/")


def test_a_document_is_a_pack_in_its_order(facts: MemoryFactStore, tmp_path: Path) -> None:
    made = packs(facts, tmp_path, unit="document")
    found = made.search("Part 3 of b.md.", 24)
    texts = {(each.hit.fact.namespace, each.hit.fact.source): each.unit.text for each in found if each.hit.fact.source}
    assert set(texts) == {(space, name) for space in ("default", "other") for name in ("a.md", "b.md")}
    for (_, source), text in texts.items():
        assert text.split("\n") == [f"Part {number} of {source}." for number in range(4)]
    # Without a source, each fact is its own document.
    assert sum(not each.hit.fact.source for each in found) == 8


@pytest.mark.parametrize(("options", "is_lazy"), [({"kv": "lazy"}, True), ({"kv": "stored"}, False), ({}, False)])
def test_kv_is_stored_unless_packs_are_lazy(
    facts: MemoryFactStore, tmp_path: Path, options: dict[str, str], *, is_lazy: bool
) -> None:
    made = Delivery(facts, tiny_engine(), PackStore(tmp_path), **options)  # type: ignore[arg-type]
    [found] = made.search("Part 2 of a.md.", 1)
    assert found.handle is not None
    assert made.store.get(found.handle).is_lazy is is_lazy


@pytest.mark.parametrize("compress", [None, "none", "lossless"])
def test_kv_is_compressed_as_asked(facts: MemoryFactStore, tmp_path: Path, compress: str | None) -> None:
    made = packs(facts, tmp_path, kv="stored", **{"compress": compress} if compress else {})
    [found] = made.search("Part 2 of a.md.", 1)
    assert found.handle is not None
    assert made.store.get(found.handle).compression == (compress or "none")


def test_what_is_no_way_to_store_kv_is_refused_with_the_choices(facts: MemoryFactStore, tmp_path: Path) -> None:
    for compress in ("zip", "auto"):
        with pytest.raises(FactError, match=f"Got compress='{compress}'; expected one of none, lossless"):
            packs(facts, tmp_path, compress=compress)
    with pytest.raises(FactError, match=r"lossless\. It is gone in 0\.3; 'lossless' stores KV in fewer bytes"):
        packs(facts, tmp_path, compress="int8")
    with pytest.raises(FactError, match="Got kv='auto'; expected one of stored, lazy"):
        packs(facts, tmp_path, kv="auto")
    with pytest.raises(PackError, match="Got compress='zip'; expected one of none, lossless"):
        compile_facts([], tiny_engine(), PackStore(tmp_path), compress="zip")  # type: ignore[arg-type]


def test_a_text_of_which_only_the_text_is_intact_is_answered_from_and_compiled_again(
    facts: MemoryFactStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = packs(facts, tmp_path, kv="stored")
    [found] = plain.search("Part 2 of a.md.", 1)
    assert found.handle is not None
    store, engine, whole = plain.store, tiny_engine(), plain.store.get(found.handle)
    [text] = tmp_path.rglob(f"{found.handle.id}.txt")
    text.write_text(f"damaged\n{whole.text}")
    next(tmp_path.rglob(f"{found.handle.id}.*.safetensors")).unlink()
    engine.clear_cache()
    with caplog.at_level("WARNING"):
        answer = engine.prefill(f"{found.handle} Why?", view=store.view("default"))
    assert caplog.text.count("Only the text of the pack") == 1
    assert torch.equal(answer.logits, engine.prefill(f"{whole.text} Why?", reuse=False).logits)
    assert answer.usage.approximate_tokens == 0
    packs(facts, tmp_path, kv="stored").search("Part 2 of a.md.", 1)
    [entry] = store.entries(found.handle)
    assert (entry.fingerprint, entry.stored_bytes > 0) == (whole.fingerprint, True)
    assert store.get(found.handle).kv.equal(whole.kv)


def test_what_is_stored_is_not_compiled_again(
    facts: MemoryFactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = packs(facts, tmp_path, kv="stored")
    made.search("Part 2 of a.md.", 3)
    monkeypatch.setattr(made.store, "put", lambda _: pytest.fail("stored twice"))
    monkeypatch.setattr(made.store, "get", lambda _: pytest.fail("read to see whether it is there"))
    made.search("Part 2 of a.md.", 3)


# Facts that change


def test_the_pack_of_a_bank_that_a_fact_joined_is_compiled_anew_and_no_other(tmp_path: Path) -> None:
    facts = MemoryFactStore(HashEmbedder(), bank_size=6)
    made = packs(facts, tmp_path, unit="bank", kv="stored")
    mine = [Fact(f"Line {number}.") for number in range(18)]
    made.add(mine, progress=False)
    before = {unit.title: made.store.handle(unit.text, unit.namespace) for unit in made.all_units()}
    assert len(before) >= 3
    facts.add([Fact("Line 99.")])
    [found] = made.search("Line 99.", 1)
    assert (found.unit.title, found.hit.fact.text) == (facts.bank_of([Fact("Line 99.")])[0], "Line 99.")
    assert "Line 99." in found.unit.text.split("\n")
    old = before[found.unit.title]
    assert (found.handle != old, made.store.get(found.handle).is_lazy) == (True, False)  # type: ignore[arg-type]
    assert made.gc() == [old]
    stored = set(made.store)
    assert stored == {*before.values(), found.handle} - {old}
    # The paper's routing: a question goes to one bank, which goes into the prompt as a whole.
    [routed] = made.search("Line 99.", 1, probes=1)
    assert (routed.unit.title, routed.handle) == (facts.search("Line 99.", 1, probes=1)[0].bank, found.handle)
    assert set(made.store) == stored


@pytest.mark.parametrize("unit", ["fact", "bank", "document"])
def test_what_changes_takes_its_packs_along(tmp_path: Path, unit: str) -> None:
    store = MemoryFactStore(HashEmbedder(), bank_size=6)
    made = packs(store, tmp_path, unit=unit, namespace="mine")
    mine = [Fact(f"{name}: {number}.", id=f"{name}{number}", source=f"{name}.md") for name in "ab" for number in "12"]
    assert made.add(mine, progress=False).added == 4
    other = Fact("Not mine.", id="a1", namespace="theirs")
    packs(store, tmp_path, unit=unit, namespace="theirs").add([other], progress=False)

    def texts() -> set[str]:
        found = {pack.text for handle in made.store if (pack := made.store.peek(handle))}
        return {line for text in found for line in text.split("\n")}

    assert texts() == {fact.text for fact in (*mine, other)}
    assert made.update(Fact("a: new.", id="a1", source="a.md")).version == 2
    assert texts() == {"a: new.", "a: 2.", "b: 1.", "b: 2.", "Not mine."}
    assert [fact.id for fact in made.delete(source="b.md")] == ["b1", "b2"]
    assert [fact.text for fact in made.delete(["a1", "unknown"])] == ["a: new."]
    # Of a unit that others were in, the rest is compiled again when it is found.
    assert texts() - {"a: 2."} == {"Not mine."}
    made.search("a", 1)
    assert texts() == {"a: 2.", "Not mine."}
    assert [fact.text for fact in made.delete(where={"source": "a.md"})] == ["a: 2."]
    assert texts() == {"Not mine."}
    assert made.delete(["a1"]) == []
    with pytest.raises(FactError, match="nothing to delete by"):
        made.delete()


def test_ids_of_a_unit_may_hold_blanks(tmp_path: Path) -> None:
    facts = MemoryFactStore(HashEmbedder())
    twice = [Fact("The sea.", id=name, source="a.md") for name in ("a b", "[c", 'd", "e')]
    facts.add([*twice, *(Fact(f"Of {name}.", id=name, source="b.md") for name in ("a", "b", "e"))])
    made = packs(facts, tmp_path, unit="document")
    [handle, _] = made.compile(made.all_units(), progress=False)
    made.delete(["a", "b", "e"])  # No part of an id of the other document.
    made.delete(["[c", 'd", "e'])  # The first fact still has the text.
    assert list(made.store) == [handle]
    made.delete(["a b"])
    assert list(made.store) == []


@pytest.mark.parametrize("facts", ["a b", "[", '{"a": 1}', "[" * 100_000, "7"])
def test_a_pack_whose_provenance_says_something_else_of_facts_stays(tmp_path: Path, facts: str) -> None:
    made = packs(MemoryFactStore(HashEmbedder()), tmp_path, unit="document")
    made.add([Fact("The sea.", id="a", source="a.md")], progress=False)
    by_hand = made.store.put(made.engine.build_pack("By hand.", provenance={"facts": facts}))  # type: ignore[union-attr]
    made.delete(["a"])
    assert list(made.store) == [by_hand]


def test_what_no_fact_uses_is_collected(facts: MemoryFactStore, tmp_path: Path) -> None:
    kinds = {unit: packs(facts, tmp_path, unit=unit, namespace="default") for unit in ("fact", "bank", "document")}
    for made in kinds.values():
        made.search("Part 2 of a.md.", 9)
    store = PackStore(tmp_path)
    kept = store.put(tiny_engine().build_pack("Made by hand.", lazy=True))
    elsewhere = packs(facts, tmp_path, namespace="other").search("Part 2 of a.md.", 1)[0].handle
    assert kinds["fact"].gc() == []
    gone = next(found.hit.fact for found in kinds["fact"].search("Part 2 of a.md.", 1))
    facts.delete([gone.id], namespace="default")
    before = set(store)
    removed = set(kinds["fact"].gc())
    assert before - set(store) == removed
    assert any(store.handle(gone.text, "default") == handle for handle in removed)
    assert not any(gone.text in pack.text for h in store if (pack := store.peek(h)) and h.namespace == "default")
    assert {kept, elsewhere} <= set(store)
    assert kinds["bank"].gc() == []


def test_what_any_search_found_is_delivered(tmp_path: Path) -> None:
    made = Delivery(None, tiny_engine(), PackStore(tmp_path), kv="lazy")
    hits = [Hit(Fact(text, source="x.md"), score) for text, score in (("Second.", 0.1), ("First.", 0.9))]
    found = made.deliver(hits)
    assert [(each.hit, each.unit.text) for each in found] == [(hit, hit.fact.text) for hit in hits]
    assert [made.store.get(each.handle).text for each in found if each.handle] == ["Second.", "First."]
    with pytest.raises(FactError, match="no fact store"):
        made.search("q")


def test_what_happens_to_packs_is_in_the_debug_log_with_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hasattr(record, "kp_event"):
                raise RuntimeError(record.getMessage())

    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    made = Delivery(None, engine, PackStore(tmp_path, max_bytes=60_000), namespace="default")
    hits = [Hit(Fact(f"The {number}. ship of Veyl came in at dawn."), 0.5) for number in range(3)]
    root, broken, told = logging.getLogger(), Raises(), dict[str, dict[str, float | str]]()

    def listen(name: str, counts: Mapping[str, float | str]) -> None:
        told[name] = dict(counts)
        raise RuntimeError(name)

    with caplog.at_level(logging.DEBUG, "kp_core"):
        root.addHandler(broken)  # Behind that of `caplog`.
        unsubscribe = subscribe(listen)
        try:
            found = made.deliver(hits)
            usage = engine.generate(found[0].content, view=made.store.view("default"), max_tokens=1).usage
            engine.clear_cache()
            made.sync(lambda _: [hits[0].fact.text])
        finally:
            root.removeHandler(broken)
            unsubscribe()
    assert len(list(made.store)) == 1
    events = {record.kp_event: record.kp for record in caplog.records if hasattr(record, "kp_event")}
    assert events["packs found"] == {"units": 3, "packs": 3}
    assert (events["packs compiled"]["packs"], events["packs compiled"]["lazy"]) == (3, False)
    assert events["packs read"].items() >= {"packs": 1, "pack_tokens": usage.pack_tokens}.items()
    assert events["KV evicted from memory"]["nbytes"] > 0
    assert events["KV dropped from the store"] == {"packs": 1, "max_bytes": 60_000}
    assert events["packs synchronised"] == {"packs": 3, "removed": 2}
    assert told == events


def test_packs_are_made_in_the_background_where_that_is_asked_for(facts: MemoryFactStore, tmp_path: Path) -> None:
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    made, go = Delivery(facts, engine, PackStore(tmp_path), precompile="idle", namespace="default"), threading.Event()
    engine.when_idle(lambda: go.wait(60) and None)
    handles = [each.handle for each in made.search("Part 2 of a.md.", 2)]
    packs = [made.store.peek(handle) for handle in handles if handle]
    assert [pack and pack.stored_bytes for pack in packs] == [0, 0]
    go.set()
    until(lambda: all(made.store.get(handle).kv for handle in handles if handle))
    assert [each.handle for each in made.search("Part 2 of a.md.", 2)] == handles
    engine.close()


@pytest.mark.parametrize("error", [PackError("The store is only read."), OSError(28, "No space left on device")])
def test_what_a_store_does_not_take_goes_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    class Full(PackStore):
        def put(self, pack: KnowledgePack) -> Handle:
            raise error

    made = Delivery(None, tiny_engine(), Full(tmp_path), precompile="idle", namespace="default")
    [found] = made.deliver([Hit(Fact("Orla keeps the lamp.", namespace="default"), 1.0)])
    assert (found.handle, found.content) == (None, "Orla keeps the lamp.")
    assert f"goes as text: {error}" in caplog.text


def test_what_is_compiled_when_its_turn_comes_is_not_waited_for(
    facts: MemoryFactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, jobs = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()), list[Any]()
    monkeypatch.setattr(engine, "when_idle", jobs.append)
    made = Delivery(facts, engine, PackStore(tmp_path), precompile="idle", namespace="default")
    for _ in range(2):
        made.search("Part 2 of a.md.", 2)
    first, second = jobs
    assert len(list(first())) > 2
    assert len(made.store) == 2  # type: ignore[arg-type]
    assert list(second()) == []


def test_a_pack_for_another_place_is_delivered_while_it_waits_to_be_compiled_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, store, jobs = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()), PackStore(tmp_path), list[Any]()
    monkeypatch.setattr(engine, "when_idle", jobs.append)
    known, other = (Fact(text, namespace="default") for text in ("Orla Venn keeps the lamp.", "The mill has sails."))
    pack = engine.build_pack(known.text, namespace="default", compiled_for="system")
    edited = edit.overwrite(pack, "Orla Venn", "Tam Rusk", engine)
    handle, _ = store.put(pack), store.put(edited)
    hits = [Hit(fact, 1.0) for fact in (known, other, replace(known, text=edited.text))]
    found = Delivery(None, engine, store, precompile="idle", namespace="default").deliver(hits)
    assert [each.content for each in found] == [str(store.handle(hit.fact.text, "default")) for hit in hits]
    assert found[0].handle == handle
    assert len(jobs) == 1
    foreign = load_engine(tiny_model("qwen2"), tokenizer=tiny_tokenizer())
    monkeypatch.setattr(foreign, "when_idle", jobs.append)
    [found_by_foreign] = Delivery(None, foreign, store, precompile="idle", namespace="default").deliver(hits[:1])
    assert found_by_foreign.handle == handle
    assert store.get(handle, PackKey(foreign.fingerprint, foreign.template.prefix("user"))).text == known.text
    assert (kept := store.peek(handle, pack.key))
    assert kept.stored_bytes


GONE: dict[str, Callable[[Delivery, Fact, FactStore], object]] = {
    "deleted by delivery": lambda made, fact, _: made.delete([fact.id]),
    "deleted by source": lambda made, fact, _: made.delete(source=fact.source),
    "deleted from the facts": lambda made, fact, _: made.facts.delete([fact.id], namespace=fact.namespace),
    "deleted by another store": lambda _, fact, other: other.delete([fact.id], namespace=fact.namespace),
    "emptied": lambda made, *_: made.delete(where={"kp:source": {"$ne": "none"}}),
    "updated": lambda made, fact, _: made.facts.update(replace(fact, text="Another text.")),
    "added over": lambda made, fact, _: made.facts.add([replace(fact, text="Another text.")], overwrite=True),
    "edited": lambda made, fact, _: edit_fact(made, fact.id, "SECRET", "nothing", how="rebuild"),
    "expired": lambda made, fact, _: made.facts.update(replace(fact, expires=1.0)),
}


def _holding(folder: Path, text: str) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


# One of each unit and one of each way in the short tier; all pairs in the slow one.
_SHORT = {"fact": ("deleted by delivery", "expired"), "document": ("edited",), "bank": ("deleted by another store",)}


@pytest.mark.parametrize(
    ("gone", "unit"),
    [
        pytest.param(gone, unit, marks=() if gone in _SHORT[unit] else pytest.mark.slow)
        for gone in GONE
        for unit in _SHORT
    ],
)
def test_a_fact_that_is_gone_when_its_turn_comes_is_not_compiled(tmp_path: Path, gone: str, unit: Unit) -> None:
    facts, other = (ChromaFactStore(tmp_path / "facts", HashEmbedder()) for _ in range(2))
    # Others of its bank and source have packs of their own.
    facts.add([fact := Fact("Orla keeps the SECRET lamp.", id="f", source="a.md"), Fact("The sea.", source="a.md")])
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    made = Delivery(facts, engine, PackStore(tmp_path / "packs"), precompile="idle", namespace="default", unit=unit)
    go = threading.Event()
    engine.when_idle(lambda: go.wait(60) and None)
    assert made.search("Who keeps the lamp?", 1)[0].handle
    if gone == "edited" and unit == "fact":
        made.facts.update(replace(fact, text="Orla keeps the nothing lamp."))
    else:
        GONE[gone](made, fact, other)
    go.set()
    engine.when_idle(lambda: None).result(60)
    engine.close()
    assert _holding(tmp_path / "packs", "SECRET") == []


BESIDE: dict[str, Callable[[Delivery, Fact], object]] = {
    "search": lambda made, _: made.search("Who keeps the lamp?", 1),
    "compile": lambda made, fact: made.compile([fact], progress=False),
    "add": lambda made, fact: made.add([fact], progress=False),
    "add over": lambda made, fact: made.add([replace(fact, title="Lamps")], overwrite=True, progress=False),
    "update": lambda made, fact: made.update(replace(fact, title="Lamps")),
    "edit": lambda made, fact: edit_fact(made, fact.id, "lamp", "light"),
    "edit by rebuilding": lambda made, fact: edit_fact(made, fact.id, "lamp", "light", how="rebuild"),
}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("put", [1, 2, 3])
@pytest.mark.parametrize("beside", BESIDE)
def test_a_fact_deleted_while_a_pack_is_written_leaves_nothing(
    tmp_path: Path, beside: str, put: int, moment: str
) -> None:
    """As by another process: the fact and the packs that are there then are deleted, before or after each write."""
    facts, puts = MemoryFactStore(HashEmbedder()), list[int]()
    facts.add([fact := Fact("Orla keeps the SECRET lamp.", id="f", namespace="default")])

    class Slow(PackStore):
        def put(self, pack: KnowledgePack) -> Handle:
            puts.append(1)
            if is_due := len(puts) == put:
                other = Delivery(facts, None, PackStore(tmp_path))
            if is_due and moment == "before":
                other.delete(["f"])
            handle = super().put(pack)
            if is_due and moment == "after":
                other.delete(["f"])
            return handle

    made = Delivery(facts, tiny_engine(), Slow(tmp_path))
    with suppress(FactError):  # Of an edit: there is no such fact any more.
        BESIDE[beside](made, fact)
    if len(puts) >= put:
        # An edit leaves the pack of the old text until `gc`; the third pack is that of the new one.
        assert _holding(tmp_path, "SECRET light" if put == 3 else "SECRET") == []
    else:
        assert list(facts.facts())


def test_a_fact_that_is_not_stored_yet_is_compiled(tmp_path: Path) -> None:
    """As an agent remembers: a text that cannot be compiled must not be stored."""
    facts = MemoryFactStore(HashEmbedder())
    made, fact = Delivery(facts, tiny_engine(), PackStore(tmp_path)), Fact("Orla keeps the lamp.", namespace="default")
    assert made.compile([fact], progress=False) == [None]
    [handle] = made.compile([fact], stored=False, progress=False)
    facts.add([fact])
    assert made.deliver([Hit(fact, 1.0)])[0].handle == handle
    assert made.orphans() == []


CANCELS: dict[str, Callable[[Delivery], object]] = {
    "sync": lambda made: made.sync(lambda _: []),
    "sync of another object": lambda made: Delivery(None, None, made.store).sync(lambda _: []),
    "cancel": lambda made: made.cancel(),
}


@pytest.mark.parametrize("cancels", [*CANCELS, "nothing"])
def test_what_waits_for_texts_of_another_store_is_cancelled_when_that_is_synchronised(
    tmp_path: Path, cancels: str
) -> None:
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    made = Delivery(None, engine, PackStore(tmp_path), precompile="idle", namespace="default")
    hits, go = [Hit(Fact("Orla keeps the SECRET lamp.", namespace="default"), 1.0)], threading.Event()
    engine.when_idle(lambda: go.wait(60) and None)
    [found] = made.deliver(hits)
    CANCELS.get(cancels, lambda _: None)(made)
    go.set()
    engine.when_idle(lambda: None).result(60)
    assert bool(_holding(tmp_path, "SECRET")) == (cancels in {"nothing", "cancel"})
    assert bool(list(tmp_path.rglob("*.safetensors"))) == (cancels == "nothing")
    assert made.deliver(hits) == [found]  # It is still found: it waits again.
    engine.when_idle(lambda: None).result(60)
    engine.close()
    assert list(tmp_path.rglob("*.safetensors"))


def test_a_text_of_another_store_that_is_gone_while_its_pack_is_written_leaves_nothing(tmp_path: Path) -> None:
    class Slow(PackStore):
        def put(self, pack: KnowledgePack) -> Handle:
            made.sync(lambda _: [])
            return super().put(pack)

    made = Delivery(None, tiny_engine(), Slow(tmp_path), namespace="default")
    [found] = made.deliver([Hit(Fact("Orla keeps the SECRET lamp.", namespace="default"), 1.0)])
    assert found.handle is None
    assert _holding(tmp_path, "SECRET") == []


@pytest.mark.parametrize("precompile", ["idle", "now"])
@pytest.mark.parametrize("moment", ["looked up", "its turn"])
def test_what_was_asked_before_a_cancellation_is_not_written_after_it(
    tmp_path: Path, moment: str, precompile: str
) -> None:
    seen = list[int]()

    class Read(PackStore):
        def peek(self, *given: Any) -> KnowledgePack | None:
            if moment == "looked up" and not seen:
                made.cancel()
            seen.append(1)
            return super().peek(*given)

    class Turn(Delivery):
        def compile(self, *given: Any, **options: Any) -> list[Handle | None]:
            if moment == "its turn":
                made.cancel()
            return super().compile(*given, **options)

    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    made = Turn(None, engine, Read(tmp_path), namespace="default", precompile=precompile)  # type: ignore[arg-type]
    [found] = made.deliver([Hit(Fact("Orla keeps the SECRET lamp.", namespace="default"), 1.0)])
    engine.when_idle(lambda: None).result(60)
    engine.close()
    assert found.handle is None
    assert _holding(tmp_path, "SECRET") == []


def test_the_facts_are_asked_once_whether_a_unit_is_still_there(tmp_path: Path) -> None:
    asked = list[str]()

    class Asked(MemoryFactStore):
        def facts(self, **wanted: Any) -> Iterator[Fact]:
            asked.append(str(wanted))
            return super().facts(**wanted)

    facts = Asked(HashEmbedder())
    facts.add([Fact("Orla keeps the lamp.", id="f"), Fact("The sea.", id="s")])
    made = Delivery(facts, tiny_engine(), PackStore(tmp_path))
    assert made.compile([Fact("A deleted fact.", id="d")], progress=False) == [None]
    assert len(asked) == 1
    # One that another fact has the text of, under another id, is there: before it is written, and after.
    assert made.compile([Fact("The sea.", id="d")], progress=False) != [None]
    assert len(asked) == 3


_DELETES = """
import sys
from kp_core import ChromaFactStore, PackStore
from kp_core.banks.delivery import Delivery
from tests.kits import HashEmbedder

made = Delivery(ChromaFactStore(f"{sys.argv[1]}/facts", HashEmbedder()), None, PackStore(f"{sys.argv[1]}/packs"))
assert made.delete(where={"kp:source": "a.md"})
"""


@pytest.mark.slow
def test_what_another_process_deletes_meanwhile_is_not_written(tmp_path: Path) -> None:
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as written:
        written.add([Fact(f"Orla keeps the SECRET lamp number {number}.", source="a.md") for number in range(4)])
    facts = ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True)  # One process may write.
    engine, go = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer()), threading.Event()
    made = Delivery(facts, engine, PackStore(tmp_path / "packs"), precompile="idle")
    engine.when_idle(lambda: go.wait(120) and None)
    assert all(found.handle for found in made.search("Who keeps the lamp?", 4))
    subprocess.run([sys.executable, "-c", _DELETES, str(tmp_path)], check=True, timeout=120)  # noqa: S603 - our own
    go.set()
    engine.when_idle(lambda: None).result(60)
    engine.close()
    assert list(made.store) == []
    assert _holding(tmp_path / "packs", "SECRET") == []


def test_a_fact_that_waits_and_stays_is_compiled(tmp_path: Path) -> None:
    facts = MemoryFactStore(HashEmbedder())
    facts.add([Fact("Orla keeps the lamp.", id="f", source="a.md"), Fact("The sea.", source="a.md")])
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer())
    for unit in ("fact", "document", "bank"):
        made = Delivery(facts, engine, PackStore(tmp_path / unit), precompile="idle", unit=unit)
        made.search("Who keeps the lamp?", 1)
        engine.when_idle(lambda: None).result(60)
        assert made.search("Who keeps the lamp?", 1)[0].handle is not None
    engine.close()


def test_of_very_many_packs_a_sample_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kp_core.banks.compiling._LOOKED_AT", 8)
    monkeypatch.setattr("kp_core.banks.compiling._SAMPLE", 4)
    peeks: list[object] = []
    peek = PackStore.peek
    monkeypatch.setattr(PackStore, "peek", lambda self, *which: peeks.append(which) or peek(self, *which))
    facts = [Fact(f"Ship {number} came in.") for number in range(40)]
    engine, store = tiny_engine(), PackStore(tmp_path)
    handles = compile_facts(facts, engine, store, lazy=True, progress=False)
    peeks.clear()
    store.remove(handles[7])  # type: ignore[arg-type]
    assert compile_facts(facts, engine, store, lazy=True, progress=False) == handles
    assert len(peeks) < 8
    assert len(store) == 40
    # KV is asked for now, which the sample does not have: all are looked at, and made.
    compile_facts(facts, engine, store, progress=False)
    assert all(not store.get(handle).is_lazy for handle in store)


def test_what_is_no_unit_is_refused(facts: MemoryFactStore, tmp_path: Path) -> None:
    with pytest.raises(FactError, match="unit='page'"):
        packs(facts, tmp_path, unit="page")


# One loop for all who compile


class Watched:
    """Counts what is tokenised, rendered and looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = Counter[str]()
        for kind, name in (
            (PromptEncoder, "encode"),
            (ChatTemplate, "_render"),
            (Session, "build_packs"),
            (PackStore, "peek"),
            (PackStore, "get"),
        ):
            monkeypatch.setattr(kind, name, self._counted(name, getattr(kind, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1 if name != "build_packs" else len(arguments[1])
            return original(*arguments, **options)

        return counted


def test_each_text_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, store, facts = tiny_engine(), PackStore(tmp_path), [Fact("One."), Fact("Two."), Fact("Three.")]
    watched = Watched(monkeypatch)
    handles = compile_facts(facts[:1], engine, store, progress=False)
    assert watched.counts["build_packs"] == 1
    more = compile_facts(facts, engine, store, progress=False)
    assert watched.counts["build_packs"] == 3
    assert compile_facts(facts, engine, store, progress=False) == more
    assert watched.counts["build_packs"] == 3
    assert more == [store.handle(fact.text, "default") for fact in facts]
    assert handles == more[:1]


@pytest.mark.parametrize("kv", ["stored", "lazy"])
def test_a_search_that_finds_stored_packs_compiles_nothing(
    facts: MemoryFactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    packs(facts, tmp_path, kv=kv).search("Part 2 of a.md.", 3)
    watched, delivery = Watched(monkeypatch), packs(facts, tmp_path, kv=kv)
    assert all(found.handle for found in delivery.search("Part 2 of a.md.", 3))
    assert watched.counts == {"peek": 3}, "one look-up for each pack, no rendering and no tokenisation"


def test_a_text_that_shares_a_token_with_its_prefix_is_compiled_once(tmp_path: Path) -> None:
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(merges=1))  # It merges two line feeds.
    store, place = PackStore(tmp_path), [{"role": "user", "content": "Know:\n{pack}"}]
    facts = [Fact("\nOne."), Fact("Two.")]
    first = compile_facts(facts, engine, store, compiled_for=place, progress=False)
    one, two = (store.peek(handle) for handle in first if handle)
    assert one is not None
    assert two is not None
    assert one.prefix != two.prefix
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = Watched(monkeypatch)
        assert compile_facts(facts, engine, store, compiled_for=place, progress=False) == first
    assert watched.counts["build_packs"] == 0


def test_a_fact_is_compiled_in_its_own_namespace(tmp_path: Path) -> None:
    store = PackStore(tmp_path)
    facts = [Fact("One."), Fact("One.", namespace="theirs"), Fact("Two.")]
    handles = compile_facts(facts, tiny_engine(), store, namespace="mine", progress=False)
    assert [str(handle).partition("/")[0] for handle in handles] == ["kp:mine", "kp:theirs", "kp:mine"]
    assert all(handle and store.get(handle).namespace == handle.namespace for handle in handles)


@pytest.mark.parametrize("lazy", [True, False])
def test_texts_too_short_for_a_pack_go_as_text(
    tmp_path: Path, thin: Session, caplog: pytest.LogCaptureFixture, *, lazy: bool
) -> None:
    facts, texts = MemoryFactStore(HashEmbedder()), ["One.", "***", "Two.", "---", "Three."]
    made = Delivery(facts, thin, PackStore(tmp_path), kv="lazy" if lazy else "stored")
    made.add([Fact(text) for text in texts], progress=False)
    assert len(list(PackStore(tmp_path))) == 3
    said = [record.getMessage() for record in caplog.records]
    assert [("'***'" in line, "'---'" in line) for line in said] == [(True, False), (False, True)]
    assert all("goes as text" in line for line in said)
    found = {each.unit.text: each for each in made.search("One.", 5)}
    assert [found[text].handle is None for text in texts] == [False, True, False, True, False]
    assert [found[text].content for text in ("***", "---")] == ["***", "---"]
    assert len(caplog.records) == 4


def test_a_position_that_no_text_can_have_is_an_error(tmp_path: Path) -> None:
    refusal = "{% if 'Know:' in messages[0]['content'] %}{{ raise_exception('Nothing to know.') }}{% endif %}"
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(refusal + CHATML))
    place: list[Message] = [{"role": "user", "content": "Know: {pack}"}]
    with pytest.raises(PromptError, match=r"Nothing to know\."):
        compile_facts([Fact("One."), Fact("Two.")], engine, PackStore(tmp_path), compiled_for=place)


def test_without_an_engine_packs_are_looked_up(
    facts: MemoryFactStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = packs(facts, tmp_path)
    [with_pack] = made.search("Part 2 of a.md.", 1)
    only_looking = Delivery(facts, None, made.store)
    first, second = only_looking.search("Part 2 of a.md.", 2)
    assert (first.handle, second.handle) == (with_pack.handle, None)
    assert [record.args[0] for record in caplog.records if record.args] == [second.unit.id]  # type: ignore[index]
    with pytest.raises(FactError, match="no engine"):
        only_looking.compile([first.unit])


def test_a_search_sees_its_namespace(facts: MemoryFactStore, tmp_path: Path) -> None:
    for unit in ("fact", "bank", "document"):
        made = packs(facts, tmp_path, unit=unit, namespace="other")
        found = made.search("Part 2 of a.md.", 99)
        assert {each.unit.namespace for each in found} == {"other"}
        assert sum(len(each.unit.text.split("\n")) for each in found) == len(FACTS) // 2
        assert all(each.hit.fact.namespace == "other" for each in found)
    assert {each.namespace for each in made.store} == {"other"}


def test_namespaces_are_refused_at_the_first_touch(facts: MemoryFactStore, tmp_path: Path) -> None:
    for touch in (
        lambda: Fact("a", namespace="Acme Corp"),
        lambda: packs(facts, tmp_path, namespace="Acme Corp"),
        lambda: packs(facts, tmp_path).search("a", namespace="Acme Corp"),
        lambda: PackStore(tmp_path).view("Acme Corp"),
        lambda: tiny_engine().build_pack("a", namespace="Acme Corp", lazy=True),
    ):
        with pytest.raises(PromptError, match=r"Got the namespace 'Acme Corp'; expected .*, e\.g\. 'acme-corp'"):
            touch()
    assert Fact("a", namespace="-" * 64).namespace == "-" * 64


def test_what_is_no_store_and_no_embedder_is_refused(tmp_path: Path) -> None:
    collection = chromadb.EphemeralClient().get_or_create_collection("theirs")
    with pytest.raises(FactError, match=r"Collection'> as fact store; expected a FactStore"):
        open_facts(collection)  # type: ignore[arg-type]
    with pytest.raises(FactError, match=r"'object'> as embedder; expected an Embedder"):
        open_facts(embedder=object(), path=tmp_path / "facts")
    with pytest.raises(FactError, match="together with"):
        open_facts(MemoryFactStore(HashEmbedder()), path=tmp_path / "facts")
    assert not list(tmp_path.iterdir())


def test_an_edited_fact_is_found_under_its_new_handle(tmp_path: Path) -> None:
    facts = MemoryFactStore(HashEmbedder())
    facts.add([Fact("The mill of Veyl has four sails, and grinds barley.", id="mill", namespace="isles")])
    made = packs(facts, tmp_path, kv="stored", namespace="isles")
    [old] = made.search("mill", 1)
    fact = edit_fact(made, "mill", "four", "six")
    [new] = made.search("mill", 1)
    assert old.handle is not None
    assert (new.handle, new.unit) == (made.store.handle(fact.text, "isles"), fact)
    assert new.handle != old.handle
    assert made.store.get(old.handle).text == old.unit.text
    # An erratum would be half of so short a text.
    assert (fact.version, fact.text) == (2, "The mill of Veyl has six sails, and grinds barley.")
    assert [each.how for each in made.store.peek(new.handle).history] == ["amend", "squash"]  # type: ignore[union-attr, arg-type]
    assert made.gc() == [old.handle]
    # Compiled for another model, it is the same text with the same history.
    [again] = Delivery(facts, tiny_engine("qwen3"), made.store, kv="stored", namespace="isles").search("mill", 1)
    assert again.handle == new.handle
    entries = [entry.history for entry in made.store.entries(new.handle)]  # type: ignore[arg-type]
    assert len(entries) == 2
    assert entries[0] == entries[1]
    for how, error in (("mend", OptionError), ("overwrite", PackError)):
        with pytest.raises(error):
            edit_fact(made, "mill", "barley, and", "rye", how=how)  # type: ignore[arg-type]
    with pytest.raises(FactError):
        edit_fact(made, "none", "six", "four")
    assert edit_fact(made, "mill", "barley", "rye", how="rebuild").text.endswith("grinds rye.")
    assert made.facts.get("mill").version == 3
    lazy = packs(facts, tmp_path / "lazy", namespace="isles")
    with pytest.raises(PackError, match="lazy"):
        edit_fact(lazy, "mill", "six", "four")
    assert facts.get("mill").version == 3


def test_a_fact_of_a_document_is_rebuilt_with_it(facts: MemoryFactStore, tmp_path: Path) -> None:
    made = packs(facts, tmp_path, unit="document", namespace="default")
    fact = next(each for each in facts.facts(namespace="default") if each.source == "a.md")
    with pytest.raises(FactError, match="rebuild"):
        edit_fact(made, fact.id, "Part", "Chapter")
    edit_fact(made, fact.id, "Part", "Chapter", how="rebuild")
    texts = [made.store.get(handle).text for handle in made.store]
    assert any(text.startswith("Chapter 0 of a.md.\nPart 1") for text in texts)
