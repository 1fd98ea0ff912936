"""Chroma's index files: what a killed writer left half written is made anew from the texts, and never loaded."""

import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import chromadb
import numpy as np
import pytest
from chromadb.config import Settings

from kp_core.errors import BankError
from kp_core.facts import ChromaFactStore, Fact
from kp_core.facts import folder as folders
from kp_core.facts.folder import interrupted
from kp_core.facts.records import QueriedCollection
from tests.core.facts.test_facts import HashEmbedder

FACTS = [Fact(f"Fact {number} of the harbour log.") for number in range(2500)]
KEPT = [fact for number, fact in enumerate(FACTS) if number % 10]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of so many facts that Chroma has written its index, with a hole where facts were deleted."""
    path = tmp_path_factory.mktemp("written") / "facts"
    with ChromaFactStore(path, HashEmbedder(), near_duplicate=None) as store:
        store.build(FACTS)
        store.delete(fact.id for fact in FACTS[::10])
    assert file_of(path, "link_lists").stat().st_size > 4 * len(FACTS) // 2
    assert not (path / "kp.writing").exists()
    return path


@pytest.fixture
def path(written, tmp_path):
    return shutil.copytree(written, tmp_path / "facts")


def indexed(path):
    """The folder of the index of the facts; that of the banks is smaller."""
    return max(path.glob("*-*-*-*-*/data_level0.bin"), key=lambda file: file.stat().st_size).parent


def file_of(path, name):
    """The file of this name of the index of the facts."""
    [file] = indexed(path).glob(f"{name}.*")
    return file


def cut_short(path, name):
    """Leave three quarters of a file, as a process does that is killed while it writes it."""
    file = file_of(path, name)
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 4])


def inodes(path):
    return {file: file.stat().st_ino for file in path.glob("*-*-*-*-*/*")}


def check(path, embedder=None):
    """Each fact is there, found by its own text, and `verify` has nothing to say."""
    with ChromaFactStore(path, embedder or HashEmbedder(), near_duplicate=None) as store:
        assert {fact.text for fact in store.facts()} == {fact.text for fact in KEPT}
        for fact in random.Random(1).sample(KEPT, 40):
            assert store.search(fact.text, 1)[0].fact.text == fact.text
            assert store.search(fact.text, 1, probes=1)[0].fact.text == fact.text
        assert not store.verify()
    assert not (path / "kp.writing").exists()


@pytest.mark.parametrize("noted", [False, True])
def test_an_index_that_nobody_was_writing_is_left_alone(path, noted):
    if noted:  # A process was killed before Chroma wrote an index.
        (path / "kp.writing").touch()
    before, embedder = inodes(path), HashEmbedder()
    check(path, embedder)
    assert before.items() <= inodes(path).items()
    assert embedder.embedded < len(KEPT)


@pytest.mark.parametrize("name", ["header", "data_level0", "length", "link_lists", "index_metadata"])
def test_an_index_that_a_killed_process_was_writing_is_made_anew(path, name):
    (path / "kp.writing").touch()
    cut_short(path, name)
    assert set(interrupted(path)) == {indexed(path)}
    check(path)


_ADD = """
import sys
from kp_core.facts import ChromaFactStore, Fact
from tests.core.facts.test_facts import HashEmbedder
with ChromaFactStore(sys.argv[1], HashEmbedder(), near_duplicate=None) as store:
    print("ready", flush=True)
    for number in range(1000):
        store.add(Fact(f"{sys.argv[2]}/{number}/{part}") for part in range(500))
        print(number, flush=True)
