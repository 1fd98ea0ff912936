"""Packs from banks: which facts a pack holds, and whether its KV is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import chromadb
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from kp_core import Fact, Handle, KnowledgePack, MemoryFactBank, Message, PackStore, load_engine
from kp_core.delivery import Delivery, compile_facts, open_bank
from kp_core.engines.session import Session
from kp_core.errors import BankError, HandleError, TemplateError
from kp_core.rates import Rates, measure_rates
from kp_core.testing import CHATML, tiny_model, tiny_tokenizer
from tests.conftest import tiny_engine
from tests.core.facts.test_facts import HashEmbedder

FACTS = [
    Fact(f"Part {number} of {source or 'nothing'}.", source=source, namespace=namespace)
    for namespace in ("default", "other")
    for number in range(4)
    for source in ("a.md", "b.md", "")
]
FAST_DISK, SLOW_DISK = Rates(100, 1e9, 1000), Rates(100, 1e3, 1000)


@pytest.fixture
def bank() -> MemoryFactBank:
    bank = MemoryFactBank(HashEmbedder(), bank_size=6)
    bank.build(FACTS)
    return bank


def packs(bank: MemoryFactBank, folder: Path, **options: object) -> Delivery:
    return Delivery(bank, tiny_engine(), PackStore(folder), **{"kv": "lazy", **options})  # type: ignore[arg-type]


def test_a_fact_is_a_pack(bank: MemoryFactBank, tmp_path: Path) -> None:
    made = packs(bank, tmp_path)
    found = made.search("Part 2 of a.md.", 3)
    assert [each.hit for each in found] == bank.search("Part 2 of a.md.", 3)
    for each in found:
        assert each.unit == each.hit.fact
        assert each.handle is not None
        assert each.handle.namespace == each.hit.fact.namespace
        assert each.content == str(each.handle)
        pack = made.store.get(each.handle)
        assert (pack.text, pack.is_lazy) == (each.unit.text, True)


def test_a_bank_is_a_pack(bank: MemoryFactBank, tmp_path: Path) -> None:
    made = packs(bank, tmp_path, unit="bank")
    found = made.search("Part 1 of b.md.", 2)
    assert len({(each.hit.fact.namespace, each.hit.bank) for each in found}) == 2
    for each in found:
        assert each.unit.namespace == each.hit.fact.namespace
        within = [f for f in bank.bank_facts(each.hit.bank) if f.namespace == each.hit.fact.namespace]
        assert each.unit.text == "\n".join(fact.text for fact in within)


def test_a_document_is_a_pack_in_its_order(bank: MemoryFactBank, tmp_path: Path) -> None:
    made = packs(bank, tmp_path, unit="document")
    found = made.search("Part 3 of b.md.", 24)
    texts = {(each.hit.fact.namespace, each.hit.fact.source): each.unit.text for each in found if each.hit.fact.source}
    assert set(texts) == {(space, name) for space in ("default", "other") for name in ("a.md", "b.md")}
    for (_, source), text in texts.items():
        assert text.split("\n") == [f"Part {number} of {source}." for number in range(4)]
    # Without a source, each fact is its own document.
    assert sum(not each.hit.fact.source for each in found) == 8


@pytest.mark.parametrize(
    ("kv", "rates", "is_lazy"),
    [("lazy", None, True), ("stored", None, False), ("auto", FAST_DISK, False), ("auto", SLOW_DISK, True)],
)
def test_kv_is_stored_where_that_is_asked_for_or_faster(
    bank: MemoryFactBank, tmp_path: Path, kv: str, rates: Rates | None, *, is_lazy: bool
) -> None:
    made = packs(bank, tmp_path, kv=kv, rates=rates)
    [found] = made.search("Part 2 of a.md.", 1)
    assert found.handle is not None
    assert made.store.get(found.handle).is_lazy is is_lazy
    assert made.stores is not is_lazy


def test_what_is_stored_is_not_compiled_again(
    bank: MemoryFactBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = packs(bank, tmp_path, kv="stored")
    made.search("Part 2 of a.md.", 3)
    monkeypatch.setattr(made.store, "put", lambda _: pytest.fail("stored twice"))
    monkeypatch.setattr(made.store, "get", lambda _: pytest.fail("read to see whether it is there"))
    made.search("Part 2 of a.md.", 3)


@pytest.mark.parametrize("unit", ["fact", "bank"])
def test_warming_stores_what_the_banks_most_used_hold(bank: MemoryFactBank, tmp_path: Path, unit: str) -> None:
    made = packs(bank, tmp_path, unit=unit)
    assert made.warm() == []
    for _ in range(3):
        [found] = made.search("Part 2 of a.md.", 1)
    handles = made.warm(1)
    assert found.handle in handles
    held = bank.bank_facts(found.hit.bank)
    assert len(handles) == (len({fact.namespace for fact in held}) if unit == "bank" else len(held))
    assert not any(made.store.get(handle).is_lazy for handle in handles if handle)


def test_rates_are_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    rates = measure_rates(tiny_engine(), tmp_path)
    assert rates.bytes_per_token == tiny_engine().bytes_per_token
    assert rates.read_tokens_per_s == rates.read_bytes_per_s / rates.bytes_per_token > 0
    assert rates.stores is (rates.read_tokens_per_s > rates.prefill_tokens_per_s)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_unit_is_refused(bank: MemoryFactBank, tmp_path: Path) -> None:
    with pytest.raises(BankError, match="unit='page'"):
        packs(bank, tmp_path, unit="page")


# One loop for all who compile


class Watched:
    """An engine that notes what it tokenises, and for which of it KV is computed."""

    def __init__(self) -> None:
        self.engine, self.planned, self.built = tiny_engine(), list[str](), list[str]()
        self.build_pack = self.engine.build_pack

    def build_packs(self, texts: Sequence[str], *, lazy: bool = False, **options: Any) -> Iterator[KnowledgePack]:
        for pack in self.engine.build_packs(texts, lazy=lazy, **options):
            (self.planned if lazy else self.built).append(pack.text)
            yield pack


def compiled(facts: Sequence[Fact], store: PackStore, **options: Any) -> tuple[Watched, list[Handle | None]]:
    engine = Watched()
    return engine, compile_facts(facts, engine, store, progress=False, **options)  # type: ignore[arg-type]


def test_each_text_is_read_once_whether_it_is_stored_or_not(tmp_path: Path) -> None:
    store, facts = PackStore(tmp_path), [Fact("One."), Fact("Two."), Fact("Three.")]
    first, handles = compiled(facts[:1], store)
    assert (first.planned, first.built) == ([], ["One."])
    second, more = compiled(facts, store)
    assert (second.planned, second.built) == (["One."], ["Two.", "Three."])
    third, again = compiled(facts, store)
    assert (third.planned, third.built) == (["One.", "Two.", "Three."], [])
    assert again == more == [store.handle(fact.text, "default") for fact in facts]
    assert handles == more[:1]


def test_a_fact_is_compiled_in_its_own_namespace(tmp_path: Path) -> None:
    store = PackStore(tmp_path)
    _, handles = compiled([Fact("One."), Fact("One.", namespace="theirs"), Fact("Two.")], store, namespace="mine")
    assert [str(handle).partition("/")[0] for handle in handles] == ["kp:mine", "kp:theirs", "kp:mine"]
    assert all(handle and store.get(handle).namespace == handle.namespace for handle in handles)


@pytest.mark.parametrize("lazy", [True, False])
def test_texts_too_short_for_a_pack_go_as_text(
    tmp_path: Path, smol: Session, caplog: pytest.LogCaptureFixture, *, lazy: bool
) -> None:
    bank, texts = MemoryFactBank(HashEmbedder()), ["One.", "***", "Two.", "---", "Three."]
    made = Delivery(bank, smol, PackStore(tmp_path), kv="lazy" if lazy else "stored")
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
    with pytest.raises(TemplateError, match=r"Nothing to know\."):
        compile_facts([Fact("One."), Fact("Two.")], engine, PackStore(tmp_path), compiled_for=place)


def test_without_an_engine_packs_are_looked_up(
    bank: MemoryFactBank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = packs(bank, tmp_path)
    [with_pack] = made.search("Part 2 of a.md.", 1)
    only_looking = Delivery(bank, None, made.store)
    first, second = only_looking.search("Part 2 of a.md.", 2)
    assert (first.handle, second.handle) == (with_pack.handle, None)
    assert [record.args[0] for record in caplog.records if record.args] == [second.unit.id]  # type: ignore[index]
    with pytest.raises(BankError, match="no engine"):
        only_looking.compile([first.unit])


def test_a_search_sees_its_namespace(bank: MemoryFactBank, tmp_path: Path) -> None:
    for unit in ("fact", "bank", "document"):
        made = packs(bank, tmp_path, unit=unit, namespace="other")
        found = made.search("Part 2 of a.md.", 99)
        assert {each.unit.namespace for each in found} == {"other"}
        assert sum(len(each.unit.text.split("\n")) for each in found) == len(FACTS) // 2
        assert all(each.hit.fact.namespace == "other" for each in found)
    assert {each.namespace for each in made.store} == {"other"}


def test_namespaces_are_refused_at_the_first_touch(bank: MemoryFactBank, tmp_path: Path) -> None:
    for touch in (
        lambda: Fact("a", namespace="Acme Corp"),
        lambda: packs(bank, tmp_path, namespace="Acme Corp"),
        lambda: packs(bank, tmp_path).search("a", namespace="Acme Corp"),
        lambda: PackStore(tmp_path).view("Acme Corp"),
        lambda: tiny_engine().build_pack("a", namespace="Acme Corp", lazy=True),
    ):
        with pytest.raises(HandleError, match=r"Got the namespace 'Acme Corp'; expected .*, e\.g\. 'acme-corp'"):
            touch()
    assert Fact("a", namespace="-" * 64).namespace == "-" * 64


def test_what_is_no_bank_and_no_embedder_is_refused(tmp_path: Path) -> None:
    collection = chromadb.EphemeralClient().get_or_create_collection("theirs")
    with pytest.raises(BankError, match=r"Collection'> as bank; expected a FactBank"):
        open_bank(collection)  # type: ignore[arg-type]
    with pytest.raises(BankError, match=r"FakeEmbedding'> as embedder; expected an Embedder"):
        open_bank(embedder=DeterministicFakeEmbedding(size=3), path=tmp_path / "bank")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
