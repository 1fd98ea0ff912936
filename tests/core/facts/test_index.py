"""What a killed writer or a bad disk left of Chroma's index: it is made anew from the texts, and never loaded."""

import random
import shutil

import pytest

from kp_core.errors import FactError
from kp_core.facts import ChromaFactStore, Fact
from kp_core.facts.index import damaged_indexes, repair_mark
from tests.core.facts.test_facts import build
from tests.kits import HashEmbedder

FACTS = [Fact(f"Fact {number} of the harbour log.") for number in range(2500)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of so many facts that Chroma has written its index, with a hole where facts were deleted."""
    path = tmp_path_factory.mktemp("written") / "facts"
    with ChromaFactStore(path, HashEmbedder()) as store:
        build(store, FACTS)
        store.delete(fact.id for fact in FACTS[::10])
    assert any(file.stat().st_size > 4 * len(FACTS) // 2 for file in path.glob("*-*-*-*-*/link_lists.bin"))
    return path


@pytest.fixture
def path(written, tmp_path):
    return shutil.copytree(written, tmp_path / "facts")


def check(path):
    """Each fact is there, found by its own text, and `verify` has nothing to say."""
    with ChromaFactStore(path, HashEmbedder()) as store:
        kept = [fact for number, fact in enumerate(FACTS) if number % 10]
        assert {fact.text for fact in store.facts()} == {fact.text for fact in kept}
        for fact in random.Random(1).sample(kept, 40):
            assert store.search(fact.text, 1)[0].fact.text == fact.text
            assert store.search(fact.text, 1, probes=1)[0].fact.text == fact.text
        assert not store.verify()
    assert not repair_mark(path).exists()
    assert not damaged_indexes(path)


def test_a_sound_index_is_left_alone(path):
    before = {file: file.stat().st_ino for file in path.glob("*-*-*-*-*/*")}
    assert not damaged_indexes(path)
    check(path)
    assert before.items() <= {file: file.stat().st_ino for file in path.glob("*-*-*-*-*/*")}.items()


@pytest.mark.parametrize(
    "name",
    [
        "data_level0",
        "index_metadata",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("header", "length", "link_lists")),
    ],
)
def test_an_index_that_a_killed_process_was_writing_is_made_anew(path, name):
    file = max(path.glob(f"*-*-*-*-*/{name}.*"), key=lambda file: file.stat().st_size)
    held = file.read_bytes()
    file.write_bytes(held[: len(held) * 3 // 4])
    check(path)


@pytest.mark.slow
def test_a_repair_that_was_killed_is_taken_up(path, monkeypatch):
    file = max(path.glob("*-*-*-*-*/data_level0.bin"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])

    class Dies(HashEmbedder):
        def embed(self, texts):
            if repair_mark(path).exists():
                raise KeyboardInterrupt
            return super().embed(texts)

    with pytest.raises(KeyboardInterrupt):
        ChromaFactStore(path, Dies())
    assert repair_mark(path).exists()
    monkeypatch.setattr("kp_core.facts.index._WRITTEN_SECONDS", 0.1)
    with pytest.raises(FactError, match="an index is damaged"):
        ChromaFactStore(path, HashEmbedder(), read_only=True)
    check(path)


def test_an_index_of_another_version_is_left_alone(path):
    for file in path.glob("*-*-*-*-*/header.bin"):
        file.write_bytes((2).to_bytes(4, "little") + file.read_bytes()[4:])
    assert not damaged_indexes(path)


def test_a_flipped_bit_ends_nothing_and_hides_nothing(path):
    draw, tries = random.Random(7), 0
    for name in ("header", "data_level0", "link_lists"):
        file = max(path.glob(f"*-*-*-*-*/{name}.bin"), key=lambda file: file.stat().st_size)
        held = file.read_bytes()
        for _ in range(200):
            at, bit = draw.randrange(len(held)), draw.randrange(8)
            file.write_bytes(held[:at] + bytes([held[at] ^ 1 << bit]) + held[at + 1 :])
            tries += not damaged_indexes(path)
        file.write_bytes(held)
    check(path)
    # What is let through are bits of a vector that do not change its length by a thousandth, links to another fact, and
    # settings of how an index grows: none of them leaves the files.
    assert tries
