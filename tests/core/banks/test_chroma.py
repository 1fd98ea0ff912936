"""Facts in Chroma: what is theirs stays theirs, what is ours survives, and any client will do."""

import json
import random
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import chromadb
import numpy as np
import pytest
from chromadb.config import Settings
from langchain_core.embeddings import DeterministicFakeEmbedding
from llama_index.core.base.embeddings.base import BaseEmbedding

from kp_core.banks import ChromaFactStore, Fact
from kp_core.banks.base import content_id
from kp_core.banks.embed import as_embedder, normalised
from kp_core.errors import FactError, FactStoreLockedError, MissingDependencyError
from tests.core.banks.test_facts import build, check, facts_of
from tests.kits import HashEmbedder


def a_client(path):
    """A client as any user has one."""
    return chromadb.PersistentClient(str(path), settings=Settings(anonymized_telemetry=False))


def contents(path):
    """All that a database holds, in plain values."""
    client = a_client(path)
    found = {}
    for each in client.list_collections():
        held = client.get_collection(each.name, embedding_function=None).get(
            include=["documents", "metadatas", "embeddings"]
        )
        about = (each.metadata, each.configuration_json)
        found[each.name] = (about, held["ids"], held["documents"], held["metadatas"], held["embeddings"].tolist())
    client.close()
    return found


@pytest.fixture
def foreign(tmp_path):
    """A database of somebody else, with a collection `facts` and one under a name that we would give."""
    client = a_client(tmp_path / "foreign")
    for name in ("facts", "kp-default-facts"):
        collection = client.create_collection(name, configuration={"hnsw": {"space": "l2"}}, embedding_function=None)
        texts = [fact.text for fact in facts_of(30)]
        about = [{"title": f"t{number}", "source": "theirs.md", "n": number} for number in range(30)]
        ids = [f"own {number}/é" for number in range(30)]
        collection.add(ids=ids, documents=texts, embeddings=HashEmbedder().embed(texts), metadatas=about)
    client.close()
    return tmp_path / "foreign"


# What a person sees with Chroma's own tools


def test_facts_are_in_chroma_and_nowhere_else(tmp_path):
    fact = Fact("It opens at nine.", title="Hours", source="a.md", metadata={"year": 1999, "tags": ["x", "y"]})
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        store.add([fact, Fact("Elsewhere.", namespace="other")])
    found = contents(tmp_path)
    assert set(found) == {"kp-default-facts", "kp-other-facts"}
    about, ids, documents, [metadata], [vector] = found["kp-default-facts"]
    assert (ids, documents) == ([fact.id], [fact.text])
    assert (metadata["year"], metadata["tags"], metadata["kp:title"], metadata["kp:source"]) == (
        1999,
        ["x", "y"],
        "Hours",
        "a.md",
    )
    assert vector == pytest.approx(HashEmbedder().embed_query(fact.text).tolist(), abs=1e-6)
    assert about[0]["kp:embedder"] == "hash"
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"chroma.sqlite3", "kp.json", "kp.lock"}


ODD = {
    "none": None,
    "empty": [],
    "mixed": [1, "a", None],
    "nested": {"a": [1, {"b": None}]},
    "large": 2**70,
    "": "no name",
    "kp:title": "not ours",
    "chroma:document": "x",
    "flag": True,
    "float": 1.0,
    "zero": 0,
    "nul": "a\0b",
    "long": "x" * 100_000,
}


ODD_IDS = [
    *("a b", "é/..\\", "x" * 500, "'; drop table", "0", "kp-banks "),
    *("a\nb", "\n", "\t", "\r\n", " ", "a\u200bb", "\u00a0", "\ufeffa", "\u2028", "\x1b[0m", "a\0b", "\u202eabc"),
    *("\U0001f600", "e\u0301", "\u00e9", "A", "a", "01", "1", "1.0", "%2F%00", "a/b?c#d", "$id", "#", "null", "None"),
    *('"', "{'$in': ['a']}", "kp:default/" + "a" * 21, "<|im_end|>", "-1", "../../etc", "x" * 20_000),
]


