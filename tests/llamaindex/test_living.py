"""Documents that come, change and go: through `KnowledgePackIndex`, and through an `IngestionPipeline`."""

import asyncio

import pytest
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, VectorStoreQuery

from kp_core import ChromaFactStore, Handle, MemoryFactStore
from kp_core.errors import FactError
from kp_llamaindex import KnowledgePackIndex
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import CountingEmbedding, LetterEmbedder

SPLIT = [SentenceSplitter(chunk_size=20, chunk_overlap=0)]


def document(name, *sentences):
    return Document(text=" ".join(sentences), id_=name, metadata={"file_name": f"{name}.md"})


MILL = document("mill", "The mill of Veyl has four sails and a red door.", "Its miller is called Orla Venn of Veyl.")
SHIP = document("ship", "The ferry to Sorrel leaves at dawn every day.", "It comes back with the evening tide.")
NEW_MILL = document(
    "mill", "The mill of Veyl has five sails and a red door.", "Its miller is called Orla Venn of Veyl."
)


@pytest.fixture(params=["memory", "chroma"])
def index(request, store, embedder, tmp_path):
    facts = MemoryFactStore(embedder) if request.param == "memory" else ChromaFactStore(tmp_path / "facts", embedder)
    yield empty(facts, store)
    if request.param == "chroma":
        facts.close()


def empty(facts, store, **settings):
    made = {"transformations": SPLIT, "lazy": True, "progress": False, **settings}
    return KnowledgePackIndex(tiny_engine(), store, facts, **made)


def texts(index):
    return sorted(fact.text.rpartition("\n\n")[2] for fact in index.fact_store.facts())


def packed(store):
    return sorted(store.peek(handle).text.rpartition("\n\n")[2] for handle in store)


def sentences(*documents):
    return sorted(sentence.removesuffix(".") + "." for each in documents for sentence in each.text.split(". "))


def check(index, *documents):
    """The facts and the packs are those of these documents, and no others."""
    assert texts(index) == packed(index.store) == sentences(*documents)


def test_documents_come_change_and_go(index):
    index.insert(MILL)
    index.insert(SHIP)
    check(index, MILL, SHIP)
    index.update_ref_doc(NEW_MILL)
    check(index, NEW_MILL, SHIP)
    assert index.refresh_ref_docs([NEW_MILL, SHIP]) == [False, False]
    assert index.refresh_ref_docs([MILL, SHIP]) == [True, False]
    check(index, MILL, SHIP)
    index.delete_ref_doc("mill")
    check(index, SHIP)
    assert index.refresh_ref_docs([MILL, SHIP]) == [True, False]


def test_another_process_knows_what_was_inserted(store, embedder, tmp_path):
    for changed in ([True, True], [False, False]):
        with ChromaFactStore(tmp_path / "facts", embedder) as facts:
            assert empty(facts, store).refresh_ref_docs([MILL, SHIP]) == changed


def test_documents_that_are_read_again_are_known(index):
    for _ in range(2):
        read = [Document(text=each.text, metadata=each.metadata) for each in (MILL, SHIP)]
        for each in read:
            index.insert(each)
        check(index, MILL, SHIP)


def test_documents_that_are_not_cut_are_their_own(store, embedder):
    index = empty(MemoryFactStore(embedder), store, transformations=[])
    assert index.refresh_ref_docs([MILL, SHIP]) == [True, True]
    assert index.refresh_ref_docs([NEW_MILL, SHIP]) == [True, False]
    assert {each.node_id for each in index.as_retriever(content="text").retrieve("mill")} == {"mill", "ship"}
    assert len(list(store)) == 2


@pytest.mark.parametrize("unit", ["bank", "document"])
def test_packs_of_larger_units_go_with_their_parts(unit, store, embedder):
    index = empty(MemoryFactStore(embedder, bank_size=4), store, unit=unit)
    index.refresh_ref_docs([MILL, SHIP])
    index.update_ref_doc(NEW_MILL)
    found = index.as_retriever(similarity_top_k=9).retrieve("mill")
    assert sorted(line for each in found for line in each.text.split("\n") if line and ":" not in line) == sentences(
        NEW_MILL, SHIP
    )
    assert not any("four sails" in text for text in map("\n".join, [packed(store)]))


def test_a_text_that_two_documents_share_stays_with_the_other(index):
    other = document("other", "Of other things nothing is known to us here.", MILL.text.partition(". ")[2])
    other.metadata = MILL.metadata
    index.refresh_ref_docs([MILL, other])
    assert len(texts(index)) == 4 > len(packed(index.store)) == 3
    assert len(index.as_retriever(similarity_top_k=9).retrieve("Orla")) == 3
    index.delete_ref_doc("mill")
    check(index, other)
    assert index.refresh_ref_docs([other]) == [False]


