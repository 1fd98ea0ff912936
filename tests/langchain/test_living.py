"""Documents that come, change and go: as a `DocumentIndex`, and under LangChain's `index()`."""

import logging

import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_tests.integration_tests.indexer import AsyncDocumentIndexTestSuite, DocumentIndexerTestSuite

from kp_core import ChromaFactStore, MemoryFactStore, PackStore
from kp_core.errors import FactError, OptionError
from kp_langchain import KnowledgePackRetriever
from tests.conftest import tiny_engine

EMBEDDINGS = DeterministicFakeEmbedding(size=32)


@pytest.fixture
def shelf(tmp_path):
    return PackStore(tmp_path / "packs")


def parts(shelf):
    return {"engine": tiny_engine(), "store": shelf, "namespace": "isles", "kv": "lazy"}


@pytest.fixture
def living(shelf, tmp_path):
    with ChromaFactStore(tmp_path / "facts", EMBEDDINGS) as facts:
        yield KnowledgePackRetriever(fact_store=facts, **parts(shelf))


@pytest.fixture
def wrapped(shelf, tmp_path):
    collection = Chroma("chunks", EMBEDDINGS, str(tmp_path / "chroma"))
    return KnowledgePackRetriever.from_retriever(collection.as_retriever(), **parts(shelf), precompile="now")


class TestDocumentIndex(DocumentIndexerTestSuite):
    @pytest.fixture
    def index(self, living):
        return living


class TestAsyncDocumentIndex(AsyncDocumentIndexTestSuite):
    @pytest.fixture
    def index(self, living):
        return living


def texts(retriever):
    """All texts that it finds, each with its pack."""
    found = retriever.invoke("anything", k=50)
    assert all(document.metadata["kp"]["handle"] for document in found)
    return sorted({document.page_content for document in found})


def packed(shelf):
    return sorted(shelf.get(handle).text for handle in shelf)


def said(source, *lines):
    return [Document(line, metadata={"source": source, "page": number}) for number, line in enumerate(lines)]


@pytest.mark.parametrize("kind", ["living", "wrapped"])
@pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full"])
def test_what_is_indexed_again_leaves_nothing_stale(kind, cleanup, request, shelf):
    retriever = request.getfixturevalue(kind)
    records = InMemoryRecordManager("chunks")
    records.create_schema()

    def run(*documents):
        settings = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "blake2b"}
        if kind == "living":
            return index([*documents], records, retriever, **settings)
        report = index([*documents], records, retriever.retriever.vectorstore, **settings)
        retriever.sync()
        return report

    other = said("b.md", "The mill grinds.", "Blank page.")
    assert run(*said("a.md", "The ferry leaves at dawn.", "Blank page."), *other)["num_added"] == 4
    assert texts(retriever) == packed(shelf) == ["Blank page.", "The ferry leaves at dawn.", "The mill grinds."]
    assert run(*said("a.md", "The ferry leaves at dawn.", "Blank page."), *other)["num_skipped"] == 4

    changed = run(*said("a.md", "The ferry leaves at noon.", "Blank page."), *other)
    assert (changed["num_added"], changed["num_deleted"]) == (1, 1)
    assert "The ferry leaves at noon." in texts(retriever)
    assert packed(shelf) == ["Blank page.", "The ferry leaves at noon.", "The mill grinds."]

    # One of two documents that share a text lets go of it, and the other moves its own to another page.
    run(*said("a.md", "The ferry leaves at noon."), *said("b.md", "Blank page.", "The mill grinds."))
    assert texts(retriever) == packed(shelf) == ["Blank page.", "The ferry leaves at noon.", "The mill grinds."]


def test_documents_are_deleted_by_id_filter_and_source(living, shelf):
    living.upsert([Document(f"Line {n}.", id=str(n), metadata={"source": f"{n % 3}.md", "n": n}) for n in range(9)])
    assert living.delete(["0", "none"])["succeeded"] == ["0"]
    assert living.delete(where={"n": {"$gte": 7}})["num_deleted"] == 2
    assert living.delete(source="2.md")["succeeded"] == ["2", "5"]
    assert texts(living) == packed(shelf) == ["Line 1.", "Line 3.", "Line 4.", "Line 6."]
    with pytest.raises(FactError, match="nothing to delete by"):
        living.delete()
    with pytest.raises(OptionError, match="'source'"):
        living.delete(sorce="2.md")


