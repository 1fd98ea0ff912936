"""Packs from banks: which facts a pack holds, and whether its KV is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from kp_core import Fact, MemoryFactBank, PackStore
from kp_core.delivery import BankPacks, Rates, measure_rates
from kp_core.errors import BankError
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


def packs(bank: MemoryFactBank, folder: Path, **options: object) -> BankPacks:
    return BankPacks(bank, tiny_engine(), PackStore(folder), **{"kv": "lazy", **options})  # type: ignore[arg-type]


def test_a_fact_is_a_pack(bank: MemoryFactBank, tmp_path: Path) -> None:
    made = packs(bank, tmp_path)
    found = made.search("Part 2 of a.md.", 3)
    assert [each.hit for each in found] == bank.search("Part 2 of a.md.", 3)
    for each in found:
        assert each.text == each.hit.fact.text
        assert each.handle.namespace == each.hit.fact.namespace
        pack = made.store.get(each.handle)
        assert (pack.text, pack.is_lazy) == (each.text, True)


def test_a_bank_is_a_pack(bank: MemoryFactBank, tmp_path: Path) -> None:
    made = packs(bank, tmp_path, unit="bank")
    found = made.search("Part 1 of b.md.", 2)
    assert len({each.hit.bank for each in found}) == 2
    for each in found:
        within = [f for f in bank.bank_facts(each.hit.bank) if f.namespace == each.hit.fact.namespace]
        assert each.text == "\n".join(fact.text for fact in within)


def test_a_document_is_a_pack_in_its_order(bank: MemoryFactBank, tmp_path: Path) -> None:
    made = packs(bank, tmp_path, unit="document")
    found = made.search("Part 3 of b.md.", 24)
    texts = {(each.hit.fact.namespace, each.hit.fact.source): each.text for each in found if each.hit.fact.source}
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
    assert made.store.get(found.handle).is_lazy is is_lazy
    assert made.stores is not is_lazy


def test_what_is_stored_is_not_compiled_again(
    bank: MemoryFactBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = packs(bank, tmp_path, kv="stored")
    made.search("Part 2 of a.md.", 3)
    monkeypatch.setattr(made.store, "put", lambda _: pytest.fail("stored twice"))
    made.search("Part 2 of a.md.", 3)


@pytest.mark.parametrize("unit", ["fact", "bank"])
def test_warming_stores_what_the_banks_most_used_hold(bank: MemoryFactBank, tmp_path: Path, unit: str) -> None:
    made = packs(bank, tmp_path, unit=unit)
    assert made.warm() == []
    for _ in range(3):
        [found] = made.search("Part 2 of a.md.", 1)
    handles = made.warm(1)
    assert found.handle in handles
    assert len(handles) == (1 if unit == "bank" else len(bank.bank_facts(found.hit.bank)))
    assert not any(made.store.get(handle).is_lazy for handle in handles)


def test_rates_are_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    rates = measure_rates(tiny_engine(), tmp_path)
    assert rates.bytes_per_token == tiny_engine().bytes_per_token
    assert rates.read_tokens_per_s == rates.read_bytes_per_s / rates.bytes_per_token > 0
    assert rates.to_dict()["stores"] is rates.stores
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_unit_is_refused(bank: MemoryFactBank, tmp_path: Path) -> None:
    with pytest.raises(BankError, match="unit='page'"):
        packs(bank, tmp_path, unit="page")
