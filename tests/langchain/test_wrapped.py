"""`from_retriever`: what other retrievers find, with packs."""

import asyncio
import threading

import pytest
from langchain_chroma import Chroma
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.messages import HumanMessage, SystemMessage, trim_messages
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.stores import InMemoryStore
from pydantic import ValidationError

from kp_core import PackStore, find_handles
from kp_core.errors import FactError, OptionError
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever, create_pack_search_tool, pack_place
from tests.conftest import tiny_engine, until
from tests.core.banks.test_chroma import ODD_IDS
from tests.langchain.conftest import PROMPT, join

EMBEDDINGS = DeterministicFakeEmbedding(size=32)
CHUNKS = [
    Document(f"Chunk {n} tells of the harbour.", id=f"c{n}", metadata={"source": f"{n % 3}.md", "page": n})
    for n in range(20)
]


class Fixed(BaseRetriever):
    """Finds always the same."""

    documents: list[Document]

    def _get_relevant_documents(self, query, *, run_manager):
        return self.documents


@pytest.fixture
def shelf(tmp_path):
    return PackStore(tmp_path / "packs")


@pytest.fixture
def collection(tmp_path):
    collection = Chroma("chunks", EMBEDDINGS, str(tmp_path / "chroma"), collection_metadata={"hnsw:space": "cosine"})
    collection.add_documents(CHUNKS)
    return collection


def parts(shelf, **settings):
    return {"engine": tiny_engine(), "store": shelf, "namespace": "isles", "precompile": "now", **settings}


def check(found, given, shelf):
    """`found` is what `given` is, in its order, with what it says of itself, and each with its pack."""
    assert [(each.page_content, each.id) for each in found] == [(each.page_content, each.id) for each in given]
    assert found
    for each, own in zip(found, given, strict=True):
        assert each.metadata.items() >= {name: said for name, said in own.metadata.items() if name != "kp"}.items()
        [(_, _, handle)] = find_handles(each.metadata["kp"]["handle"])
        assert (handle.namespace, shelf.get(handle).text) == ("isles", each.page_content)
        said = {other.metadata.get("source", "") for other in given if other.page_content == own.page_content}
        assert shelf.get(handle).provenance.get("source", "") in said


@pytest.mark.parametrize(
    ("search_type", "search_kwargs"),
    [
        ("similarity", {"k": 5}),
        ("mmr", {"k": 4, "fetch_k": 12, "lambda_mult": 0.2}),
        ("similarity_score_threshold", {"score_threshold": 0.01, "k": 3}),
        ("similarity", {"k": 3, "filter": {"page": {"$gte": 15}}}),
    ],
)
def test_what_a_vector_store_finds(search_type, search_kwargs, collection, shelf):
    given = collection.as_retriever(search_type=search_type, search_kwargs=search_kwargs).invoke("harbour 7")
    retriever = KnowledgePackRetriever.from_retriever(
        collection.as_retriever(search_type=search_type, search_kwargs=search_kwargs), **parts(shelf)
    )
    check(retriever.invoke("harbour 7"), given, shelf)
    assert len(shelf) == len(given)
    assert len(retriever.invoke("harbour 7", k=1)) == 1


async def test_async_asks_the_other_retriever_so_and_does_not_block(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **parts(shelf))
    check(await retriever.ainvoke("harbour 7"), await collection.as_retriever().ainvoke("harbour 7"), shelf)
    ticks = 0
    run = asyncio.create_task(retriever.abatch([f"harbour {n}" for n in range(4)]))
    while not run.done():
        ticks += 1
        await asyncio.sleep(0.001)
    assert ticks > 5
    assert await run == retriever.batch([f"harbour {n}" for n in range(4)])


def test_documents_of_any_id_are_found_and_stay_in_step(shelf, tmp_path):
    mine = Chroma("odd", EMBEDDINGS, str(tmp_path / "odd"), collection_metadata={"hnsw:space": "cosine"})
    mine.add_documents([Document(f"Harbour {n}.", id=fact_id, metadata={"n": n}) for n, fact_id in enumerate(ODD_IDS)])
    plain = mine.as_retriever(search_kwargs={"k": len(ODD_IDS)})
    retriever = KnowledgePackRetriever.from_retriever(plain, **parts(shelf, content="handle"))
    found = retriever.invoke("harbour 7")
    assert {each.id for each in found} == {each.metadata["kp"]["id"] for each in found} == set(ODD_IDS)
    assert [each.id for each in found] == [each.id for each in plain.invoke("harbour 7")]
    assert len(find_handles("\n".join(each.page_content for each in found))) == len(shelf) == len(ODD_IDS)
    assert retriever.sync() == []
    mine.delete(ODD_IDS[::2])
    assert len(retriever.sync()) == len(ODD_IDS[::2])
    assert {shelf.peek(handle).provenance["id"] for handle in shelf} == set(ODD_IDS[1::2])