# Pipelines


def run(pipeline, *documents):
    return pipeline.run(documents=[each.model_copy(deep=True) for each in documents])


@pytest.mark.parametrize("model", [MockEmbedding(embed_dim=1), CountingEmbedding()], ids=["mock", "theirs"])
def test_what_a_pipeline_updates_leaves_nothing_stale(index, model):
    pipeline = IngestionPipeline(
        transformations=[*SPLIT, model],
        vector_store=index.vector_store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    run(pipeline, MILL, SHIP)
    check(index, MILL, SHIP)
    assert run(pipeline, MILL, SHIP) == []
    run(pipeline, NEW_MILL, SHIP)
    check(index, NEW_MILL, SHIP)
    # What the pipeline's cache has seen is stored again all the same.
    run(pipeline, MILL, SHIP)
    check(index, MILL, SHIP)
    run(pipeline, SHIP)
    check(index, SHIP)


async def test_an_asynchronous_pipeline_leaves_the_loop_free(store, embedder):
    index = empty(MemoryFactStore(embedder), store)
    steps, ticks = [*SPLIT, MockEmbedding(embed_dim=1)], []
    pipeline = IngestionPipeline(transformations=steps, vector_store=index.vector_store, docstore=SimpleDocumentStore())

    async def tick():
        while True:
            ticks.append(None)
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    for each in (MILL, NEW_MILL):
        await pipeline.arun(documents=[each.model_copy(deep=True)])
    ticking.cancel()
    check(index, NEW_MILL)
    assert len(ticks) > 10


def test_the_fact_store_embeds_whatever_embedding_a_node_has(store):
    made = [TextNode(text=f"House {number} of {number * 97} is green.") for number in range(20)]
    for node, odd in zip(made, ([0.0, 1.0], None, *[[1.0] * 256] * 18), strict=True):
        node.embedding = odd
    index = empty(MemoryFactStore(LetterEmbedder()), store)
    index.insert_nodes(made)
    assert index.fact_store.verify() == []


async def test_as_a_vector_store(index, nodes):
    index.insert_nodes(nodes[:6])
    index.insert(MILL)
    theirs = VectorStoreIndex.from_vector_store(index.vector_store, embed_model=CountingEmbedding())
    found = await theirs.as_retriever(similarity_top_k=2).aretrieve(nodes[3].text)
    assert found[0].node_id == nodes[3].node_id
    assert index.store.peek(Handle.parse(found[0].node.get_content(MetadataMode.LLM))).text == nodes[3].text
    third = MetadataFilters(filters=[MetadataFilter(key="number", value=3)])
    store = index.vector_store
    assert [node.node_id for node in store.get_nodes(filters=third)] == [nodes[3].node_id]
    for ask in ({"doc_ids": ["mill"]}, {"node_ids": [nodes[0].node_id]}, {"filters": third, "doc_ids": ["mill"]}):
        result = store.query(VectorStoreQuery(query_str="mill", similarity_top_k=9, **ask))
        own = {nodes[0].node_id} if "node_ids" in ask else {each.node_id for each in store.get_nodes()[6:]}
        assert set(result.ids) == (own if "filters" not in ask else set())
    store.delete_nodes([nodes[0].node_id])
    assert [node.node_id for node in store.get_nodes([nodes[0].node_id, nodes[1].node_id])] == [nodes[1].node_id]
    store.clear()
    check(index)
    with pytest.raises(FactError, match="expected words to embed"):
        store.query(VectorStoreQuery(query_embedding=[1.0]))


# Embeddings


@pytest.mark.usefixtures("clean_settings")
def test_embeddings_of_llama_index_and_of_its_settings(store, nodes):
    made = {"engine": tiny_engine(), "store": store, "lazy": True, "progress": False}
    given, settled = CountingEmbedding(), CountingEmbedding(model_name="settled")
    Settings._embed_model = settled
    index = KnowledgePackIndex.from_nodes(nodes[:2], embedder=given, **made)
    assert (index.fact_store.embedder.name, len(given.texts), settled.texts) == ("letters", 2, [])
    index = KnowledgePackIndex.from_nodes(nodes[:2], **made)
    assert (index.fact_store.embedder.name, len(settled.texts)) == ("settled", 2)
    # `Settings.embed_model = None` is this one, which tells nothing apart; and never set is OpenAI's, once asked for.
    for nothing in (MockEmbedding(embed_dim=1), None):
        Settings._embed_model = nothing
        made_of = KnowledgePackIndex.from_nodes([], **made).fact_store.embedder.name
        assert (made_of, Settings._embed_model) == ("all-MiniLM-L6-v2", nothing)