"""


def test_a_process_that_is_killed_as_its_index_changes_loses_nothing(path):
    held = {fact.text for fact in KEPT}
    for kill in "ab":
        file, wait = file_of(path, "data_level0"), random.Random(kill).uniform(0, 0.02)
        before = file.stat().st_mtime_ns
        command = [sys.executable, "-c", _ADD, str(path), kill]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
            assert process.stdout.readline() == "ready\n"
            while file.stat().st_mtime_ns == before:
                pass
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
            done = [int(line) for line in process.stdout.read().split()]
        held |= {f"{kill}/{number}/{part}" for number in done for part in range(500)}
        with ChromaFactStore(path, HashEmbedder(), near_duplicate=None) as store:
            found = {fact.text for fact in store.facts()}
            assert held <= found
            assert len(found - held) in {0, 500}
            for text in random.Random(kill).sample(sorted(found), 40):
                assert store.search(text, 1)[0].fact.text == text
            assert not store.verify()
            held = found


def test_a_repair_that_was_killed_is_taken_up(path, monkeypatch):
    (path / "kp.writing").touch()
    cut_short(path, "data_level0")

    class Dies(HashEmbedder):
        def embed(self, texts):
            if self.embedded > 1000:
                raise KeyboardInterrupt
            return super().embed(texts)

    with pytest.raises(KeyboardInterrupt):
        ChromaFactStore(path, Dies())
    assert (path / "kp.writing").read_text() == "default"
    monkeypatch.setattr(folders, "_WRITTEN_SECONDS", 0.1)
    with pytest.raises(BankError, match="an index is damaged"):
        ChromaFactStore(path, HashEmbedder(), read_only=True)
    check(path)


def test_a_reader_waits_for_a_writer(path, monkeypatch):
    (path / "kp.writing").touch()
    file_of(path, "header").touch()
    ending = threading.Timer(0.3, (path / "kp.writing").unlink)
    ending.start()
    with ChromaFactStore(path, HashEmbedder(), read_only=True) as store:
        assert not ending.is_alive()
        assert store.search(KEPT[0].text, 1)[0].fact.text == KEPT[0].text
    ending.join()


@pytest.mark.parametrize("after_writing", [False, True])
def test_a_write_that_fails_leaves_a_note_only_if_it_wrote_an_index(path, monkeypatch, after_writing):
    call = QueriedCollection.call

    def fails(collection, name, **arguments):
        if name == "upsert":
            if after_writing:
                call(collection, name, **arguments)
            raise OSError("No space left on device")
        return call(collection, name, **arguments)

    embedder = HashEmbedder()
    with ChromaFactStore(path, embedder, near_duplicate=None) as store, monkeypatch.context() as patch:
        patch.setattr(QueriedCollection, "call", fails)
        with pytest.raises(BankError, match="No space left"):
            store.add([Fact(f"new {number}") for number in range(1200)])
        assert (path / "kp.writing").exists() == after_writing == bool(interrupted(path))
    with ChromaFactStore(path, embedder, near_duplicate=None) as store:
        assert {fact.text for fact in KEPT} <= {fact.text for fact in store.facts()}
        assert not store.verify()
    assert (embedder.embedded > len(KEPT)) == after_writing


def test_what_others_wrote_meanwhile_is_not_deleted(path):
    client = chromadb.PersistentClient(str(path), settings=Settings(anonymized_telemetry=False))
    theirs = client.create_collection("theirs", embedding_function=None)
    (path / "kp.writing").touch()
    theirs.add(ids=[str(n) for n in range(1500)], embeddings=np.eye(8, dtype=np.float32)[np.arange(1500) % 8])
    client.close()
    before = inodes(path)
    check(path)
    assert before.items() <= inodes(path).items()


@pytest.mark.parametrize("name", ["data_level0", "index_metadata"])
def test_a_damaged_index_is_refused_with_the_command_that_makes_it_anew(path, name):
    cut_short(path, name)
    with ChromaFactStore(path, HashEmbedder(), near_duplicate=None) as store:
        for call in (lambda: [store.search(fact.text) for fact in KEPT], store.verify):
            with pytest.raises(BankError, match="`kp verify FOLDER --repair`"):
                call()
    assert not (path / "kp.writing").exists()
    # It is made anew here, or, where Chroma cannot read it at all, when the folder is opened next.
    with ChromaFactStore(path, HashEmbedder(), near_duplicate=None) as store, suppress(BankError):
        store.verify(repair=True)
    check(path)
