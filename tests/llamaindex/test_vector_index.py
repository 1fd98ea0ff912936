"""`KnowledgePackPostprocessor` over the index that a user already has: nothing is embedded again."""

import chromadb
import numpy as np
import pytest
from llama_index.core import ChatPromptTemplate, Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.context import DEFAULT_CONTEXT_TEMPLATE
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.vector_stores.chroma import ChromaVectorStore

from kp_core import Handle, load_engine
from kp_llamaindex import KnowledgePackLLM, KnowledgePackPostprocessor, pack_place
from tests.conftest import tiny_engine, until
from tests.core.banks.test_chroma import ODD_IDS
from tests.kits import CHATML, tiny_model, tiny_tokenizer
from tests.llamaindex.conftest import QUESTION, CountingEmbedding

SPLIT = [SentenceSplitter(chunk_size=64, chunk_overlap=0)]


@pytest.fixture
def model():
    return CountingEmbedding()


@pytest.fixture(params=["simple", "chroma"])
def existing(request, nodes, model, tmp_path):
    """An index that a user made before: in LlamaIndex's own vector store, and in Chroma."""
    if request.param == "simple":
        made = VectorStoreIndex(nodes, embed_model=model, transformations=SPLIT)
    else:
        with chromadb.PersistentClient(str(tmp_path / "chroma")) as client:
            theirs = ChromaVectorStore(chroma_collection=client.create_collection("theirs"))
            made = VectorStoreIndex.from_vector_store(theirs, embed_model=model, transformations=SPLIT)
            made.insert_nodes(nodes)
            model.texts.clear()
            yield made
            return
    model.texts.clear()
    yield made


def packing(store):
    return KnowledgePackPostprocessor(engine=tiny_engine(), store=store, lazy=True, precompile="now")


def test_what_an_index_finds_is_packed_and_nothing_is_embedded_again(existing, model, store):
    theirs = existing.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    ours = packing(store).postprocess_nodes(theirs)
    assert [(each.node_id, each.score, each.text) for each in ours] == [
        (each.node_id, each.score, each.text) for each in theirs
    ]
    for each in ours:
        assert store.get(Handle.parse(each.node.get_content(MetadataMode.LLM))).text == each.text
    assert (len(list(store)), model.texts) == (3, [])


async def test_engines_and_filters(existing, store, usages):
    llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["default"], max_tokens=4)
    filters = MetadataFilters(filters=[MetadataFilter(key="number", value=3)])
    settings = {"llm": llm, "node_postprocessors": [packing(store)]}
    answer = existing.as_query_engine(filters=filters, **settings).query(QUESTION)
    assert [each.metadata["number"] for each in answer.source_nodes] == [3]
    assert usages[-1]["pack_tokens"] > 0
    await existing.as_query_engine(**settings).aquery(QUESTION)
    assert usages[-1]["pack_tokens"] > 0
    existing.as_chat_engine(ChatMode.CONTEXT, similarity_top_k=1, **settings).chat(QUESTION)
    assert usages[-1]["pack_tokens"] > 0


def test_a_chat_engine_reads_packs_that_were_compiled_for_its_prompt(existing, store, usages):
    place = pack_place(ChatPromptTemplate([ChatMessage(DEFAULT_CONTEXT_TEMPLATE, role="system")]))
    packs = KnowledgePackPostprocessor(engine=tiny_engine(), store=store, precompile="now", compiled_for=place)
    llm = KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["default"], max_tokens=4)
    existing.as_chat_engine(ChatMode.CONTEXT, llm, similarity_top_k=1, node_postprocessors=[packs]).chat(QUESTION)
    assert usages[-1]["reused_tokens"] >= usages[-1]["pack_tokens"] > 0


VAULT = "The vault of Zyx opens with the number 4711."


def on_disk(store):
    """The content of every file of the store."""
    return b"".join(path.read_bytes() for path in sorted(store.path.rglob("*")) if path.is_file())


