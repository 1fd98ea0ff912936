"""Facts that come and go: banks that follow, files that survive, one writer and many readers."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kp_core.errors import BankError, BankLockedError
from kp_core.facts import ChromaFactBank, Fact, MemoryFactBank
from kp_core.facts.clusters import Banks
from kp_core.facts.journal import Journal
from kp_core.facts.routing import RoutedBank
from kp_core.facts.rows import FloatRows
from tests.core.facts.test_facts import HashEmbedder, facts_of

MakeBank = Callable[..., RoutedBank]


@pytest.fixture(params=["memory", "disk"])
def make_bank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeBank]:
    opened: list[ChromaFactBank] = []

    def make(embedder: HashEmbedder | None = None, **options: int) -> RoutedBank:
        embedder = embedder or HashEmbedder()
        if request.param == "memory":
            return MemoryFactBank(embedder, **options)
        opened.append(ChromaFactBank(tmp_path / f"bank{len(opened)}", embedder, mirror=False, **options))
        return opened[-1]

    yield make
    for bank in opened:
        bank.close()


def check(bank: RoutedBank, facts: list[Fact], *, clustered: bool = False) -> None:
    """The bank holds these facts, each in one bank, and finds each; k-means alone (`clustered`) bounds no bank."""
    assert {fact.id: fact for fact in bank.facts()} == {fact.id: fact for fact in facts}
    assert len(bank) == len(facts)
    inside = [[fact.id for fact in bank.bank_facts(number)] for number in range(bank.banks)]
    assert sorted(itertools.chain.from_iterable(inside)) == sorted(fact.id for fact in facts)
    for number, ids in enumerate(inside):
        assert 0 < len(ids) <= (len(facts) if clustered else 2 * bank.bank_size)
        assert {bank.bank_of(fact_id) for fact_id in ids} == {number}
    for fact in facts[::7]:
        assert bank.search(fact.text, 1, probes=bank.banks)[0].fact == fact


# Adding, updating, deleting


def test_facts_added_one_by_one_stand_in_banks_that_split(make_bank: MakeBank) -> None:
    bank, facts = make_bank(bank_size=5), facts_of(90)
    for fact in facts:
        assert bank.add([fact]).added == 1
    check(bank, facts)
    assert 10 <= bank.banks <= 60
    assert bank.add(facts).duplicates == 90


def test_facts_placed_ahead_stand_where_they_do_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = HashEmbedder().embed([fact.text for fact in facts_of(400)])

    def placed(ahead: int) -> list[int]:
        monkeypatch.setattr("kp_core.facts.clusters._AHEAD", ahead)
        rows = FloatRows()
        rows.append(vectors)
        banks = Banks(rows, np.zeros(3, np.int32), bank_size=5, random_state=0)
        for row in range(3, len(vectors)):
            banks.add(row)
            for gone in (row // 2, row - 1):
                if gone % 3 == 0:
                    banks.remove(gone)
        assert len(banks) > 20
        return banks.labels.tolist()

    assert placed(64) == placed(1)


def test_banks_that_shrink_are_merged(make_bank: MakeBank) -> None:
    bank, facts = make_bank(bank_size=8), facts_of(120)
    bank.build(facts)
    before, gone = bank.banks, facts[::2] + facts[1:80:2]
    for fact in gone:
        assert bank.delete([fact.id, "unknown"]) == 1
    check(bank, [fact for fact in facts if fact not in gone])
    assert bank.banks < before
    assert bank.delete(fact.id for fact in facts) == 120 - len(gone)
    with pytest.raises(BankError, match="bank not built"):
        bank.search("q")
    bank.add(facts[:3])
    check(bank, facts[:3])


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_changes_leaves_what_a_dictionary_holds(make_bank: MakeBank, seed: int) -> None:
    draw, held = random.Random(seed), dict[str, Fact]()
    bank = make_bank(bank_size=4)
    for step in range(150):
        kind = draw.choice(["add", "add", "update", "delete", "rebuild"])
        if kind == "add":
            facts = [Fact(f"{step}/{number}") for number in range(draw.randint(1, 4))]
            bank.add(facts)
            held.update({fact.id: fact for fact in facts})
        elif held and kind == "update":
            fact = Fact(f"update {step}", id=draw.choice(list(held)))
            held[fact.id] = bank.update(fact)
            assert held[fact.id].text == f"update {step}"
        elif held and kind == "delete":
            ids = draw.sample(list(held), min(3, len(held)))
            assert bank.delete(ids) == len(ids)
            held = {fact_id: fact for fact_id, fact in held.items() if fact_id not in ids}
        elif step % 25 == 0:
            bank.rebuild()
    check(bank, list(held.values()))


def test_versions_count_the_texts_under_an_id(make_bank: MakeBank) -> None:
    bank = make_bank()
    bank.build([Fact("It opens at nine.", id="hours"), Fact("It is blue.", id="colour")])
    assert bank.update(Fact("It opens at ten.", id="hours")).version == 2
    assert bank.update(Fact("It opens at eight.", id="hours")).version == 3
    assert bank.get("hours") == Fact("It opens at eight.", id="hours", version=3)
    assert len(bank) == 2
    assert bank.add([Fact("It opens at nine.")]).added == 1
    with pytest.raises(BankError, match="a text is held once"):
        bank.update(Fact("It is blue.", id="hours"))
    with pytest.raises(BankError, match="none of the 3 facts"):
        bank.update(Fact("x", id="nothing"))


def test_a_bank_of_one_fact_can_be_updated(make_bank: MakeBank) -> None:
    bank = make_bank()
    bank.build([Fact("a", id="1")])
    bank.update(Fact("b", id="1"))
    check(bank, [Fact("b", id="1", version=2)])


def test_what_says_nearly_the_same_is_reported(make_bank: MakeBank) -> None:
    class Near(HashEmbedder):
        def embed_query(self, text: str) -> np.ndarray:  # type: ignore[type-arg]
            vector = super().embed_query(text.partition("~")[0]) + 0.05 * super().embed_query(text)
            return np.asarray(vector / np.linalg.norm(vector), np.float32)

    bank = make_bank(Near(), bank_size=10)
    report = bank.build([Fact("a~1"), *facts_of(30), Fact("a~2"), Fact("a~2")])
    [near] = report.near_duplicates
    assert (report.added, report.duplicates) == (32, 1)
    assert (near.id, near.earlier) == (Fact("a~2").id, Fact("a~1").id)
    assert 0.97 < near.score < 1
    [later] = bank.add([Fact("a~3"), Fact("b")]).near_duplicates
    assert later.id == Fact("a~3").id


def test_facts_expire(make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    bank = make_bank(bank_size=3)
    bank.build(facts_of(9))
    bank.add([Fact("soon"), Fact("sooner", expires=1005.0)], ttl=60)
    assert bank.search("soon", 1)[0].fact == Fact("soon", expires=1060.0)
    now[0] = 1005.0
    assert len(bank) == 10
    with pytest.raises(BankError, match="none of the"):
        bank.get(Fact("sooner").id)
    now[0] = 1060.0
    assert Fact("soon").id not in {hit.fact.id for hit in bank.search("soon", 99)}
    check(bank, facts_of(9))
    # What has expired may come again.
    assert bank.add([Fact("soon")]).added == 1
    with pytest.raises(BankError, match="ttl=0"):
        bank.add([Fact("x")], ttl=0)


def test_namespaces_hold_the_same_text_apart(make_bank: MakeBank) -> None:
    bank = make_bank()
    bank.build([Fact("a"), Fact("a", namespace="guests"), Fact("b", metadata={"namespace": "guests"})])
    assert len(bank) == 3
    assert {hit.fact.namespace for hit in bank.search("a", 9)} == {"default", "guests"}
    assert [hit.fact for hit in bank.search("b", 9, namespace="guests")] == [Fact("a", namespace="guests")]
    assert bank.search("a", namespace="nobody") == []


# On disk


def open_bank(path: Path, **options: object) -> ChromaFactBank:
    return ChromaFactBank(path, HashEmbedder(), **{"bank_size": 5, "mirror": False, **options})  # type: ignore[arg-type]


def test_changes_are_there_after_reopening_and_nothing_is_embedded(tmp_path: Path) -> None:
    with open_bank(tmp_path) as bank:
        bank.build(facts_of(40))
        bank.add(facts_of(60))
        bank.delete([facts_of(1)[0].id])
        bank.update(Fact("new text", id=facts_of(2)[1].id))
        facts = list(bank.facts())
        banks = [bank.bank_facts(number) for number in range(bank.banks)]
        shutil.copytree(tmp_path, tmp_path / "crashed", ignore=shutil.ignore_patterns("crashed", ".lock"))
    for folder in (tmp_path, tmp_path / "crashed"):
        embedder = HashEmbedder()
        with ChromaFactBank(folder, embedder, bank_size=5, mirror=False) as bank:
            assert embedder.embedded == 0
            assert list(bank.facts()) == facts
            # Replaying the journal over the banks that were saved makes the same banks as before.
            assert [bank.bank_facts(number) for number in range(bank.banks)] == banks
            assert bank.verify() == []


def test_a_rebuild_gives_back_the_room_of_what_was_deleted(tmp_path: Path) -> None:
    with open_bank(tmp_path) as bank:
        bank.build(facts_of(100))
        bank.delete(fact.id for fact in facts_of(90))
        before = bank.sizes
        bank.rebuild()
        after = bank.sizes
        assert after["facts"] * 5 < before["facts"]
        assert after["vectors"] * 5 < before["vectors"]
        check(bank, facts_of(10, start=90))
    with open_bank(tmp_path) as bank:
        check(bank, facts_of(10, start=90))
        assert bank.verify() == []


def test_searches_go_on_while_banks_are_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kp_core.facts import routing

    begun, go, cluster = threading.Event(), threading.Event(), routing.cluster

    def slow(*arguments: object) -> object:
        begun.set()
        assert go.wait(30)
        return cluster(*arguments)  # type: ignore[arg-type]

    with open_bank(tmp_path) as bank:
        bank.build(facts_of(50))
        monkeypatch.setattr(routing, "cluster", slow)
        rebuild = threading.Thread(target=bank.rebuild)
        rebuild.start()
        assert begun.wait(30)
        assert bank.search("fact number 7", 1, probes=99)[0].fact.text == "fact number 7"
        go.set()
        rebuild.join()
        check(bank, facts_of(50))


def test_vectors_survive_a_crash_between_new_journal_and_new_banks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bank(tmp_path) as bank:
        bank.build(facts_of(30))
        bank.delete([facts_of(1)[0].id])
        with monkeypatch.context() as patch:
            patch.setattr("kp_core.facts.disk.BankFile.write", lambda *_: (_ for _ in ()).throw(OSError("crash")))
            with pytest.raises(OSError, match="crash"):
                bank.rebuild()
        shutil.copytree(tmp_path, tmp_path / "crashed", ignore=shutil.ignore_patterns("crashed", ".lock"))
    embedder = HashEmbedder()
    with ChromaFactBank(tmp_path / "crashed", embedder, bank_size=5, mirror=False) as bank:
        assert embedder.embedded == 0
        check(bank, facts_of(29, start=1))
        assert bank.verify() == []


def test_readers_see_what_the_writer_does(tmp_path: Path) -> None:
    with pytest.raises(BankError, match="no bank in it"):
        open_bank(tmp_path, read_only=True)
    with open_bank(tmp_path) as writer:
        writer.build(facts_of(30))
        with open_bank(tmp_path, read_only=True) as reader, open_bank(tmp_path, read_only=True) as other:
            writer.add([Fact("later")])
            assert reader.search("later", 1, probes=99)[0].fact.text == "later"
            writer.delete([Fact("later").id])
            writer.rebuild()
            for bank in (reader, other):
                check(bank, facts_of(30))
                assert bank.verify() == []
            for change in (lambda: reader.add([Fact("x")]), lambda: reader.delete([facts_of(1)[0].id]), reader.rebuild):
                with pytest.raises(BankError, match="read_only=True"):
                    change()
            check(reader, facts_of(30))


def test_a_second_writer_is_told_or_waits(tmp_path: Path) -> None:
    with open_bank(tmp_path) as bank:
        bank.build(facts_of(3))
        with pytest.raises(BankLockedError, match="wait=60"):
            open_bank(tmp_path)
        closing = threading.Timer(0.3, bank.close)
        closing.start()
        with open_bank(tmp_path, wait=30) as second:
            assert len(second) == 3
        closing.join()


def test_chroma_follows(tmp_path: Path) -> None:
    with open_bank(tmp_path, mirror=True) as bank:
        bank.build(facts_of(30))
        bank.add([Fact("a"), Fact("b")])
        bank.update(Fact("c", id=Fact("a").id))
        bank.delete([fact.id for fact in facts_of(5)])
        assert bank._mirror is not None
        assert set(bank._mirror.collection.get()["ids"]) == {fact.id for fact in bank.facts()}
        assert bank.verify() == []
    # Changes that Chroma has not seen, as after a crash.
    with open_bank(tmp_path) as bank:
        bank.add([Fact("d")])
        bank.update(Fact("e", id=Fact("b").id))
        bank.delete([facts_of(6)[5].id])
    with open_bank(tmp_path, mirror=True) as bank:
        assert bank._mirror is not None
        assert set(bank._mirror.collection.get()["ids"]) == {fact.id for fact in bank.facts()}
        assert bank.verify() == []


def test_a_fact_takes_little_room(tmp_path: Path) -> None:
    embedder = HashEmbedder(dimensions=384)
    with ChromaFactBank(tmp_path, embedder, mirror=False) as bank:
        bank.build(facts_of(500))
        text = sum(len(fact.text) for fact in bank.facts())
        # `bank.json` does not grow with the facts.
        fixed = (tmp_path / "bank.json").stat().st_size
        assert sum(bank.sizes.values()) - fixed <= text + 500 * (384 + 100)


# kill -9

_CHANGE = """
import sys
import sklearn.cluster
from kp_core.facts import ChromaFactBank, Fact
from tests.core.facts.test_facts import HashEmbedder
bank = ChromaFactBank(sys.argv[1], HashEmbedder(), bank_size=5, mirror=sys.argv[2] == "mirror")
print("ready", flush=True)
step = len(list(bank.facts()))
while True:
    step += 1
    bank.add([Fact(f"{sys.argv[3]}/{step}/{number}") for number in range(3)])
    print("+", f"{sys.argv[3]}/{step}", flush=True)
    if step % 3 == 0:
        gone = next(bank.facts())
        bank.delete([gone.id])
        print("-", gone.text, flush=True)
    if step % 10 == 0:
        bank.rebuild()
