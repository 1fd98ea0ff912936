"""`KnowledgePackIndex` over the index or the vector store that a user already has: nothing is embedded again."""

import chromadb
import pytest
from llama_index.core import Document, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from kp_core import Handle
from kp_core.errors import FactError, OptionError
from kp_llamaindex import KnowledgePackIndex
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


def packed(existing, store, **settings):
    return KnowledgePackIndex.from_vector_index(existing, engine=tiny_engine(), store=store, lazy=True, **settings)


def test_it_finds_what_their_index_finds_and_embeds_nothing_again(existing, model, store):
    index = packed(existing, store)
    assert list(store) == []
    theirs = existing.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    ours = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    assert [(each.node_id, each.score, each.text) for each in ours] == [
        (each.node_id, each.score, each.text) for each in theirs
    ]
    for each in ours:
        assert store.get(Handle.parse(each.node.get_content(MetadataMode.LLM))).text == each.text
    assert index.as_retriever(similarity_top_k=3, content="text").retrieve(QUESTION) == theirs
    assert (len(list(store)), model.texts) == (3, [])


async def test_engines_and_filters(existing, store, usages):
    index = packed(existing, store)
    index.llm.max_tokens = 4
    filters = MetadataFilters(filters=[MetadataFilter(key="number", value=3)])
    answer = index.as_query_engine(filters=filters).query(QUESTION)
    assert [each.metadata["number"] for each in answer.source_nodes] == [3]
    assert usages[-1]["pack_tokens"] > 0
    assert await index.as_retriever().aretrieve(QUESTION) == index.as_retriever().retrieve(QUESTION)
    index.as_chat_engine(ChatMode.CONTEXT, similarity_top_k=1).chat(QUESTION)
    assert usages[-1]["pack_tokens"] > 0
    with pytest.raises(OptionError, match="Did you mean 'similarity_top_k'"):
        index.as_retriever(similarity_topk=1)


def test_documents_come_change_and_go_with_their_packs(existing, store, model):
    index = packed(existing, store)
    mill, ship = Document(text="The mill of Zyx has four sails.", id_="mill"), Document(text="Zyx ship.", id_="ship")
    assert index.refresh_ref_docs([mill, ship]) == [True, True]
    before = index.as_retriever(similarity_top_k=1).retrieve(mill.text)[0].node
    assert store.peek(Handle.parse(before.handle)).text == before.text == mill.text
    changed = Document(text="The mill of Zyx has five sails.", id_="mill")
    model.texts.clear()
    assert index.refresh_ref_docs([changed, ship]) == [True, False]
    assert model.texts == [changed.text]
    texts = [each.text for each in index.as_retriever(similarity_top_k=99).retrieve(mill.text)]
    assert [texts.count(each.text) for each in (mill, changed, ship)] == [0, 1, 1]
    assert len(texts) == 26
    assert store.peek(Handle.parse(before.handle)) is None
    index.delete_ref_doc("mill")
    texts = [each.text for each in index.as_retriever(similarity_top_k=99).retrieve(mill.text)]
    assert (texts.count(changed.text), len(texts)) == (0, 25)
    # A document that was deleted is new when it comes again.
    assert index.refresh_ref_docs([changed]) == [True]


def test_from_a_vector_store(nodes, model, store, tmp_path):
    with chromadb.PersistentClient(str(tmp_path)) as client:
        collection = client.create_collection("theirs")
        VectorStoreIndex.from_vector_store(ChromaVectorStore(collection), embed_model=model).insert_nodes(nodes)
        model.texts.clear()
        index = KnowledgePackIndex.from_vector_store(
            ChromaVectorStore(collection), model, engine=tiny_engine(), store=store, lazy=True
        )
        [hit] = index.as_retriever(similarity_top_k=1).retrieve(nodes[4].text)
        assert (hit.node_id, hit.node.is_intact, model.texts) == (nodes[4].node_id, True, [])
        # Metadata that the model does not see, as the node said.
        assert hit.node.get_content(MetadataMode.LLM) == str(store.handle(nodes[4].text, "default"))


@pytest.mark.usefixtures("clean_settings")
def test_the_model_of_the_settings_embeds_the_questions(nodes, model, store, tmp_path):
    with chromadb.PersistentClient(str(tmp_path)) as client:
        theirs = ChromaVectorStore(client.create_collection("theirs"))
        made = {"engine": tiny_engine(), "store": store, "lazy": True}
        Settings._embed_model = None
        with pytest.raises(FactError, match="without the model that embedded it"):
            KnowledgePackIndex.from_vector_store(theirs, **made)
        Settings.embed_model = model
        index = KnowledgePackIndex.from_vector_store(theirs, **made)
        index.insert_nodes(nodes[:2])
        assert len(index.as_retriever().retrieve(QUESTION)) == 2


def test_what_cannot_be_wrapped(store, model):
    made = {"engine": tiny_engine(), "store": store}
    with pytest.raises(FactError, match="SimpleVectorStore holds vectors without texts"):
        KnowledgePackIndex.from_vector_store(SimpleVectorStore(), model, **made)
    with pytest.raises(FactError, match=r"expected a VectorStoreIndex.*KnowledgePackPostprocessor"):
        KnowledgePackIndex.from_vector_index(SummaryIndex([]), **made)