def test_a_document_is_edited_and_found_by_its_new_handle(living, shelf):
    living = living.model_copy(update={"kv": "stored"})
    [name] = living.upsert([Document("The ferry leaves at dawn. " + "It is red. " * 40, metadata={"page": 3})])[
        "succeeded"
    ]
    [before] = living.invoke("ferry")
    made = living.edit(name, "dawn", "noon")
    [found] = living.invoke("ferry")
    assert (found.id, found.page_content, found.metadata["page"]) == (name, made.page_content, 3)
    assert "leaves at noon" in found.page_content
    assert found.metadata["handle"] != before.metadata["handle"]
    assert packed(shelf) == sorted([before.page_content, found.page_content])


def test_documents_come_back_as_they_were_put(living):
    about = {"tags": ["a", 1, None], "none": None, "deep": {"x": [1.5]}, "source": "a.md", "title": 7, "score": "mine"}
    given = [Document("The mill.", id="m/1 ä", metadata=about), Document("The ferry.", metadata={})]
    ids = living.upsert(given)["succeeded"]
    assert ids[0] == "m/1 ä"
    assert [(each.page_content, each.id, each.metadata) for each in living.get(ids)] == [
        ("The mill.", "m/1 ä", about),
        ("The ferry.", ids[1], {}),
    ]
    [found] = [each for each in living.invoke("mill") if each.id == ids[0]]
    assert {name: value for name, value in found.metadata.items() if name not in {"kp", "handle", "text"}} == about


def test_blank_documents_are_left_out(living, caplog):
    with caplog.at_level(logging.WARNING, "kp_langchain"):
        response = living.upsert([Document(" ", id="a"), Document("The mill.", id="b")])
    assert response == {"succeeded": ["b"], "failed": ["a"]}
    assert "1 of 2 documents are blank" in caplog.text


def test_the_same_documents_again_cost_nothing(shelf, monkeypatch):
    facts = MemoryFactStore(EMBEDDINGS)
    given = [Document(f"Line {number}.", id=str(number), metadata={"n": [number]}) for number in range(5)]
    settings = {"fact_store": facts, "engine": tiny_engine(), "store": shelf, "progress": False}
    KnowledgePackRetriever.from_documents(given, **settings)
    monkeypatch.setattr(facts.embedder, "embed", lambda _: pytest.fail("embedded again"))
    monkeypatch.setattr(shelf, "put", lambda _: pytest.fail("compiled again"))
    again = KnowledgePackRetriever.from_documents(given, **settings)
    assert len(again.invoke("line", k=9)) == 5


def test_equal_paragraphs_of_two_documents_are_two_facts(shelf):
    two = [Document("Return the key before nine.", metadata={"source": name}) for name in ("a.md", "b.md")]
    facts = MemoryFactStore(EMBEDDINGS)
    retriever = KnowledgePackRetriever.from_documents(two, fact_store=facts, progress=False, **parts(shelf))
    retriever.upsert(two)
    assert [fact.source for fact in facts.facts()] == ["a.md", "b.md"]
    assert len(retriever.invoke("key")) == 1
    assert retriever.delete(source="b.md")["num_deleted"] == 1
    [left] = retriever.invoke("key")
    assert (left.page_content, left.metadata["source"]) == (two[0].page_content, "a.md")
    assert len(list(shelf)) == 1


@pytest.mark.parametrize("cleanup", ["incremental", "full"])
def test_an_indexed_document_leaves_the_equal_text_of_another(living, shelf, cleanup):
    two = [Document("Return the key before nine.", metadata={"source": name}) for name in ("a.md", "b.md")]
    records = InMemoryRecordManager("isles")
    records.create_schema()
    settings = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
    assert index(two, records, living, **settings)["num_added"] == 2
    assert index(two, records, living, **settings)["num_skipped"] == 2
    changed = Document("Return it at ten.", metadata={"source": "a.md"})
    assert index([changed, two[1]], records, living, **settings)["num_deleted"] == 1
    found = {document.page_content: document.metadata["source"] for document in living.invoke("key")}
    assert found == {"Return it at ten.": "a.md", two[1].page_content: "b.md"}
    assert len(list(shelf)) == 2