@pytest.mark.slow
def test_metadata_and_ids_come_back_as_they_were(tmp_path):
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        store.add(facts_of(3))
        for fact_id in ODD_IDS:
            fact = Fact(
                "text\0 with\r\nodd \U0001f600 signs", id=fact_id, metadata=ODD, expires=2e9, version=3, title="\n"
            )
            store.add([fact])
            assert store.get(fact_id) == fact
            [found] = [hit.fact for hit in store.search(fact.text, 1)]
            assert (found, found.metadata) == (fact, ODD)
            assert type(found.metadata["flag"]) is bool
            assert type(found.metadata["float"]) is float
            assert len(store.banks()) == 1
            # What an update takes away is away.
            store.update(Fact("new", id=fact_id))
            assert store.get(fact_id) == Fact("new", id=fact_id, version=4)
            assert store.delete([fact_id]) == 1
            check(store, facts_of(3))


def test_odd_ids_stand_beside_one_another(tmp_path):
    """Those that look alike, or differ in case, are different facts."""
    facts = [Fact(f"fact {number}", id=fact_id) for number, fact_id in enumerate(ODD_IDS)]
    with ChromaFactStore(tmp_path, HashEmbedder(), bank_size=5) as store:
        assert store.add(facts).added == len(facts)
        assert [fact.id for fact in store.facts()] == ODD_IDS
        check(store, facts)
        for fact in facts:
            assert [found.text for found in store.facts(where={"id": fact.id})] == [fact.text]
            assert [hit.fact.id for hit in store.search(fact.text, 2, where={"id": {"$in": [fact.id]}})] == [fact.id]
        assert store.delete(ODD_IDS[::2]) == len(ODD_IDS[::2])
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        check(store, facts[1::2])


# Folders


def test_reopening_embeds_nothing_and_the_same_folder_may_be_open_twice(tmp_path):
    with ChromaFactStore(tmp_path, HashEmbedder(), bank_size=5) as store:
        build(store, facts_of(40))
        store.delete([facts_of(1)[0].id])
        banks = {bank: store.bank_facts(bank) for bank in store.banks()}
    embedder = HashEmbedder()
    with ChromaFactStore(tmp_path, embedder, bank_size=5) as store, ChromaFactStore(tmp_path, embedder) as again:
        assert {bank: store.bank_facts(bank) for bank in store.banks()} == banks
        assert embedder.embedded == 0
        again.add([Fact("later"), Fact("elsewhere", namespace="new")])
        assert store.search("later", 1)[0].fact.text == "later"
        assert store.search("elsewhere", 1, namespace="new")[0].fact.namespace == "new"
        assert len(store) == len(again)
        again.close()
        store.add([Fact("still open")])
        with pytest.raises(FactError, match="was closed"):
            again.search("q")


def test_a_folder_keeps_the_name_of_its_embedder(tmp_path):
    with ChromaFactStore(tmp_path, HashEmbedder("mine", 8)) as store:
        store.add(facts_of(3))
    for other in (HashEmbedder("another", 8), HashEmbedder("another", 16)):
        with pytest.raises(FactError, match=rf"'mine' \(8 dimensions\), got 'another' \({other.dimensions} dimensions"):
            ChromaFactStore(tmp_path, other)
    with ChromaFactStore(tmp_path, HashEmbedder("mine", 16)) as store, pytest.raises(FactError, match="dimension"):
        store.add([Fact("x")])
    with ChromaFactStore(tmp_path, HashEmbedder("mine", 8)) as store:
        check(store, facts_of(3))


