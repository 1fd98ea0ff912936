"""`KnowledgePackRetriever`: building packs, finding them, and doing without."""

import logging

import pytest

from kp_core import Fact, MemoryFactBank, PackStore, find_handles
from kp_core.errors import BankError
from kp_langchain import KnowledgePackRetriever
from tests.conftest import tiny_engine


@pytest.fixture
def shelf(tmp_path):
    return PackStore(tmp_path / "shelf")


class Counting:
    """An engine that counts what it compiles, and may break off."""

    def __init__(self, engine, breaks_after=None):
        self.engine, self.breaks_after, self.built = engine, breaks_after, []

    def build_packs(self, texts, *, lazy=False, **settings):
        for pack in self.engine.build_packs(texts, lazy=lazy, **settings):
            if not lazy:
                if len(self.built) == self.breaks_after:
                    raise KeyboardInterrupt
                self.built.append(pack.text)
            yield pack


def made(facts, shelf, embedder, engine=None, **settings):
    settings = {"k": 2, "progress": False, **settings}
    return KnowledgePackRetriever.from_facts(
        facts, engine=engine or tiny_engine(), store=shelf, bank=MemoryFactBank(embedder), **settings
    )


def test_a_document(facts, shelf, embedder):
    fact = Fact("The mill has four sails.", title="Mill", source="book", metadata={"page": "7"}, id="f1")
    [document] = made([fact], shelf, embedder, k=1).invoke("How many sails?")
    [(_, stop, handle)] = find_handles(document.page_content)
    assert stop == len(document.page_content)
    assert document.id == "f1"
    about = dict(document.metadata)
    assert 0 < about.pop("score") <= 1
    assert about == {
        "text": fact.text,
        "handle": document.page_content,
        "title": "Mill",
        "source": "book",
        "bank": 0,
        "page": "7",
    }
    pack = shelf.get(handle)
    assert (pack.text, pack.provenance["title"], pack.provenance["source"]) == (fact.text, "Mill", "book")
    assert not pack.is_lazy


def test_building_goes_on_where_it_stopped_and_then_costs_nothing(facts, shelf, embedder):
    facts = facts[:6]
    first = Counting(tiny_engine(), breaks_after=2)
    with pytest.raises(KeyboardInterrupt):
        made(facts, shelf, embedder, first)
    second, third = Counting(tiny_engine()), Counting(tiny_engine())
    made(facts, shelf, embedder, second)
    made(facts, shelf, embedder, third)
    assert first.built + second.built == [fact.text for fact in facts]
    assert third.built == []


@pytest.mark.parametrize("changed", ["place", "model", "kv"])
def test_packs_of_another_place_or_model_are_compiled_anew(changed, facts, shelf, embedder):
    facts = facts[:2]
    made(facts, shelf, embedder, lazy=changed == "kv")
    engine = Counting(tiny_engine("qwen2") if changed == "model" else tiny_engine())
    compiled_for = [{"role": "user", "content": "Know: {pack}"}] if changed == "place" else "user"
    made(facts, shelf, embedder, engine, compiled_for=compiled_for)
    assert len(engine.built) == 2


def test_lazy_packs(facts, shelf, embedder):
    retriever = made(facts[:3], shelf, embedder, lazy=True)
    assert all(shelf.get(find_handles(document.page_content)[0][2]).is_lazy for document in retriever.invoke("flag"))


def test_memory_packs_have_the_handle_of_their_own_text(facts, shelf, embedder):
    retriever = made(facts[:3], shelf, embedder, compiled_for="system")
    for document in retriever.invoke("flag"):
        [(_, _, handle)] = find_handles(document.page_content)
        assert shelf.get(handle).text == document.metadata["text"] + "\n"


def test_a_fact_without_a_pack_comes_as_text(facts, shelf, embedder, caplog):
    retriever = made(facts[:2], shelf, embedder)
    shelf.remove(shelf.handle(facts[0].text, "default"))
    with caplog.at_level(logging.WARNING, "kp_langchain"):
        documents = {document.id: document for document in retriever.invoke(facts[0].text)}
    assert documents[facts[0].id].page_content == facts[0].text
    assert documents[facts[0].id].metadata["handle"] is None
    assert find_handles(documents[facts[1].id].page_content)
    assert f"no pack of fact {facts[0].id}" in caplog.text


def test_a_text_twice_is_one_pack(facts, shelf, embedder):
    twins = [Fact("The mill has four sails.", id="a"), Fact("The mill has four sails.", id="b")]
    made(twins, shelf, embedder, k=1)
    assert len(shelf) == 1


def test_whole_banks_as_packs(facts, shelf, embedder):
    retriever = made(facts, shelf, embedder, unit="bank", k=1, probes=1)
    assert len(shelf) == retriever.bank.banks == 2
    for question in ("What bird is on the flag?", "Where do ships go?"):
        [document] = retriever.invoke(question)
        bank = retriever.bank.bank_facts(document.metadata["bank"])
        assert document.metadata["bank"] == retriever.bank.route(question)
        assert document.metadata["text"] == "\n".join(fact.text for fact in bank)
        assert document.metadata["facts"].split() == [fact.id for fact in bank]
        assert find_handles(document.page_content)
    assert {document.metadata["bank"] for document in retriever.invoke("flag", k=5)} == {0, 1}


def test_k_and_probes_of_one_call(facts, shelf, embedder):
    retriever = made(facts, shelf, embedder, lazy=True)
    asked = retriever.invoke("flag", k=5, probes=2)
    assert [document.id for document in asked] == [hit.fact.id for hit in retriever.bank.search("flag", 5, probes=2)]


async def test_async_equals_sync(retriever):
    assert await retriever.ainvoke("flag") == retriever.invoke("flag")
    assert await retriever.ainvoke("flag", k=1) == retriever.invoke("flag", k=1)


def test_in_chroma_by_path(facts, tmp_path, shelf, embedder):
    settings = {"engine": tiny_engine(), "store": shelf, "lazy": True, "k": 1}
    retriever = KnowledgePackRetriever.from_facts(facts[:3], embedder=embedder, path=tmp_path / "bank", **settings)
    first = retriever.invoke("flag")
    retriever.bank.close()
    again = KnowledgePackRetriever.from_facts([], embedder=embedder, path=tmp_path / "bank", **settings)
    assert again.invoke("flag") == first
    again.bank.close()


def test_errors(facts, shelf, embedder, tmp_path):
    retriever = made(facts[:2], shelf, embedder, lazy=True)
    with pytest.raises(BankError):
        retriever.invoke("  ")
    with pytest.raises(BankError):
        retriever.invoke("flag", k=0)
    with pytest.raises(BankError, match="brings its own"):
        KnowledgePackRetriever.from_facts(
            facts, engine=tiny_engine(), store=shelf, bank=retriever.bank, path=tmp_path / "bank"
        )