def composed(collection, shelf):
    """What people build on a vector store, from LangChain's package of them."""
    retrievers = pytest.importorskip("langchain_classic.retrievers")
    compressors = pytest.importorskip("langchain_classic.retrievers.document_compressors")
    splitters = pytest.importorskip("langchain_text_splitters")
    plain = collection.as_retriever(search_kwargs={"k": 6})
    chat = ChatKnowledgePacks(engine=tiny_engine(), store=shelf, namespaces=["isles"], max_tokens=8)
    parents = retrievers.ParentDocumentRetriever(
        vectorstore=Chroma("children", EMBEDDINGS),
        docstore=InMemoryStore(),
        child_splitter=splitters.CharacterTextSplitter(separator=" ", chunk_size=20, chunk_overlap=0),
    )
    parents.add_documents(CHUNKS[:6])
    words = splitters.CharacterTextSplitter(separator=" of ", chunk_size=14, chunk_overlap=0)
    parts = compressors.DocumentCompressorPipeline(transformers=[words])
    spread = collection.as_retriever(search_type="mmr")
    return {
        "parent": parents,
        "ensemble": retrievers.EnsembleRetriever(retrievers=[plain, spread], weights=[0.5, 0.5]),
        "multi_query": retrievers.MultiQueryRetriever.from_llm(plain, chat, include_original=True),
        "compression": retrievers.ContextualCompressionRetriever(base_compressor=parts, base_retriever=plain),
    }


@pytest.mark.parametrize("kind", ["parent", "ensemble", "multi_query", "compression"])
def test_what_composed_retrievers_find(kind, collection, shelf):
    made = composed(collection, shelf)[kind]
    retriever = KnowledgePackRetriever.from_retriever(made, **parts(shelf))
    check(retriever.invoke("harbour 7"), made.invoke("harbour 7"), shelf)


def test_what_is_said_of_a_document_stays(shelf):
    said = {"score": 0.5, "relevance_score": 0.25, "text": "mine", "none": None, "any": object(), "title": ["a"]}
    given = Document("The mill grinds.", metadata=said)
    blank, shown = Document(" ", id="b"), Document("The ferry leaves.", id="f")
    retriever = KnowledgePackRetriever.from_retriever(Fixed(documents=[blank, given, shown, given]), **parts(shelf))
    found = retriever.invoke("mill")
    assert found[0] == blank
    assert [each.page_content for each in found[1:]] == [given.page_content, shown.page_content, given.page_content]
    assert {name: found[1].metadata[name] for name in said} == said
    assert set(found[1].metadata) - set(said) == {"handle", "kp"}
    assert found[1] == found[3]
    assert len(shelf) == 2


def test_scores_and_handles_of_our_own_retrievers_stay(facts, embedder, shelf):
    own = KnowledgePackRetriever.from_facts(facts[:6], embedder=embedder, progress=False, k=2, **parts(shelf))
    around = KnowledgePackRetriever.from_retriever(own, **parts(shelf))
    for one, other in zip(own.invoke("flag"), around.invoke("flag"), strict=True):
        assert other.metadata["score"] == one.metadata["score"] == one.metadata["kp"]["score"]
        assert other.metadata["kp"]["handle"] == one.metadata["kp"]["handle"]
    by_handle = own.model_copy(update={"content": "handle"})
    assert KnowledgePackRetriever.from_retriever(by_handle, **parts(shelf)).invoke("flag") == by_handle.invoke("flag")