@pytest.mark.parametrize("forget", ["discard", "sync"])
def test_of_a_deleted_document_neither_text_nor_kv_stays(existing, store, forget):
    """Also the KV behind other packs, which is kept when packs meet."""
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(CHATML))
    packs = KnowledgePackPostprocessor(engine=engine, store=store, precompile="now")
    llm = KnowledgePackLLM(engine=engine, store=store, namespaces=["default"], max_tokens=2)

    def ask():
        asked = existing.as_query_engine(llm, similarity_top_k=2, node_postprocessors=[packs]).query(VAULT)
        return {hit.node.ref_doc_id for hit in asked.source_nodes}

    existing.insert(Document(text=VAULT, id_="vault"))
    assert "vault" in ask() | ask()
    handle = store.handle(VAULT, "default")
    kv = store.get(handle).kv.keys[0].numpy().tobytes()
    assert VAULT.encode() in on_disk(store)
    assert kv in on_disk(store)
    existing.delete_ref_doc("vault", delete_from_docstore=True)
    left = {**existing.docstore.docs} or {node.node_id: node for node in existing.vector_store.get_nodes(None)}
    removed = packs.discard("vault") if forget == "discard" else packs.sync(left.values())
    assert str(handle) in removed
    assert store.peek(handle) is None
    assert VAULT.encode() not in on_disk(store)
    assert kv not in on_disk(store)
    engine.close()


@pytest.mark.parametrize("forget", ["discard", "sync"])
def test_what_waits_to_be_compiled_is_not_written_when_its_document_is_deleted(forget, store):
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(CHATML))
    packs = KnowledgePackPostprocessor(engine=engine, store=store)
    index = VectorStoreIndex([], embed_model=CountingEmbedding())
    for name, text in (("vault", VAULT), ("mill", "The mill of Zyx has four sails.")):
        index.insert(Document(text=text, id_=name))
    found = index.as_retriever(similarity_top_k=2).retrieve(VAULT)
    packs.postprocess_nodes(found)
    index.delete_ref_doc("vault", delete_from_docstore=True)
    packs.discard("vault") if forget == "discard" else packs.sync(index.docstore.docs.values())
    # What waited is cancelled, whatever it was; the next search lets it wait again.
    packs.postprocess_nodes(index.as_retriever(similarity_top_k=2).retrieve(VAULT))
    until(lambda: list(store))
    assert [store.peek(handle).text for handle in store] == ["The mill of Zyx has four sails."]
    # A document that comes back has its pack again.
    packs.postprocess_nodes(found)
    until(lambda: len(list(store)) == 2)
    engine.close()


def test_what_left_is_refused_by_name():
    for name, instead in (
        ("KnowledgePackIndex", "VectorStoreIndex"),
        ("KnowledgePackVectorStore", "VectorStoreIndex"),
        ("PackEvent", "kp_core.events.subscribe"),
        ("KnowledgePackEmbedding", "HuggingFaceEmbedding"),
    ):
        with pytest.raises(ImportError, match=rf"`kp_llamaindex.{name}` is gone in 0.3; use .*{instead}"):
            exec(f"from kp_llamaindex import {name}")  # noqa: S102 - as a user writes it
    with pytest.raises(ImportError, match="cannot import name 'KnowledgePackIndx'"):
        exec("from kp_llamaindex import KnowledgePackIndx")  # noqa: S102


def test_nodes_of_any_id_are_found_and_their_packs_leave_with_them(model, store, tmp_path):
    ids = [fact_id for fact_id in ODD_IDS if fact_id.strip()]
    with chromadb.PersistentClient(str(tmp_path / "odd")) as client:
        theirs = ChromaVectorStore(chroma_collection=client.create_collection("odd"))
        index = VectorStoreIndex.from_vector_store(theirs, embed_model=model)
        index.insert_nodes([TextNode(id_=fact_id, text=f"Harbour {n}.") for n, fact_id in enumerate(ids)])
        found = index.as_retriever(similarity_top_k=len(ids)).retrieve("harbour")
        packed = packing(store).postprocess_nodes(found)
        assert [each.node_id for each in packed] == [each.node_id for each in found]
        assert (
            {each.node_id for each in packed} == {store.peek(handle).provenance["id"] for handle in store} == set(ids)
        )


def test_numbers_of_numpy_in_metadata_stay_and_their_nodes_are_packed(store):
    values = {"f": np.float32(1.5), "i": np.int64(3), "b": np.bool_(True), "l": [np.int8(1)]}  # noqa: FBT003 - numpy's
    nodes = [TextNode(text=f"Harbour {n}.", metadata={"n": n, **values}) for n in range(3)]
    for each in nodes:
        each.excluded_llm_metadata_keys = ["n", *values]
    packed = packing(store).postprocess_nodes([NodeWithScore(node=each, score=np.float32(0.5)) for each in nodes])
    assert [each.node.metadata for each in packed] == [each.metadata for each in nodes]
    assert {store.get(handle).text for handle in store} == {each.text for each in nodes}
