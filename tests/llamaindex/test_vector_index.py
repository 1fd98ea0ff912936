"""`KnowledgePackPostprocessor` over the index that a user already has: nothing is embedded again."""

import chromadb
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from kp_core import Handle
from kp_core.errors import FactError
from kp_llamaindex import KnowledgePackIndex, KnowledgePackLLM, KnowledgePackPostprocessor
from tests.conftest import tiny_engine
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


def test_packs_of_a_document_go(existing, store):
    packs, mill = packing(store), Document(text="The mill of Zyx has four sails.", id_="mill")
    existing.insert(mill)
    [hit, other] = packs.postprocess_nodes(existing.as_retriever(similarity_top_k=2).retrieve(mill.text))
    assert store.peek(Handle.parse(hit.node.handle)).text == hit.text == mill.text
    existing.delete_ref_doc("mill")
    packs.discard("mill")
    assert [str(handle) for handle in store] == [other.node.handle]


def test_a_vector_store_is_no_fact_store(store, model):
    with pytest.raises(FactError, match=r"SimpleVectorStore is no fact store.*KnowledgePackPostprocessor"):
        KnowledgePackIndex.from_vector_store(SimpleVectorStore(), model, engine=tiny_engine(), store=store)