def test_a_document_that_says_it_is_a_handle_is_text(shelf):
    """Whoever writes documents may know the handle of somebody else's pack."""
    known = "The password of the harbour is heron."
    handle = str(shelf.put(tiny_engine().build_pack(known, namespace="isles")))
    claims = [{}, {"text": "The password"}, {"kp": {"handle": handle}}]
    said = [Document(handle, id=f"d{at}", metadata={"handle": handle} | each) for at, each in enumerate(claims)]
    inner = Fixed(documents=[*said, Document(handle, metadata={"handle": handle, "text": known})])
    found = KnowledgePackRetriever.from_retriever(inner, **parts(shelf, content="handle")).invoke("?")
    assert [each.page_content == handle for each in found] == [False, False, False, True]


def test_packs_are_compiled_in_the_background(collection, shelf):
    settings = {**parts(shelf, content="handle", compiled_for=pack_place(PROMPT))}
    del settings["precompile"]
    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **settings)
    chat = ChatKnowledgePacks(engine=tiny_engine(), store=shelf, namespaces=["isles"], max_tokens=12)
    chain = {"context": retriever | join, "question": RunnablePassthrough()} | PROMPT | chat
    go = threading.Event()
    tiny_engine().when_idle(lambda: go.wait(60) and None)
    first = retriever.invoke("harbour 7")
    assert all(find_handles(each.page_content) for each in first)
    assert {pack and pack.stored_bytes for pack in map(shelf.peek, shelf)} == {0}  # The question waited for no KV.
    go.set()
    answer = chain.invoke("harbour 7")
    assert answer.response_metadata["kp"]["pack_tokens"] > 0
    until(lambda: all(pack and pack.stored_bytes for pack in map(shelf.peek, shelf)))
    again = chain.invoke("harbour 7")
    assert again.content == answer.content
    assert [each.page_content for each in retriever.invoke("harbour 7")] == [each.page_content for each in first]


def test_without_an_engine_packs_are_looked_up(collection, shelf, caplog):
    settings = {"store": shelf, "namespace": "isles"}
    found = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **settings).invoke("harbour 7")
    assert [each.metadata["kp"]["handle"] for each in found] == [None] * 4
    assert "goes as text" in caplog.text
    KnowledgePackRetriever.from_retriever(collection.as_retriever(), **parts(shelf)).invoke("harbour 7")
    found = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **settings).invoke("harbour 7")
    assert all(each.metadata["kp"]["handle"] for each in found)


def test_a_chain_answers_as_from_text(collection, shelf):
    engine = tiny_engine()
    settings = parts(shelf, compiled_for=pack_place(PROMPT), content="handle")
    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(search_kwargs={"k": 2}), **settings)
    chat = ChatKnowledgePacks(engine=engine, store=shelf, namespaces=["isles"], max_tokens=12)

    def answer(found):
        return ({"context": found | join, "question": RunnablePassthrough()} | PROMPT | chat).invoke("Which harbour?")

    packs, text = answer(retriever), answer(collection.as_retriever(search_kwargs={"k": 2}))
    assert packs.content == text.content
    assert packs.response_metadata["kp"]["pack_tokens"] > 0
    assert packs.response_metadata["kp"]["prompt_tokens"] < text.response_metadata["kp"]["prompt_tokens"] + 40


def test_handles_survive_trimming(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(), content="handle", **parts(shelf))
    chat = ChatKnowledgePacks(engine=tiny_engine(), store=shelf, namespaces=["isles"], max_tokens=2)
    found = join(retriever.invoke("harbour 7"))
    messages = [SystemMessage("Answer."), HumanMessage("Old. " * 50), HumanMessage(f"{found}\nWhich harbour?")]
    room = chat.get_num_tokens_from_messages([messages[0], messages[2]]) + 50
    kept = trim_messages(messages, max_tokens=room, token_counter=chat, include_system=True)
    assert kept == [messages[0], messages[2]]
    assert chat.invoke(kept).response_metadata["kp"]["pack_tokens"] > 0
    # A message that is cut is cut between lines, so that handles stay whole.
    settings = {"token_counter": chat, "allow_partial": True, "strategy": "first"}
    parts_of = [trim_messages(messages[2:], max_tokens=room, **settings) for room in range(20, room, 8)]
    assert len({tuple(each.text for each in part) for part in parts_of}) > 1
    for line in "\n".join(message.text for part in parts_of for message in part).splitlines():
        assert line in ["", *messages[2].text.splitlines()]


def test_the_search_tool_takes_it(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **parts(shelf))
    tool = create_pack_search_tool(retriever, shelf)
    assert len(find_handles(tool.invoke({"query": "harbour 7"}))) == 4