"""


def killed(folder: Path, name: str, after: float, *, mirror: bool) -> list[str]:
    """What a process that changes a bank had acknowledged when it was killed."""
    command = [sys.executable, "-c", _CHANGE, str(folder), "mirror" if mirror else "", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # On a busy machine it may be a while before there is anything to lose.
        first = process.stdout.readline()
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
        return (first + process.stdout.read()).splitlines()


@pytest.mark.parametrize(
    ("mirror", "kills"), [(False, 1), *(pytest.param(mirror, 3, marks=pytest.mark.slow) for mirror in (False, True))]
)
def test_what_was_acknowledged_survives_being_killed(tmp_path: Path, kills: int, *, mirror: bool) -> None:
    draw, texts = random.Random(0), set[str]()
    for name in range(kills):
        said = killed(tmp_path, str(name), draw.uniform(0.05, 0.6), mirror=mirror)
        for line in said:
            kind, text = line.split(" ", 1)
            texts = texts - {text} if kind == "-" else texts | {f"{text}/{number}" for number in range(3)}
        with ChromaFactBank(tmp_path, HashEmbedder(), bank_size=5, mirror=mirror) as bank:
            held = {fact.text for fact in bank.facts()}
            # At most one change was under way: three facts that came, or one that went.
            assert len(texts - held) <= 1
            assert len(held - texts) <= 3
            assert bank.verify() == []
            check(bank, list(bank.facts()), clustered=True)
            texts = held
    assert texts
    assert Journal(tmp_path / "facts.jsonl").torn == 0