_HOLD = """
import sys
from kp_core.banks import ChromaFactStore, Fact
from tests.kits import HashEmbedder
store = ChromaFactStore(sys.argv[1], HashEmbedder())
store.add([Fact("held")])
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_second_writer_is_told_and_a_reader_reads(tmp_path):
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "facts")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(FactStoreLockedError, match="read_only=True"):
            ChromaFactStore(tmp_path / "facts", HashEmbedder())
        with ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as reader:
            assert reader.search("held", 1)[0].fact.text == "held"
            for change in (lambda: reader.add([Fact("x")]), lambda: reader.delete(["x"]), reader.rebuild, reader.banks):
                with pytest.raises(FactError, match="read_only=True"):
                    change()
        ending = threading.Timer(0.3, process.communicate, ["\n"])
        ending.start()
        with ChromaFactStore(tmp_path / "facts", HashEmbedder(), wait=60) as store:
            assert len(store) == 1
        ending.join()


def test_what_is_not_ours_is_refused_and_untouched(tmp_path, foreign):
    before = contents(foreign)
    with pytest.raises(FactError, match="retriever of LangChain or LlamaIndex"):
        ChromaFactStore(foreign, HashEmbedder())
    other = tmp_path / "other"
    other.mkdir()
    (other / "chroma-0").mkdir()
    (other / "chroma-0" / "thesis.txt").write_text("precious")
    with pytest.raises(FactError, match=r"other things \(chroma-0\)"):
        ChromaFactStore(other, HashEmbedder())
    assert (other / "chroma-0" / "thesis.txt").read_text() == "precious"
    with pytest.raises(FactError, match="no facts in it"):
        ChromaFactStore(tmp_path / "nothing", HashEmbedder(), read_only=True)
    assert not (tmp_path / "nothing").exists()
    # With their client our collections stand beside theirs; the one with our name and without our marker stays.
    client = a_client(foreign)
    with ChromaFactStore(client=client, embedder=HashEmbedder()) as store:
        with pytest.raises(FactError, match="lacks our marker"):
            store.add([Fact("a")])
        build(store, [Fact("a", namespace="ours"), Fact("b", namespace="ours")])
        store.rebuild()
        store.delete([Fact("a", namespace="ours").id])
        assert store.verify() == []
    client.close()
    after = contents(foreign)
    assert {name: held for name, held in after.items() if name in before} == before
    for wrong in ({}, {"path": tmp_path, "client": client}):
        with pytest.raises(FactError, match="expected one of the two"):
            ChromaFactStore(embedder=HashEmbedder(), **wrong)


@pytest.mark.slow
def test_a_database_that_cannot_be_read_says_so_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("kp_core.banks.chroma._LOCKED_SECONDS", 0.2)
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        store.add(facts_of(3))
    with sqlite3.connect(tmp_path / "chroma.sqlite3", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(FactStoreLockedError, match="is locked; another process"):
            ChromaFactStore(tmp_path, HashEmbedder())
        assert time.monotonic() - began < 30
        other.execute("ROLLBACK")
    other.close()
    (tmp_path / "chroma.sqlite3").write_bytes(b"no database" * 1000)
    with pytest.raises(FactError, match="damaged"):
        ChromaFactStore(tmp_path, HashEmbedder())


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    for module, words in (("sklearn.cluster", "needs scikit-learn"), ("chromadb", "needs chromadb")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(MissingDependencyError, match=rf"{words}: `pip install"):
                build(ChromaFactStore(tmp_path / words, HashEmbedder()), facts_of(50))
    assert not (tmp_path / "needs chromadb").exists()


def test_verify_finds_what_others_damaged_and_repairs_it(tmp_path):
    with ChromaFactStore(tmp_path, HashEmbedder(), bank_size=5) as store:
        build(store, facts_of(30))
    client = a_client(tmp_path)
    collection = client.get_collection("kp-default-facts", embedding_function=None)
    collection.update(ids=collection.get()["ids"][:20], embeddings=HashEmbedder().embed(["x"] * 20))
    collection.delete(ids=collection.get()["ids"][-2:])
    client.close()
    with ChromaFactStore(tmp_path, HashEmbedder(), bank_size=5) as store:
        [wrong] = store.verify()
        assert "have the vector of another text" in wrong
        assert store.verify(repair=True) == [wrong]
        check(store, facts_of(28))


# Servers


@pytest.mark.slow
def test_several_writers_and_readers_on_a_server(emptied):
    with ChromaFactStore(emptied, HashEmbedder(), bank_size=5) as first:
        build(first, facts_of(20))

        def write(name):
            with ChromaFactStore(emptied, HashEmbedder(), bank_size=5) as store:
                for number in range(8):
                    store.add([Fact(f"{name}/{number}")])
                    assert store.search(f"{name}/{number}", 1)[0].fact.text == f"{name}/{number}"
                store.delete([Fact(f"{name}/0").id])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, "abc"))
        facts = [*facts_of(20), *(Fact(f"{name}/{number}") for name in "abc" for number in range(1, 8))]
        assert {fact.text for fact in first.facts()} == {fact.text for fact in facts}
    with ChromaFactStore(emptied, HashEmbedder(), bank_size=5) as store:
        check(store, facts)


def test_a_server_that_is_away_or_slow_is_named(emptied):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(FactError, match="no Chroma server at"):
            ChromaFactStore(address, HashEmbedder())
        deaf.listen()
        with pytest.raises(FactError, match="Timeout"):
            ChromaFactStore(address, HashEmbedder(), timeout_s=0.3)
        with ChromaFactStore(emptied, HashEmbedder(), timeout_s=0.3) as store:
            store.add(facts_of(3))
            # A server that answered before and does not any more.
            store._client._server._api_url = f"{address}/api/v2"
            with pytest.raises(FactError, match="Timeout"):
                store.search("q")
    with pytest.raises(FactError, match=r"nobody|does not exist|not found|tenant"):
        ChromaFactStore(emptied, HashEmbedder(), tenant="nobody")


def test_the_size_of_banks_is_kept_with_the_collection(tmp_path):
    def size(**given):
        with ChromaFactStore(tmp_path, HashEmbedder(), **given) as store:
            return store.bank_size

    with ChromaFactStore(tmp_path, HashEmbedder(), bank_size=5) as store:
        build(store, facts_of(40))
        assert len(store.banks()) >= 4
    assert size() == 5
    assert size(bank_size=7, read_only=True) == 7
    assert size() == 5
    assert size(bank_size=9) == 9
    assert size() == 9
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        check(store, facts_of(40))


class ByLlamaIndex(BaseEmbedding):
    def _get_text_embedding(self, text):
        return (3 * HashEmbedder().embed_query(text)).tolist()

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


@pytest.mark.parametrize("given", [DeterministicFakeEmbedding(size=8), ByLlamaIndex(model_name="llama")])
def test_embeddings_of_other_libraries_are_embedders(tmp_path, given):
    made = as_embedder(given)
    assert made.embed(["a", "b"]).shape == (2, 8)
    with ChromaFactStore(tmp_path, given) as store:
        store.add(facts_of(5))
        assert store.embedder.name in {"llama", "DeterministicFakeEmbedding"}
        assert store.search("fact number 3", 1)[0].score == pytest.approx(1, abs=1e-5)
    with pytest.raises(FactError, match="expected an Embedder"):
        as_embedder("all-MiniLM")


def test_what_left_is_refused_with_what_to_use():
    with pytest.raises(FactError, match=r"gone in 0.3; an adapter delivers"):
        ChromaFactStore.from_collection("theirs", path="theirs")
    with pytest.raises(FactError, match=r"gone in 0.3; `chroma vacuum"):
        ChromaFactStore.vacuum(None)


# kill -9

_CHANGE = """
import sys
import sklearn.cluster
from kp_core.banks import ChromaFactStore, Fact
from tests.kits import HashEmbedder
store = ChromaFactStore(sys.argv[1], HashEmbedder(), bank_size=5)
store.banks()
print("ready", flush=True)
step = 0
while True:
    step += 1
    store.add([Fact(f"{sys.argv[2]}/{step}/{number}") for number in range(3)])
    print("+", f"{sys.argv[2]}/{step}", flush=True)
    if step % 3 == 0:
        gone = next(store.facts())
        store.delete([gone.id])
        print("-", gone.text, flush=True)
    if step % 4 == 0:
        old = next(store.facts())
        store.update(Fact(f"{old.text}'", id=old.id))
        print("*", old.text, flush=True)
    if step % 5 == 0:
        store.rebuild()