def test_callbacks_see_both_retrievers(collection, shelf):
    seen = []

    class Watch(BaseCallbackHandler):
        def on_retriever_end(self, documents, **about):
            seen.append((about["parent_run_id"] is None, len(documents)))

    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **parts(shelf))
    retriever.invoke("harbour 7", {"callbacks": [Watch()]})
    assert seen == [(False, 4), (True, 4)]


def texts_of(shelf):
    return {shelf.peek(handle).text for handle in shelf}


def test_what_is_there_is_compiled_before_anybody_asks(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(
        collection.as_retriever(search_kwargs={"k": 3}), **parts(shelf, content="handle", precompile="idle")
    )
    documents = collection.get_by_ids([f"c{number}" for number in range(20)])
    handles = retriever.compile([*documents, Document(" ")], progress=False)
    assert len(set(handles)) == len(documents) == 20
    assert {document.page_content for document in retriever.invoke("harbour")} <= set(handles)
    assert retriever.compile(documents, progress=False) == handles


def test_packs_of_what_was_changed_elsewhere_go_with_sync(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(
        collection.as_retriever(search_kwargs={"k": 20}), **parts(shelf, kv="lazy")
    )
    retriever.invoke("harbour")
    own = shelf.put(tiny_engine().build_pack("Put here by hand.", namespace="isles", lazy=True))
    other = shelf.put(tiny_engine().build_pack("Chunk 4 tells of the harbour.", namespace="other", lazy=True))
    assert retriever.sync() == []
    gone = str(shelf.handle("Chunk 4 tells of the harbour.", "isles"))
    changed = str(shelf.handle("Chunk 3 tells of the harbour.", "isles"))
    collection.delete(["c4"])
    collection.update_document("c3", Document("Chunk 3 tells of the mill.", metadata={"source": "0.md"}))
    assert sorted(retriever.sync()) == sorted([gone, changed])
    assert not any(name in {str(handle) for handle in shelf} for name in (gone, changed))
    assert {own, other} <= set(shelf)
    assert len(shelf) == 20
    retriever.invoke("harbour")
    collection.delete_collection()
    with pytest.raises(ValueError, match="not initialized"):
        retriever.sync()
    assert len(shelf) == 21


def test_sync_spares_a_text_that_another_document_has(collection, shelf):
    collection.add_documents([Document("Chunk 4 tells of the harbour.", id="twin")])
    search = collection.as_retriever(search_kwargs={"k": 21})
    retriever = KnowledgePackRetriever.from_retriever(search, **parts(shelf, kv="lazy"))
    retriever.invoke("harbour")
    collection.delete([shelf.peek(shelf.handle("Chunk 4 tells of the harbour.", "isles")).provenance["id"]])
    assert retriever.sync() == []
    collection.delete(["c4", "twin"])
    assert retriever.sync() == [str(shelf.handle("Chunk 4 tells of the harbour.", "isles"))]


def test_a_sync_that_removes_all_packs_says_so(collection, shelf, caplog):
    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **parts(shelf, kv="lazy"))
    found = retriever.invoke("harbour")
    assert len(retriever.sync([])) == len(found)
    assert f"All {len(found)} packs are removed" in caplog.text


def test_sync_beside_one_who_writes(collection, shelf, monkeypatch):
    """What is added while the collection is read stays; what is deleted then goes with this sync or the next."""
    retriever = KnowledgePackRetriever.from_retriever(
        collection.as_retriever(search_kwargs={"k": 30}), **parts(shelf, kv="lazy")
    )
    retriever.invoke("harbour")
    look_up = Chroma.get_by_ids

    def meanwhile(self, ids):
        monkeypatch.setattr(Chroma, "get_by_ids", look_up)
        collection.delete(["c4"])
        collection.add_documents([Document("Chunk 30 tells of the pier.", id="c30")])
        retriever.invoke("harbour")
        return look_up(self, ids)

    monkeypatch.setattr(Chroma, "get_by_ids", meanwhile)
    assert retriever.sync() == [str(shelf.handle("Chunk 4 tells of the harbour.", "isles"))]
    assert texts_of(shelf) == set(collection.get()["documents"])
    assert retriever.sync() == []


@pytest.mark.parametrize("precompile", ["idle", "now"])
async def test_what_a_search_found_before_sync_is_not_written_after_it(precompile, shelf):
    class Deleted(Fixed):
        def _get_relevant_documents(self, query, *, run_manager):
            wrapped.sync([])
            return self.documents

    settings = parts(shelf, precompile=precompile)
    wrapped = KnowledgePackRetriever.from_retriever(Deleted(documents=CHUNKS[:1]), **settings)
    for found in (wrapped.invoke("harbour"), await wrapped.ainvoke("harbour")):
        settings["engine"].when_idle(lambda: None).result(60)
        assert found[0].page_content == CHUNKS[0].page_content
        assert found[0].metadata["kp"]["handle"] is None
        assert not list(shelf)


def test_what_is_no_document_is_named(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(collection.as_retriever(), **parts(shelf, kv="lazy"))
    with pytest.raises(FactError, match=r"Got 'The mill\.' to compile; expected a LangChain `Document`"):
        retriever.compile(["The mill."])


def test_sync_of_duplicates_and_documents_without_ids(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(
        collection.as_retriever(search_kwargs={"k": 30}), **parts(shelf, kv="lazy")
    )
    collection.add_documents([Document("Chunk 3 tells of the harbour.", id="again")])
    retriever.invoke("harbour")
    collection.delete(["c3", "again"])
    assert len(retriever.sync()) == 1
    fixed = KnowledgePackRetriever.from_retriever(
        Fixed(documents=[Document("The mill grinds."), Document("The ferry leaves.")]),
        store=shelf,
        engine=tiny_engine(),
        namespace="fixed",
        precompile="now",
    )
    fixed.invoke("mill")
    with pytest.raises(FactError, match=r"Fixed looks up no ids; give all its documents: `sync\(documents\)`"):
        fixed.sync()
    assert len(fixed.sync([Document("The ferry leaves.")])) == 1
    assert "The ferry leaves." in texts_of(shelf)


def test_what_the_indexing_api_cleans_up_has_no_pack_after_sync(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(
        collection.as_retriever(search_kwargs={"k": 30}), **parts(shelf, kv="lazy")
    )
    records = InMemoryRecordManager("isles")
    records.create_schema()
    kept, changed = (
        Document("The mill grinds.", metadata={"source": "a"}),
        Document("Gone soon.", metadata={"source": "b"}),
    )

    def reindex(*documents):
        report = index(documents, records, collection, cleanup="full", key_encoder="sha256", source_id_key="source")
        retriever.invoke("harbour")
        return report["num_deleted"], len(retriever.sync())

    collection.delete([chunk.id for chunk in CHUNKS])
    reindex(kept, changed)
    assert texts_of(shelf) == {"The mill grinds.", "Gone soon."}
    assert reindex(kept, Document("Come instead.", metadata={"source": "b"})) == (1, 1)
    assert texts_of(shelf) == {"The mill grinds.", "Come instead."}


def test_sync_of_documents_without_metadata(collection, shelf):
    retriever = KnowledgePackRetriever.from_retriever(
        collection.as_retriever(search_kwargs={"k": 30}), **parts(shelf, kv="lazy")
    )
    collection.add_documents([Document("The mill grinds.", id="mill")])
    retriever.invoke("harbour")
    assert retriever.sync() == []
    assert "The mill grinds." in texts_of(shelf)
    collection.delete(["mill"])
    assert len(retriever.sync()) == 1
    assert "The mill grinds." not in texts_of(shelf)


def test_errors_say_what_to_do(collection, shelf):
    for ask, error, says in (
        (lambda: KnowledgePackRetriever.from_retriever(collection, **parts(shelf)), FactError, "a LangChain retriever"),
        (
            lambda: KnowledgePackRetriever.from_retriever(collection.as_retriever(), k=3, **parts(shelf)),
            OptionError,
            r"no option 'k'\. The retriever inside searches: give it to that, e\.g\. `as_retriever\(search_kwargs=",
        ),
        (
            lambda: KnowledgePackRetriever.from_retriever(collection.as_retriever(), grade=0.5, **parts(shelf)),
            OptionError,
            "no option 'grade'. Only a `KnowledgePackRetriever` over a fact store grades",
        ),
        (
            lambda: KnowledgePackRetriever.from_retriever(collection.as_retriever(search_type="mrr"), **parts(shelf)),
            ValidationError,
            "search_type of mrr not allowed",
        ),
    ):
        with pytest.raises(error, match=says):
            ask()
