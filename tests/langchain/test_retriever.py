"""`KnowledgePackRetriever`: building packs, finding them, and doing without."""

import logging
from typing import Any

import pytest
from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import ValidationError

from kp_core import Fact, Handle, MemoryFactStore, Packs, PackStore, Question, Session, find_handles
from kp_core.errors import FactError, OptionError, PackError
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever, create_pack_search_tool, pack_place, to_handles
from tests.conftest import roomy_engine, tiny_engine, until
from tests.langchain.conftest import PROMPT


@pytest.fixture
def shelf(tmp_path):
    return PackStore(tmp_path / "shelf")


class Counting(Session):
    """An engine that counts what it compiles, and may break off."""

    def __init__(self, engine, breaks_after=None):
        self.__dict__ |= vars(engine)
        self.breaks_after, self.built = breaks_after, []

    def build_packs(self, texts, *, lazy=False, **settings):
        for pack in super().build_packs(texts, lazy=lazy, **settings):
            if not lazy:
                if len(self.built) == self.breaks_after:
                    raise KeyboardInterrupt
                self.built.append(pack.text)
            yield pack


def made(facts, shelf, embedder, engine=None, **settings):
    settings = {"k": 2, "progress": False, "content": "handle", **settings}
    return KnowledgePackRetriever.from_facts(
        facts, engine=engine or tiny_engine(), store=shelf, fact_store=MemoryFactStore(embedder), **settings
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
        "page": "7",
        "kp": {"handle": document.page_content, "score": document.metadata["score"], "id": "f1"},
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
    made(facts, shelf, embedder, kv="lazy" if changed == "kv" else "stored")
    engine = Counting(tiny_engine("qwen2") if changed == "model" else tiny_engine())
    compiled_for = [{"role": "user", "content": "Know: {pack}"}] if changed == "place" else "user"
    made(facts, shelf, embedder, engine, compiled_for=compiled_for)
    assert len(engine.built) == 2


def test_lazy_packs(facts, shelf, embedder):
    retriever = made(facts[:3], shelf, embedder, kv="lazy")
    assert all(shelf.get(find_handles(document.page_content)[0][2]).is_lazy for document in retriever.invoke("flag"))


def test_memory_packs_have_the_handle_of_their_text(facts, shelf, embedder):
    retriever = made(facts[:3], shelf, embedder, compiled_for="system")
    for document in retriever.invoke("flag"):
        [(_, _, handle)] = find_handles(document.page_content)
        assert shelf.get(handle).text == document.metadata["text"]
        assert handle == shelf.handle(document.metadata["text"], "default")


def test_a_fact_without_a_pack_comes_as_text(facts, shelf, embedder, caplog):
    retriever = made(facts[:2], shelf, embedder).model_copy(update={"engine": None})
    shelf.remove(shelf.handle(facts[0].text, "default"))
    with caplog.at_level(logging.WARNING, "kp_core"):
        documents = {document.id: document for document in retriever.invoke(facts[0].text)}
    assert documents[facts[0].id].page_content == facts[0].text
    assert "handle" not in documents[facts[0].id].metadata
    assert documents[facts[0].id].metadata["kp"]["handle"] is None
    assert find_handles(documents[facts[1].id].page_content)
    assert f"no pack of fact {facts[0].id!r}" in caplog.text


def test_a_text_twice_is_one_pack(facts, shelf, embedder):
    twins = [Fact("The mill has four sails.", id="a"), Fact("The mill has four sails.", id="b")]
    made(twins, shelf, embedder, k=1)
    assert len(shelf) == 1


def test_whole_banks_as_packs(facts, shelf, embedder):
    retriever = made(facts, shelf, embedder, roomy_engine(), unit="bank", k=1, probes=1)
    assert len(shelf) == len(retriever.fact_store.banks()) == 2
    for question in ("What bird is on the flag?", "Where do ships go?"):
        [document] = retriever.invoke(question)
        bank = retriever.fact_store.bank_facts(document.metadata["bank"])
        assert document.metadata["bank"] == retriever.fact_store.search(question, 1, probes=1)[0].bank
        assert document.metadata["text"] == "\n".join(fact.text for fact in bank)
        assert document.metadata["facts"] == [fact.id for fact in bank]
        assert find_handles(document.page_content)
    assert {document.metadata["bank"] for document in retriever.invoke("flag", k=5)} == {"default/0", "default/1"}


def test_k_and_probes_of_one_call(facts, shelf, embedder):
    retriever = made(facts, shelf, embedder, kv="lazy")
    asked = retriever.invoke("flag", k=5, probes=2)
    assert [document.id for document in asked] == [
        hit.fact.id for hit in retriever.fact_store.search("flag", 5, probes=2)
    ]


async def test_async_equals_sync(retriever):
    assert await retriever.ainvoke("flag") == retriever.invoke("flag")
    assert await retriever.ainvoke("flag", k=1) == retriever.invoke("flag", k=1)


def test_in_chroma_by_path(facts, tmp_path, shelf, embedder):
    settings = {"engine": tiny_engine(), "store": shelf, "kv": "lazy", "k": 1, "content": "handle"}
    retriever = KnowledgePackRetriever.from_facts(facts[:3], embedder=embedder, path=tmp_path / "bank", **settings)
    first = retriever.invoke("flag")
    retriever.fact_store.close()
    again = KnowledgePackRetriever.from_facts([], embedder=embedder, path=tmp_path / "bank", **settings)
    assert again.invoke("flag") == first
    again.fact_store.close()


def test_errors(facts, shelf, embedder, tmp_path):
    retriever = made(facts[:2], shelf, embedder, kv="lazy")
    with pytest.raises(FactError):
        retriever.invoke("  ")
    with pytest.raises(FactError):
        retriever.invoke("flag", k=0)
    with pytest.raises(FactError, match="brings its own"):
        KnowledgePackRetriever.from_facts(
            facts, engine=tiny_engine(), store=shelf, fact_store=retriever.fact_store, path=tmp_path / "bank"
        )


def test_text_to_everyone_and_the_users_own_fields_stay(facts, shelf, embedder):
    own = {
        "source": "my/file.md",
        "title": "",
        "bank": "Lloyds",
        "score": 7,
        "handle": "brass",
        "text": "short",
        "p": 1,
    }
    mill = Fact("The mill has four sails.", title="Mill", source="book", metadata=own, id="f1")
    plain = Fact("The ferry leaves at dawn.")
    retriever = made([mill, plain], shelf, embedder, content="text")
    documents = {document.page_content: document for document in retriever.invoke("sails")}
    about = dict(documents[mill.text].metadata)
    record = about.pop("kp")
    assert about == own
    assert set(record) == {"handle", "score", "id"}
    assert shelf.get(Handle.parse(record["handle"])).text == mill.text
    assert record["id"] == "f1"
    about = documents[plain.text].metadata
    assert not {"title", "source"} & set(about)
    assert (about["handle"], about["score"]) == (about["kp"]["handle"], about["kp"]["score"])


def test_what_stands_between_retriever_and_model_reads_text(facts, shelf, embedder):
    retriever = made(facts, shelf, embedder, content="text", k=6)
    question = "What bird is shown on the flag of the Orrelay Isles?"
    plain = retriever.invoke(question)
    near = EmbeddingsFilter(embeddings=Vectors(embedder), least=plain[2].metadata["score"] - 1e-4)
    kept = near.compress_documents(plain, question)
    assert kept == plain[:3]
    by_handle = retriever.model_copy(update={"content": "handle"}).invoke(question)
    assert near.compress_documents(by_handle, question) == []
    assert to_handles(kept, shelf) == by_handle[:3]


class EmbeddingsFilter(BaseDocumentCompressor):
    """Keeps the documents whose content is near the question, as LangChain's class of this name does."""

    embeddings: Any
    least: float

    def compress_documents(self, documents, query, callbacks=None):
        found = InMemoryVectorStore(self.embeddings)
        found.add_documents(list(documents))
        return [each for each, score in found.similarity_search_with_score(query, len(documents)) if score > self.least]


class Vectors(Embeddings):
    """The embedder of this project as LangChain has them."""

    def __init__(self, embedder):
        self.embedder = embedder

    def embed_documents(self, texts):
        return self.embedder.embed(texts).tolist()

    def embed_query(self, text):
        return self.embedder.embed_query(text).tolist()


def test_misspelt_options_are_refused_before_anything_is_made(facts, shelf, embedder, tmp_path):
    fact_store = MemoryFactStore(embedder)
    settings = {"engine": tiny_engine(), "store": shelf}
    for ask, says in (
        (
            lambda: KnowledgePackRetriever(fact_store=fact_store, store=shelf, search_kwargs={"k": 2}),
            "no option 'search_kwargs'",
        ),
        (lambda: KnowledgePackRetriever(fact_store=fact_store, store=shelf, namespce="a"), "Did you mean 'namespace'"),
        (lambda: KnowledgePackRetriever(bank=fact_store, store=shelf), "Did you mean 'fact_store'"),
        (
            lambda: KnowledgePackRetriever.from_facts(facts, fact_store=fact_store, contents="text", **settings),
            "mean 'content'",
        ),
        (lambda: KnowledgePackRetriever.from_facts(facts, path=tmp_path / "b", progres=1, **settings), "'progress'"),
        (
            lambda: KnowledgePackRetriever(fact_store=fact_store, store=shelf).invoke("flag", prob=1),
            "Did you mean 'probes'",
        ),
    ):
        with pytest.raises(OptionError, match=says):
            ask()
    assert (len(fact_store), len(shelf), (tmp_path / "b").exists()) == (0, 0, False)
    named = KnowledgePackRetriever(fact_store=fact_store, store=shelf, tags=["a"], metadata={"b": 1})
    assert named.tags == ["a"]


def test_what_is_no_fact_store_is_named(shelf):
    with pytest.raises(ValidationError, match=r"fact_store\n.* an instance of FactStore"):
        KnowledgePackRetriever(fact_store=Vectors(None), store=shelf)
    with pytest.raises(FactError, match=r"object'> as embedder; expected an Embedder"):
        KnowledgePackRetriever.from_facts([], engine=tiny_engine(), store=shelf, embedder=object())


class Toy(Packs):
    """All that a store of packs has to be."""

    def __init__(self, shelf):
        self.shelf, self.handle, self.put, self.remove = shelf, shelf.handle, shelf.put, shelf.remove

    def peek(self, handle, key=None):
        return self.shelf.peek(handle, key)

    def get(self, handle, key=None):
        return self.shelf.get(handle, key)

    def __iter__(self):
        return self.shelf.handles()


def test_any_store_that_keeps_the_protocol_will_do(facts, shelf, embedder):
    engine, toy = tiny_engine(), Toy(shelf)
    retriever = made(facts[:2], toy, embedder, engine)
    model = ChatKnowledgePacks(engine=engine, store=toy, namespaces=["default"], max_tokens=1)
    [first, *_] = retriever.invoke("flag")
    assert model.invoke(first.page_content).response_metadata["kp"]["pack_tokens"] > 0
    tool = create_pack_search_tool(retriever, toy)
    assert tool.invoke({"query": "flag"})
    with pytest.raises(PackError, match="Packs"):
        KnowledgePackRetriever(fact_store=retriever.fact_store, store=object())


def test_facts_without_packs_are_compiled_when_they_are_found(facts, shelf):
    store = MemoryFactStore(DeterministicFakeEmbedding(size=32))
    store.add(facts[:5])
    engine = Counting(tiny_engine())
    settings = {"fact_store": store, "store": shelf, "k": 2, "content": "handle"}
    found = KnowledgePackRetriever(engine=engine, precompile="now", **settings).invoke("flag")
    assert all(find_handles(document.page_content) for document in found)
    assert sorted(engine.built) == sorted(document.metadata["text"] for document in found)
    later = KnowledgePackRetriever(engine=engine, **settings | {"k": 5})
    handles = [document.metadata["kp"]["handle"] for document in later.invoke("flag")]
    assert set(handles) == set(map(str, shelf))
    until(lambda: all(shelf.get(handle).kv for handle in handles))


def test_packs_are_stored_as_compress_says(facts, shelf):
    store = MemoryFactStore(DeterministicFakeEmbedding(size=32))
    store.add(facts[:2])
    settings = {"fact_store": store, "store": shelf, "engine": tiny_engine(), "k": 2, "precompile": "now"}
    KnowledgePackRetriever(**settings, compress="lossless").invoke("flag")
    assert {shelf.get(handle).compression for handle in shelf} == {"lossless"}
    for compress in ("zip", "auto"):
        with pytest.raises(ValueError, match=r"compress\n.* 'none' or 'lossless'"):
            KnowledgePackRetriever(**settings, compress=compress)
    with pytest.raises(ValueError, match=r"kv\n.* 'stored' or 'lazy'"):
        KnowledgePackRetriever(**settings, kv="auto")


@pytest.mark.bundled
async def test_graded_documents_are_those_that_help(isles, chat_engine):
    question = "What is the coin of the Orrelay Isles called?"
    found = isles.invoke(question, k=4)
    assert found == isles.invoke(question, k=4, grade=0.0)
    asked = Question(f"Does this help to answer the question below?\n\n{question}")
    shares = []
    for document in found:
        messages = [*pack_place(PROMPT)[:-1], {"role": "user", "content": document.metadata["text"]}]
        decided = chat_engine.decide(messages, {0: asked}, rotations="all")
        shares.append(decided.answers[0].probabilities["yes"])
    middle = sorted(shares)[2]
    expected = [document for document, share in zip(found, shares, strict=True) if share >= middle]
    assert 0 < len(expected) < 4
    graded = isles.model_copy(update={"grade": middle})
    assert graded.invoke(question, k=4) == await graded.ainvoke(question, k=4) == expected
    assert isles.invoke(question, k=4, grade=1.0) == []


def test_grades_need_an_engine_and_are_probabilities(isles):
    with pytest.raises(OptionError, match="engine"):
        isles.model_copy(update={"engine": None}).invoke("What?", grade=0.5)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        KnowledgePackRetriever(fact_store=isles.fact_store, store=isles.store, grade=2)
    for options in ({"grade": "0.5"}, {"grade": 2}, {"grade": True}, {"score_threshold": "3"}):
        with pytest.raises(OptionError, match="expected a number"):
            isles.invoke("What?", **options)
