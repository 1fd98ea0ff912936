"""Both fact banks against their contract, and the Chroma bank against damage."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kp_core.errors import BankError, MissingDependencyError
from kp_core.facts import ChromaFactBank, Fact, FactBank, Hit, MemoryFactBank
from kp_core.facts.journal import Change, Deletion, Journal
from kp_core.facts.layout import BankFile
from kp_core.facts.rows import quantise
from kp_core.facts.table import FactTable

Floats = NDArray[np.float32]
MakeBank = Callable[..., FactBank]


class HashEmbedder:
    """A random unit vector per text: text up to `|` decides, so that `a|1` and `a|2` get the same vector."""

    def __init__(self, name: str = "hash", dimensions: int = 8) -> None:
        self.name, self.dimensions, self.embedded = name, dimensions, 0

    def embed(self, texts: Sequence[str]) -> Floats:
        self.embedded += len(texts)
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Floats:
        seed = hashlib.blake2b(text.partition("|")[0].encode(), digest_size=8).digest()
        vector = np.random.default_rng(int.from_bytes(seed)).standard_normal(self.dimensions)
        return (vector / np.linalg.norm(vector)).astype(np.float32)


def rounded(vectors: Floats) -> Floats:
    """What a bank on disk keeps of vectors."""
    codes = quantise(vectors).astype(np.float32)
    return np.asarray(codes / np.linalg.norm(codes, axis=1, keepdims=True), np.float32)


class Oracle:
    """Route and search from the words of the contract, over the banks that a bank made."""

    def __init__(self, bank: FactBank, embedder: HashEmbedder) -> None:
        self.members = [bank.bank_facts(number) for number in range(bank.banks)]
        self.embedder, self.rounds = embedder, isinstance(bank, ChromaFactBank)

    def vectors(self, facts: Sequence[Fact]) -> Floats:
        vectors = self.embedder.embed([fact.text for fact in facts])
        return rounded(vectors) if self.rounds else vectors

    def order(self, question: str) -> list[int]:
        query = self.embedder.embed_query(question)
        means = [self.vectors(facts).mean(0) for facts in self.members]
        cosines = [float(mean @ query / np.linalg.norm(mean)) for mean in means]
        return sorted(range(len(means)), key=lambda number: -cosines[number])

    def search(self, question: str, k: int, probes: int) -> list[tuple[str, float, int]]:
        query, found = self.embedder.embed_query(question), list[tuple[str, float, int]]()
        for position, number in enumerate(self.order(question)):
            if position >= probes and len(found) >= k:
                break
            facts = self.members[number]
            scores = self.vectors(facts) @ query
            found += [(fact.id, float(score), number) for fact, score in zip(facts, scores, strict=True)]
        return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:k]


def facts_of(count: int, start: int = 0) -> list[Fact]:
    return [Fact(f"fact number {number}") for number in range(start, start + count)]


def plain(hits: list[Hit]) -> list[tuple[str, int]]:
    return [(hit.fact.id, hit.bank) for hit in hits]


@pytest.fixture(params=["memory", "chroma"])
def make_bank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeBank]:
    opened: list[ChromaFactBank] = []

    def make(embedder: HashEmbedder | None = None, **options: int) -> FactBank:
        embedder = embedder or HashEmbedder()
        if request.param == "memory":
            return MemoryFactBank(embedder, **options)
        opened.append(ChromaFactBank(tmp_path / f"bank{len(opened)}", embedder, **options))
        return opened[-1]

    yield make
    for bank in opened:
        bank.close()


# Facts


def test_the_id_of_a_fact_is_a_digest_of_its_text_unless_given() -> None:
    assert Fact("a").id == Fact("a", title="t", source="s").id == hashlib.blake2b(b"a", digest_size=16).hexdigest()
    assert Fact("a").id != Fact("b").id
    assert Fact("a", id="mine").id == "mine"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ""},
        {"text": " \n"},
        {"text": "\ud800"},
        {"text": None},
        {"text": "a", "id": "a\nb"},
        {"text": "a", "title": 3},
        {"text": "a", "metadata": {"years": [1999]}},
        {"text": "a", "metadata": {"score": float("nan")}},
        {"text": "a", "expires": "tomorrow"},
        {"text": "a", "expires": float("inf")},
        {"text": "a", "version": 0},
    ],
)
def test_bad_facts_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BankError, match=r"expected|no file can hold"):
        Fact(**fields)  # type: ignore[arg-type]


def test_a_fact_is_an_immutable_value() -> None:
    metadata = {"year": "1999"}
    fact = Fact("a", metadata=metadata)
    metadata["year"] = "2000"
    assert fact.metadata == {"year": "1999"}
    with pytest.raises(TypeError):
        fact.metadata["year"] = "2000"  # type: ignore[index]
    with pytest.raises(AttributeError):
        fact.text = "b"  # type: ignore[misc]
    assert len({fact, Fact("a", metadata={"year": "1999"})}) == 1
    assert pickle.loads(pickle.dumps(fact)) == fact  # noqa: S301 - our own bytes


# The contract, for both banks


def test_an_unbuilt_bank_says_so(make_bank: MakeBank) -> None:
    bank = make_bank()
    bank.build([])
    assert (len(bank), bank.banks, list(bank.facts())) == (0, 0, [])
    calls: list[Callable[[], object]] = [
        lambda: bank.search("q"),
        lambda: bank.route("q"),
        lambda: bank.get("x"),
        lambda: bank.bank_of("x"),
        lambda: bank.bank_facts(0),
    ]
    for call in calls:
        with pytest.raises(BankError, match="bank not built"):
            call()


@pytest.mark.parametrize(
    ("count", "bank_size", "banks"), [(1, 20, 1), (20, 20, 1), (21, 20, 2), (45, 20, 3), (9, 1, 9)]
)
def test_every_fact_stands_in_one_of_the_banks(make_bank: MakeBank, count: int, bank_size: int, banks: int) -> None:
    bank, facts = make_bank(bank_size=bank_size), facts_of(count)
    bank.build(iter(facts))
    assert isinstance(bank, FactBank)
    assert (len(bank), bank.banks, list(bank.facts())) == (count, banks, facts)
    inside = [fact for number in range(banks) for fact in bank.bank_facts(number)]
    assert sorted(inside, key=facts.index) == facts
    for number in range(banks):
        assert bank.bank_facts(number)
        assert {bank.bank_of(fact.id) for fact in bank.bank_facts(number)} == {number}
    assert bank.get(facts[-1].id) is facts[-1]


def test_facts_of_one_kind_stand_in_one_bank(make_bank: MakeBank) -> None:
    class Topics(HashEmbedder):
        def embed_query(self, text: str) -> Floats:
            vector = super().embed_query(text.partition(" ")[0]) + 0.05 * super().embed_query(text)
            return np.asarray(vector / np.linalg.norm(vector), np.float32)

    bank = make_bank(Topics(), bank_size=5)
    bank.build(Fact(f"{topic} {number}") for number in range(5) for topic in ("sea", "war", "tax"))
    for topic in ("sea", "war", "tax"):
        assert {fact.text.partition(" ")[0] for fact in bank.bank_facts(bank.route(f"{topic} ?"))} == {topic}


def test_a_text_is_stored_once_and_an_id_stands_for_one_text(make_bank: MakeBank) -> None:
    bank = make_bank()
    bank.build([Fact("a", title="first"), Fact("b"), Fact("a", title="second", id="other")])
    bank.build([Fact("b", title="later")])
    assert [(fact.text, fact.title) for fact in bank.facts()] == [("a", "first"), ("b", "")]
    with pytest.raises(BankError, match="Ids are unique"):
        bank.build([Fact("c"), Fact("d", id=Fact("a").id)])
    with pytest.raises(BankError, match="expected a Fact"):
        bank.build(["text"])  # type: ignore[list-item]
    assert len(bank) == 2
    assert bank.search("c", 1)[0].fact.text in {"a", "b"}


def test_adding_facts_later_is_the_same_as_having_had_them(make_bank: MakeBank) -> None:
    embedder = HashEmbedder()
    bank, whole = make_bank(embedder, bank_size=4), make_bank(bank_size=4)
    bank.build(facts_of(10))
    bank.build(facts_of(25))
    assert embedder.embedded == 25
    bank.build(facts_of(25))
    assert embedder.embedded == 25
    whole.build(facts_of(25))
    for number in range(20):
        assert plain(bank.search(f"q{number}", 6)) == plain(whole.search(f"q{number}", 6))


@pytest.mark.parametrize("probes", [1, 2, 5, 99])
@pytest.mark.parametrize("k", [1, 4, 30, 200])
def test_search_is_what_its_contract_says(make_bank: MakeBank, k: int, probes: int) -> None:
    embedder = HashEmbedder()
    bank = make_bank(embedder, bank_size=12)
    bank.build(facts_of(90))
    oracle = Oracle(bank, embedder)
    for number in range(10):
        question = f"question {number}"
        assert bank.route(question) == oracle.order(question)[0]
        hits, expected = bank.search(question, k, probes=probes), oracle.search(question, k, probes)
        assert plain(hits) == [(fact_id, home) for fact_id, _, home in expected]
        assert [hit.score for hit in hits] == pytest.approx([score for _, score, _ in expected], abs=1e-6)
        assert len(hits) == min(k, 90)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60),
    bank_size=st.integers(1, 25),
    seed=st.integers(0, 10**6),
    k=st.integers(1, 70),
    probes=st.integers(1, 8),
)
def test_search_on_any_bank(count: int, bank_size: int, seed: int, k: int, probes: int) -> None:
    embedder = HashEmbedder()
    bank = MemoryFactBank(embedder, bank_size=bank_size)
    bank.build(Fact(f"{seed}/{number}") for number in range(count))
    oracle = Oracle(bank, embedder)
    question = f"{seed}?"
    assert bank.route(question) == oracle.order(question)[0]
    expected = oracle.search(question, k, probes)
    assert plain(bank.search(question, k, probes=probes)) == [(fact_id, home) for fact_id, _, home in expected]


def test_equal_scores_come_in_the_order_of_their_ids(make_bank: MakeBank) -> None:
    bank = make_bank(bank_size=3)
    bank.build([*(Fact(f"same|{number}") for number in range(30)), *facts_of(10)])
    hits = bank.search("same", 20)
    assert [hit.score for hit in hits] == pytest.approx([1.0] * 20, abs=1e-4)
    assert len({hit.score for hit in hits}) == 1
    everything = sorted(fact.id for fact in bank.facts() if fact.text.startswith("same"))
    assert [hit.fact.id for hit in hits] == everything[:20]


@pytest.mark.parametrize(
    ("question", "options", "words"),
    [("q", {"k": 0}, "k=0"), ("q", {"probes": 0}, "probes=0"), (" ", {}, "blank question")],
)
def test_bad_searches_are_refused(make_bank: MakeBank, question: str, options: dict[str, int], words: str) -> None:
    bank = make_bank()
    bank.build(facts_of(3))
    with pytest.raises(BankError, match=words):
        bank.search(question, **options)
    with pytest.raises(BankError, match="none of the 3 facts"):
        bank.get("nothing")
    with pytest.raises(BankError, match="expected 0 to 0"):
        bank.bank_facts(-1)
    with pytest.raises(BankError, match="bank_size=0"):
        make_bank(bank_size=0)


@pytest.mark.parametrize(
    "harm", [lambda rows: rows * 2, lambda rows: rows * np.nan, lambda rows: rows[:-1], lambda rows: rows[0]]
)
def test_an_embedder_that_breaks_its_word_is_named(make_bank: MakeBank, harm: Callable[[Floats], Floats]) -> None:
    class Broken(HashEmbedder):
        def embed(self, texts: Sequence[str]) -> Floats:
            return harm(super().embed(texts))

    bank = make_bank(Broken("the broken one"))
    with pytest.raises(BankError, match="the broken one"):
        bank.build(facts_of(5))
    assert len(bank) == 0


def test_threads_may_search_while_facts_are_added(
    make_bank: MakeBank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The new facts without their banks: what a search must not see.
    publish = FactTable.extend

    def slowly(table: FactTable, facts: Sequence[Fact]) -> None:
        publish(table, facts)
        time.sleep(0.02)

    monkeypatch.setattr(FactTable, "extend", slowly)
    bank, done = make_bank(bank_size=5), threading.Event()
    bank.build(facts_of(30))

    def search() -> set[int]:
        sizes = set()
        while not done.is_set():
            sizes.add(len(bank.search("q", 7, probes=99)))
            assert len(bank.search("q", 99, probes=99)) in {30, 40, 50, 60}
            assert bank.bank_of(list(bank.facts())[-1].id) < bank.banks
        return sizes

    with ThreadPoolExecutor(3) as pool:
        searches = [pool.submit(search) for _ in range(3)]
        try:
            for count in (40, 50, 60):
                bank.build(facts_of(count))
        finally:
            done.set()
        assert [result.result() for result in searches] == [{7}] * 3
    assert len(bank) == 60
    assert not caplog.text


# On disk


def searched(bank: FactBank) -> list[list[tuple[str, int]]]:
    return [plain(bank.search(f"q{number}", 5, probes=2)) for number in range(8)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[str, int]]]]:
    """A closed bank, of more facts than Chroma keeps outside its vector index, and what it finds."""
    folder = tmp_path_factory.mktemp("built") / "bank"
    with ChromaFactBank(folder, HashEmbedder()) as bank:
        bank.build(facts_of(1100))
        return folder, searched(bank)


@pytest.fixture
def copy(built: tuple[Path, list[list[tuple[str, int]]]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(built[0], tmp_path / "copy"))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_reopening_embeds_nothing(copy: Path, built: tuple[Path, list[list[tuple[str, int]]]]) -> None:
    embedder, part = HashEmbedder(), only(copy, "banks-*")
    with ChromaFactBank(copy, embedder) as bank:
        assert embedder.embedded == 0
        assert searched(bank) == built[1]
        assert len(bank) == 1100
        bank.build(facts_of(1100))
        assert only(copy, "banks-*") == part
        assert embedder.embedded == 0


def drop_rows(folder: Path) -> None:
    import chromadb
    from chromadb.config import Settings

    path = str(only(folder, "chroma-*"))
    with chromadb.PersistentClient(path, settings=Settings(anonymized_telemetry=False)) as client:
        client.get_collection("facts", embedding_function=None).delete(ids=[facts_of(1)[0].id])


def empty(folder: Path, but: str = "") -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != but:
            path.unlink()


def flip(folder: Path) -> None:
    path = only(folder, "vectors-*")
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


HARM: dict[str, Callable[[Path], object]] = {
    "chroma deleted": lambda folder: shutil.rmtree(only(folder, "chroma-*")),
    "chroma emptied": lambda folder: empty(only(folder, "chroma-*")),
    "sqlite overwritten": lambda folder: (only(folder, "chroma-*") / "chroma.sqlite3").write_bytes(b"garbage" * 999),
    "sqlite truncated": lambda folder: (only(folder, "chroma-*") / "chroma.sqlite3").open("r+b").truncate(9000),
    "vector index deleted": lambda folder: shutil.rmtree(only(folder, "chroma-*/*-*")),
    "vector index overwritten": lambda folder: only(folder, "chroma-*/*-*/*.pickle").write_bytes(b"garbage"),
    "a fact missing": drop_rows,
    "banks deleted": lambda folder: only(folder, "banks-*").unlink(),
    "banks overwritten": lambda folder: only(folder, "banks-*").write_bytes(b"PK garbage"),
    "vectors deleted": lambda folder: only(folder, "vectors-*").unlink(),
    "vectors truncated": lambda folder: only(folder, "vectors-*").open("r+b").truncate(5005),
    "a bit of a vector": flip,
    "bank.json deleted": lambda folder: (folder / "bank.json").unlink(),
    "bank.json overwritten": lambda folder: (folder / "bank.json").write_bytes(b'{"format": 1, "part": "../.."}'),
    "all but the facts": lambda folder: empty(folder, but="facts.jsonl"),
}


@pytest.mark.parametrize("what", HARM)
def test_whatever_is_damaged_is_rebuilt_from_the_facts(
    copy: Path, built: tuple[Path, list[list[tuple[str, int]]]], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    HARM[what](copy)
    with ChromaFactBank(copy, HashEmbedder()) as bank:
        assert "rebuilt" in caplog.text or "mended" in caplog.text
        assert searched(bank) == built[1]
        assert bank.verify() == []
        assert len(list(copy.glob("vectors-*"))) == len(list(copy.glob("banks-*"))) == 1
    embedder = HashEmbedder()
    with ChromaFactBank(copy, embedder) as bank:
        assert embedder.embedded == 0
        assert searched(bank) == built[1]


def test_an_open_bank_mends_itself(copy: Path, built: tuple[Path, list[list[tuple[str, int]]]]) -> None:
    with ChromaFactBank(copy, HashEmbedder()) as bank:
        assert bank._mirror is not None
        bank._mirror._remove([facts_of(1)[0].id])
        flip(copy)
        assert searched(bank) == built[1]
        vectors, chroma = bank.verify(repair=True)
        assert "1 of 1100 rows" in vectors
        assert "lacks 1 facts" in chroma
        assert bank.verify() == []
        assert searched(bank) == built[1]


def test_rebuild_changes_nothing_that_can_be_seen(copy: Path, built: tuple[Path, list[list[tuple[str, int]]]]) -> None:
    embedder = HashEmbedder()
    with ChromaFactBank(copy, embedder) as bank:
        bank.rebuild()
        assert embedder.embedded == 0
        assert searched(bank) == built[1]
        assert bank.verify() == []


def read(path: Path) -> list[Change]:
    return [change for change, _ in Journal(path).read()]


def small(folder: Path, count: int = 5) -> Path:
    with ChromaFactBank(folder, HashEmbedder()) as bank:
        bank.build(facts_of(count))
    return folder / "facts.jsonl"


def test_a_line_written_in_part_is_dropped_and_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = small(tmp_path)
    whole = journal.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for stop in range(last + 1, len(whole) - 1):
        journal.write_bytes(whole[:stop])
        assert read(journal) == facts_of(4)
    journal.write_bytes(whole + b"x" * 999)
    torn = Journal(journal)
    assert len(list(torn.read())) == 5
    assert torn.torn == 999
    torn.append(facts_of(1, start=5))
    assert b"x" not in journal.read_bytes()[len(whole) :].replace(b"text", b"")
    assert read(journal) == facts_of(6)
    # Without its newline the line is whole all the same.
    for stop, held in ((last + 7, 4), (len(whole) - 1, 5)):
        journal.write_bytes(whole[:stop])
        with ChromaFactBank(tmp_path, HashEmbedder()) as bank:
            assert len(bank) == held
            bank.build([*facts_of(5), Fact(f"after {stop}")])
            assert read(journal) == list(bank.facts())
            assert len(bank) == 6
    assert "line (5) was not written to its end" in caplog.text


@pytest.mark.parametrize(
    "harm",
    [
        lambda line: line.replace(b"number 1", b"number 9"),
        lambda line: line[:-9] + b"\n",
        lambda _: b"\n",
        lambda _: b'{"text": "a"}\n',
        lambda _: b"\xff\n",
        lambda line: line + line,
    ],
)
def test_a_damaged_line_before_the_last_is_named(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    journal = small(tmp_path)
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[1] = harm(lines[1])
    journal.write_bytes(b"".join(lines))
    with pytest.raises(BankError, match=r"facts\.jsonl, line [23] is damaged"):
        ChromaFactBank(tmp_path, HashEmbedder())
    assert journal.read_bytes() == b"".join(lines)


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    facts=st.lists(
        st.builds(
            Fact,
            text=_texts.filter(str.strip),
            title=_texts,
            source=_texts,
            metadata=st.dictionaries(_texts, _texts | st.integers() | st.booleans(), max_size=2),
            id=st.sampled_from(["", "mine"]),
            namespace=st.sampled_from(["default", "other"]),
            expires=st.none() | st.floats(0, 1e10),
            version=st.integers(1, 3),
        )
        | st.builds(Deletion, st.lists(_texts).map(tuple)),
        max_size=4,
    )
)
def test_the_journal_gives_back_what_it_was_given(facts: list[Change]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "facts.jsonl")
        assert list(journal.read()) == []
        for fact in facts:
            journal.append([fact])
        again = Journal(journal.path)
        assert [change for change, _ in again.read()] == facts
        assert (again.end, again.crc, again.lines) == (journal.end, journal.crc, journal.lines)


def test_facts_that_were_written_before_a_crash_are_indexed_on_opening(tmp_path: Path) -> None:
    journal = Journal(small(tmp_path))
    assert len(list(journal.read())) == 5
    journal.append(facts_of(2, start=5))
    with ChromaFactBank(tmp_path, HashEmbedder()) as bank:
        assert bank.search("fact number 6", 1)[0].fact.text == "fact number 6"
        assert len(bank) == 7


def test_a_build_that_cannot_be_finished_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(about: BankFile, folder: Path) -> None:
        (folder / "half.tmp").touch()
        raise OSError("disk full")

    small(tmp_path)
    bank = ChromaFactBank(tmp_path, HashEmbedder())
    with monkeypatch.context() as patch:
        patch.setattr(BankFile, "write", full)
        with pytest.raises(OSError, match="disk full"):
            bank.build(facts_of(9))
    assert len(bank.search("q", 9)) == 9
    bank.close()
    with pytest.raises(BankError, match="was closed"):
        bank.search("q")
    with ChromaFactBank(tmp_path, HashEmbedder()) as again:
        assert not list(tmp_path.glob("*.tmp"))
        assert len(again) == 9
        assert len(again.search("q", 9)) == 9


def test_another_embedder_is_refused_and_both_are_named(tmp_path: Path) -> None:
    small(tmp_path)
    with pytest.raises(BankError, match="built with the embedder 'hash', got 'other'"):
        ChromaFactBank(tmp_path, HashEmbedder("other"))
    with (
        ChromaFactBank(tmp_path, HashEmbedder(dimensions=9)) as bank,
        pytest.raises(BankError, match=r"\(1, 9\).*\(1, 8\)"),
    ):
        bank.search("q")


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    small(tmp_path)
    path = tmp_path / "bank.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3, "new": 1}))
    with pytest.raises(BankError, match="format 3"):
        ChromaFactBank(tmp_path, HashEmbedder())


_OPEN = """
import sys
from kp_core.facts import ChromaFactBank
from kp_core.errors import BankError
class Embedder:
    name, dimensions = "hash", 8