"""


def killed(folder, name, after):
    """What a process that changes a store had acknowledged when it was killed."""
    command = [sys.executable, "-c", _CHANGE, str(folder), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout.readline() == "ready\n"
        # On a busy machine it may be a while before there is anything to lose.
        first = process.stdout.readline()
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
        return (first + process.stdout.read()).splitlines()


def expected(texts, said):
    """The texts that a store must hold, after what was acknowledged."""
    for line in said:
        kind, text = line.split(" ", 1)
        if kind == "+":
            texts = texts | {f"{text}/{number}" for number in range(3)}
        else:
            texts = (texts - {text}) | ({f"{text}'"} if kind == "*" else set())
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.nightly)])
def test_what_was_acknowledged_survives_being_killed(tmp_path, kills):
    draw, texts = random.Random(0), set()
    for name in range(kills):
        texts = expected(texts, killed(tmp_path / "facts", str(name), draw.uniform(0.05, 1.0)))
        with ChromaFactStore(tmp_path / "facts", HashEmbedder(), bank_size=5) as store:
            held = {fact.text for fact in store.facts()}
            # At most one change was under way: three facts that came, one that went, or one that changed.
            assert len(texts - held) <= 1
            assert len(held - texts) <= 3
            assert store.verify() == []
            check(store, list(store.facts()))
            texts = held
    assert texts
    assert json.loads((tmp_path / "facts" / "kp.json").read_text())["kind"] == "facts"
    assert Path(tmp_path / "facts" / "chroma.sqlite3").is_file()


_HOLD_FILE = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("BEGIN " + sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(folder, how):
    command = [sys.executable, "-c", _HOLD_FILE, str(folder / "chroma.sqlite3"), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own words
        assert process.stdout.readline() == b"held\n"
        yield
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["EXCLUSIVE", "IMMEDIATE"])
def test_a_database_that_somebody_else_holds_is_said_to_be_locked(how, tmp_path, monkeypatch):
    monkeypatch.setattr("kp_core.banks.chroma._LOCKED_SECONDS", 0.2)
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as facts:
        facts.add([Fact("A gate.")])
        with locked(tmp_path / "facts", how):
            calls = [lambda: facts.add([Fact("Two gates.")]), lambda: facts.delete([fact_id])]
            fact_id = content_id("A gate.")
            calls += [lambda: facts.search("gate")] if how == "EXCLUSIVE" else []
            for call in calls:
                with pytest.raises(FactStoreLockedError, match="is locked"):
                    call()
        assert len(facts) == 1
        facts.add([Fact("Two gates.")])
    with locked(tmp_path / "facts", how), pytest.raises(FactStoreLockedError, match="is locked"):
        ChromaFactStore(tmp_path / "facts", HashEmbedder())


def test_a_folder_that_was_there_becomes_its_owners_alone(tmp_path):
    folder = tmp_path / "facts"
    folder.mkdir(mode=0o755)
    with ChromaFactStore(folder, HashEmbedder()) as facts:
        facts.add([Fact("A gate.")])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_facts_without_a_title_are_found_by_that(tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as store:
        store.add([Fact("The mill turns.", id="bare"), Fact("The bell is cracked.", id="named", title="Bell")])
        for where in ({"title": ""}, {"title": {"$in": ["", "Mill"]}}, {"source": "", "title": {"$ne": "Bell"}}):
            assert [fact.id for fact in store.facts(where=where)] == ["bare"]
            assert [hit.fact.id for hit in store.search("mill", 2, where=where)] == ["bare"]


@pytest.mark.parametrize("step", ["facts", "centroids", "count"])
def test_a_rebuild_that_was_killed_leaves_no_banks_and_they_are_made_anew(tmp_path, monkeypatch, step):
    facts = facts_of(40)
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), bank_size=4) as store:
        build(store, facts[:20])
        before = store.banks()
        store.add(facts[20:30])
        call, count = ChromaFactStore._call, ChromaFactStore._count_banks

        def dies(store, collection, name, **arguments):
            if (step, name) in {("facts", "update"), ("centroids", "upsert")}:
                if name == "update":  # half of it is done
                    half = {part: values[::2] for part, values in arguments.items()}
                    call(store, collection, name, **half)
                raise KeyboardInterrupt
            return call(store, collection, name, **arguments)

        def dies_at_the_end(store, space, banks):
            if banks:
                raise KeyboardInterrupt
            count(store, space, banks)

        with monkeypatch.context() as patch:
            patch.setattr(ChromaFactStore, "_call", dies)
            if step == "count":
                patch.setattr(ChromaFactStore, "_count_banks", dies_at_the_end)
            with pytest.raises(KeyboardInterrupt):
                store.rebuild()
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as store:
        assert store.search(facts[3].text, 1)[0].fact == facts[3]
        with pytest.raises(FactError, match="read_only=True"):
            store.banks()
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), bank_size=4) as store:
        store.add(facts[30:])
        assert store.verify() == []
        check(store, facts)
        assert len(store.banks()) > len(before)
        assert all(len(store.bank_facts(bank)) <= 8 for bank in store.banks())


def test_a_fact_that_another_process_added_while_banks_were_made_joins_one(tmp_path, monkeypatch):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), bank_size=4) as store:
        store.add(facts_of(20))
        count = ChromaFactStore._count_banks

        def meanwhile(store, space, banks):
            if banks:
                store._put(space, [Fact("late")], HashEmbedder().embed(["late"]))
            count(store, space, banks)

        monkeypatch.setattr(ChromaFactStore, "_count_banks", meanwhile)
        store.rebuild()
        check(store, [*facts_of(20), Fact("late")])
        # One that came a moment later is found, and named where banks are asked for.
        store._put("default", [Fact("later")], HashEmbedder().embed(["later"]))
        assert store.search("later", 1)[0].fact.text == "later"
        with pytest.raises(FactError, match=r"stand in no bank.*`rebuild\(\)`"):
            store.bank_of([Fact("later")])
        assert "1 facts stand in none of its" in store.verify()[0]
        store.rebuild()
        check(store, [*facts_of(20), Fact("late"), Fact("later")])


def test_a_collection_of_others_under_the_name_of_banks_is_refused_and_untouched(tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), bank_size=4) as store:
        store.add(facts_of(20))
        store._client.create_collection("kp-default-banks", embedding_function=None).add(ids=["1"], embeddings=[[1.0]])
    before = contents(tmp_path / "facts")["kp-default-banks"]
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), bank_size=4) as store:
        with pytest.raises(FactError, match="lacks our marker"):
            store.banks()
        assert len(store.search("q", 4)) == 4
    assert contents(tmp_path / "facts")["kp-default-banks"] == before


def test_filters_may_have_numbers_without_end(tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as store:
        store.add([Fact("fact", metadata={"size": 2.0})])
        for where, count in (({"size": float("inf")}, 0), ({"size": {"$lt": float("inf")}}, 1)):
            assert len(list(store.facts(where=where))) == count
            assert len(store.search("fact", 2, where=where)) == count


def test_a_bank_that_the_index_lost_is_found(tmp_path, monkeypatch):
    """After vectors were replaced, one query in a hundred misses one of them, at random; here each does."""
    store, centroids = ChromaFactStore(tmp_path, HashEmbedder()), normalised(np.eye(8)[::-1] + 0.1)
    store.add([Fact("a")])
    store._set_banks("default", {Fact("a").id: 0}, centroids)
    call, question = store._call, normalised([[8, 7, 6, 5, 4, 3, 2, 1]])
    [expected] = store._nearest_banks("default", question, 8)
    assert [number for number, _ in expected] == [7, 6, 5, 4, 3, 2, 1, 0]

    def losing(collection, method, **options):
        answer = call(collection, method, **options)
        if method == "query":
            answer |= {name: [answer[name][0][1:]] for name in ("ids", "distances")}
        return answer

    monkeypatch.setattr(store, "_call", losing)
    for count in (3, 8):
        [near] = store._nearest_banks("default", question, count)
        assert [number for number, _ in near] == [number for number, _ in expected[:count]]
        assert [cosine for _, cosine in near] == pytest.approx([cosine for _, cosine in expected[:count]])


@pytest.mark.parametrize("where", [None, {"kind": "even"}])
def test_facts_that_the_index_lost_are_found(tmp_path, monkeypatch, where):
    """As centroids above: an index whose vectors were replaced reached 97 of 150 facts once."""
    with ChromaFactStore(tmp_path, HashEmbedder()) as store:
        store.add([Fact(f"fact {n}", metadata={"kind": "odd" if n % 2 else "even"}) for n in range(20)])
        expected = store.search("fact 4", 30, where=where)
        assert len(expected) == (20 if where is None else 10)
        call = store._call

        def losing(collection, method, **options):
            answer = call(collection, method, **options)
            if method == "query":
                answer |= {name: [answer[name][0][1::2]] for name in ("ids", "documents", "metadatas", "distances")}
            return answer

        monkeypatch.setattr(store, "_call", losing)
        found = store.search("fact 4", 30, where=where)
        assert {hit.fact.id for hit in found} == {hit.fact.id for hit in expected}
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        assert found[0].fact == expected[0].fact
