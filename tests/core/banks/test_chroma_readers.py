"""Facts of any id, and a reader of a folder that another process changes."""

import inspect
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kp_core import PackStore
from kp_core.banks import ChromaFactStore, Fact
from kp_core.banks.delivery import Delivery
from kp_core.errors import FactError
from kp_langchain import KnowledgePackRetriever as LangChainRetriever
from kp_llamaindex import KnowledgePackRetriever as LlamaIndexRetriever
from tests.conftest import tiny_engine
from tests.kits import HashEmbedder

_OTHER = """
import json, shutil, sqlite3, sys
from pathlib import Path
from collections.abc import Sequence
import hashlib
import numpy as np
from numpy.typing import NDArray
from kp_core.banks import ChromaFactStore, Fact
for line in sys.stdin:
    folder, steps = json.loads(line)
    for step in steps:
        with ChromaFactStore(folder, HashEmbedder(), **({"bank_size": 5} if step == "rebank" else {})) as store:
            facts = list(store.facts())
            exec(step if step != "rebank" else "store.rebuild()")
    with ChromaFactStore(folder, HashEmbedder()) as store:
        print(json.dumps([[fact.namespace, fact.id, fact.text, fact.version] for fact in store.facts()]), flush=True)
"""


@pytest.fixture(scope="module")
def other():
    """Another process that changes a folder in steps and says what it holds then."""
    # The embedder as its source, because importing all kits takes seconds.
    imports, loop = _OTHER.split("for line", 1)
    command = [sys.executable, "-c", f"{imports}{inspect.getsource(HashEmbedder)}\nfor line{loop}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603

        def changed(folder, *steps):
            process.stdin.write(json.dumps([str(folder), steps]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield changed
        process.stdin.close()


def old(count=24):
    return [Fact(f"old {number}", id=f"id {number}", metadata={"n": number}) for number in range(count)]


def check(store, expected):
    """The reader has exactly these facts, and finds each of a sample first and all in one search."""
    found = [[fact.namespace, fact.id, fact.text, fact.version] for fact in store.facts()]
    assert found == expected
    assert len(store) == len(expected)
    assert store.namespaces() == tuple(sorted({space for space, *_ in expected}))
    if not expected:
        with pytest.raises(FactError, match="no facts yet"):
            store.search("old 3")
        return
    for space, fact_id, text, _ in expected[:: max(1, len(expected) // 4)]:
        assert store.get(fact_id, namespace=space).text == text
        assert text in [hit.fact.text for hit in store.search(text, 1)]
        assert [hit.fact.id for hit in store.search(text, 1, namespace=space, where={"id": fact_id})] == [fact_id]
    assert sorted(hit.fact.id for hit in store.search("old 3", 9999)) == sorted(row[1] for row in expected)


CHANGES = {
    "add": ["store.add([Fact('new')])"],
    "add many": ["store.add([Fact(f'new {n}') for n in range(150)])"],
    "delete one": ["store.delete(['id 3'])"],
    "delete all": ["store.delete([fact.id for fact in facts])"],
    "rebuilt with other facts": [
        "store.delete([f.id for f in facts])",
        "store.add([Fact(f'new {n}') for n in range(150)])",
    ],
    "rebuilt with the same ids": [
        "store.delete([f.id for f in facts]); store.add([Fact(f'new {n}', id=f'id {n}') for n in range(24)])"
    ],
    "rebuilt twice": ["store.delete([f.id for f in facts]); store.add([Fact(f'{len(facts)} {n}') for n in range(60)])"]
    * 2,
    "update": ["store.update(Fact('newer', id='id 3'))"],
    "many updated": ["[store.update(Fact(f'newer {n}', id=f'id {n}')) for n in range(9)]"],
    "overwrite": ["store.add([Fact('newer', id='id 5', title='t')], overwrite=True)"],
    "expired": ["store.add([Fact('short', expires=1)])", "store.add([Fact('long', expires=9e9)])"],
    "banks": ["store.rebuild()"],
    "smaller banks": ["rebank"],
    "banks and facts": ["store.rebuild()", "store.add([Fact('late')])", "store.rebuild()"],
    "a namespace": ["store.add([Fact('elsewhere', namespace='new')])"],
    "only a namespace": [
        "store.add([Fact('elsewhere', namespace='a'), Fact('b', namespace='b')])",
        "store.delete([f.id for f in facts if f.namespace != 'a'])",
    ],
    "repaired": ["store.verify(repair=True)"],
    "vacuumed": [
        "store.delete([f.id for f in facts[5:]])",
        "sqlite3.connect(Path(folder, 'chroma.sqlite3')).execute('VACUUM')",
    ],
    "touched by Chroma": [
        "store._client.get_or_create_collection('not', embedding_function=None).upsert(ids=['1'], embeddings=[[1.0]])"
    ],
    "odd ids": [
        "store.add([Fact(f'odd {n}', id=odd) for n, odd in enumerate('\\n \\t \\u200b \\u00a0 \\x00a'.split(' '))])"
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_sees_what_another_process_changed(change, other, tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as store:
        store.add(old())
    with (
        ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as reader,
        ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as beside,
    ):
        assert reader.search("old 3", 1)[0].fact.id == "id 3"  # Its index is in memory.
        client = reader._client
        assert len(reader.search("old 4", 5)) == 5
        assert reader._client is client  # Nothing has changed.
        for _ in range(2):
            expected = other(tmp_path / "facts", *CHANGES[change])
            check(reader, expected)
        check(beside, expected)


def remade(folder, other, *steps):
    """The folder is removed, and made anew under its name."""
    shutil.rmtree(folder)
    return other(folder, *steps)


def replaced(folder, other, *steps):
    """Another folder takes its place."""
    expected = other(folder.with_name("anew"), *steps)
    folder.rename(folder.with_name("former"))
    folder.with_name("anew").rename(folder)
    return expected


def copied_back(folder, other, *steps):
    """The folder is restored from a copy of it that was changed."""
    shutil.copytree(folder, folder.with_name("copy"), ignore=shutil.ignore_patterns("kp.lock"))
    expected = other(folder.with_name("copy"), *steps)
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    return expected


@pytest.mark.parametrize("steps", [["store.add([Fact('new')])"], ["store.add([Fact('a', namespace='n')])"]])
@pytest.mark.parametrize("how", [remade, replaced, copied_back])
def test_a_reader_sees_a_folder_that_was_put_in_its_place(how, steps, other, tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as store:
        store.add(old())
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as reader:
        assert reader.search("old 3", 1)[0].fact.id == "id 3"
        check(reader, how(tmp_path / "facts", other, *steps))


def test_a_reader_of_an_empty_folder_sees_the_first_facts(other, tmp_path):
    ChromaFactStore(tmp_path / "facts", HashEmbedder()).close()
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as reader:
        check(reader, [])
        check(reader, other(tmp_path / "facts", "store.add([Fact('new')])"))
        check(reader, other(tmp_path / "facts", "store.delete([fact.id for fact in facts])"))
        check(reader, other(tmp_path / "facts", "store.add([Fact('newer')])"))


def test_a_reader_of_another_directory_sees_it_too(other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ChromaFactStore("facts", HashEmbedder()) as store:
        store.add(old())
    with ChromaFactStore(tmp_path / "." / "facts", HashEmbedder(), read_only=True) as reader:
        check(reader, other(tmp_path / "facts", "store.delete(['id 3'])"))


def test_threads_that_read_at_once_see_what_another_process_changed(other, tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as store:
        store.add(old())
    with (
        ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as reader,
        ThreadPoolExecutor(4) as threads,
    ):
        for number in range(3):
            expected = other(tmp_path / "facts", f"store.delete(['id {number}']); store.add([Fact('new {number}')])")
            for hits in threads.map(lambda at: reader.search(f"old {at}", 99), range(12)):
                assert {hit.fact.id for hit in hits} == {row[1] for row in expected}
            check(reader, expected)


@pytest.mark.parametrize("k", [1, 3, 24, 99])
def test_what_is_deleted_while_a_reader_searches_is_not_found(k, other, tmp_path, monkeypatch):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as store:
        store.add(old())
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as reader:
        assert reader.search("old 3", 1)[0].fact.id == "id 3"
        monkeypatch.setattr(reader, "_version", None)  # It has looked just before.
        left = other(tmp_path / "facts", "store.delete(['id 3', 'id 5'])")
        hits = reader.search("old 3", k)
        assert len(hits) == min(k, 22)
        assert {hit.fact.id for hit in hits} <= {row[1] for row in left}


def test_retrievers_deliver_what_another_process_wrote(other, tmp_path):
    with ChromaFactStore(tmp_path / "facts", HashEmbedder()) as store:
        store.add(old())
    packs = PackStore(tmp_path / "packs")
    with ChromaFactStore(tmp_path / "facts", HashEmbedder(), read_only=True) as reader:
        chain = LangChainRetriever(fact_store=reader, store=packs, engine=tiny_engine())
        nodes = LlamaIndexRetriever(reader, store=packs, engine=tiny_engine())
        delivery = Delivery(reader, tiny_engine(), packs)

        def found(question):
            return (
                chain.invoke(question, k=1)[0].metadata["kp"]["id"],
                nodes.retrieve(question)[0].node_id,
                delivery.search(question, 1)[0].hit.fact.id,
            )

        assert found("old 3") == ("id 3",) * 3
        other(tmp_path / "facts", "store.delete([fact.id for fact in facts]); store.add([Fact('old 3', id='anew')])")
        assert found("old 3") == ("anew",) * 3