try:
    print(len(ChromaFactBank(sys.argv[1], Embedder())))
except BankError as error:
    print(error)
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()


def test_a_folder_is_open_in_one_place_at_a_time(tmp_path: Path) -> None:
    small(tmp_path)
    with ChromaFactBank(tmp_path, HashEmbedder()) as bank:
        assert "is open already" in run(_OPEN, str(tmp_path))
        with pytest.raises(BankError, match="is open already"):
            ChromaFactBank(tmp_path, HashEmbedder())
        assert len(bank.search("q")) == 4
    assert run(_OPEN, str(tmp_path)) == "5"
    with pytest.raises(BankError, match="was closed"):
        bank.search("q")
    with pytest.raises(BankError, match="it is a file"):
        ChromaFactBank(tmp_path / "bank.json", HashEmbedder())


# What is loaded when


def test_importing_the_banks_loads_no_heavy_library() -> None:
    heavy = "{'chromadb', 'sklearn', 'sentence_transformers', 'transformers'}"
    assert run(f"import sys, kp_core.facts, kp_core.facts.embed; print(sorted({heavy} & set(sys.modules)))") == "[]"


@pytest.mark.parametrize(("module", "words"), [("sklearn.cluster", "scikit-learn"), ("chromadb", "chromadb")])
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: str, words: str
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {words}: `pip install"):
        ChromaFactBank(tmp_path, HashEmbedder()).build(facts_of(3))
