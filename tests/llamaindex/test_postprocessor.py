"""`KnowledgePackPostprocessor`: packs behind any retriever."""

import logging

import chromadb
import pytest
from llama_index.core import Document, PromptTemplate, Settings, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.indices.postprocessor import SimilarityPostprocessor
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import ImageNode, MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from kp_core import Handle
from kp_core.errors import FactError, PromptError
from kp_llamaindex import KnowledgePackLLM, KnowledgePackPostprocessor, NumberSources, PackNode
from tests.conftest import tiny_engine, until
from tests.llamaindex.conftest import QUESTION, CountingEmbedding


@pytest.fixture
def packs(store):
    return KnowledgePackPostprocessor(engine=tiny_engine(), store=store, precompile="now", namespace="isles", lazy=True)


@pytest.fixture
def llm(store):
    return KnowledgePackLLM(engine=tiny_engine(), store=store, namespaces=["isles"], max_tokens=4)


def found(*nodes):
    return [NodeWithScore(node=node, score=1 / number) for number, node in enumerate(nodes, 1)]


@pytest.mark.parametrize("place", ["syst", PromptTemplate("{context_str} {query_str}"), [5]])
def test_what_is_no_place_is_refused_when_it_is_given(store, place):
    with pytest.raises(PromptError, match=r"Got compiled_for=.*expected 'user', 'system', or messages.*pack_place"):
        KnowledgePackPostprocessor(engine=tiny_engine(), store=store, compiled_for=place)


def test_text_metadata_scores_and_order_stay(packs, nodes, store):
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="isles.md")}
    given = found(nodes[0], nodes[1].model_copy(update={"relationships": source}))
    made = packs.postprocess_nodes(given, query_str=QUESTION)
    for before, after in zip(given, made, strict=True):
        assert (after.node_id, after.score, after.text, after.metadata) == (
            before.node_id,
            before.score,
            before.text,
            before.metadata,
        )
        assert after.node.ref_doc_id == before.node.ref_doc_id
        pack = store.get(Handle.parse(after.node.get_content(MetadataMode.LLM)))
        assert (pack.text, pack.namespace) == (before.node.get_content(MetadataMode.LLM), "isles")
    assert not any(hasattr(each.node, "handle") for each in given)


def test_what_is_there_is_compiled_before_anybody_asks(nodes, store):
    packs = KnowledgePackPostprocessor(engine=tiny_engine(), store=store, namespace="isles", divide=False)
    handles = packs.compile([*nodes, TextNode(text=" ")], progress=False)
    assert len(handles) == len(nodes)
    assert [each.node.handle for each in packs.postprocess_nodes(found(*nodes))] == handles
    assert packs.compile(nodes, progress=False) == handles


def test_what_is_packed_or_no_text_stays_and_what_was_rewritten_is_packed_anew(packs, nodes):
    picture, blank = ImageNode(image="aGk=", text=""), TextNode(text="  ")
    [first, second, *rest] = packs.postprocess_nodes(found(*nodes[:2], picture, blank))
    assert [each.node for each in rest] == [picture, blank]
    second.node.text = "The flag is plain now."
    again = packs.postprocess_nodes(NumberSources().postprocess_nodes([first, second]))
    assert again[0].node.handle == first.node.handle
    assert again[1].node.handle not in ("", second.node.handle)
    assert again[1].node.get_content(MetadataMode.LLM) == f"Source 2:\n{again[1].node.handle}"
    assert packs.postprocess_nodes([]) == []


def test_packs_of_the_first_node_stand_where_the_prompt_has_it(nodes, store, llm, usages):
    packs = KnowledgePackPostprocessor(engine=tiny_engine(), store=store, precompile="now", namespace="isles")
    engine = SummaryIndex(nodes[:1]).as_query_engine(llm, node_postprocessors=[packs])
    engine.query(QUESTION)
    tiny_engine().clear_cache()
    engine.query(QUESTION)
    # The words around it were met twice: they may be stored by now, too.
    assert usages[-1]["reused_tokens"] >= usages[-1]["pack_tokens"] > 0


def test_the_answer_is_that_of_text(packs, nodes, llm, usages):
    index = SummaryIndex(nodes[:3])
    answers = []
    for steps in ([packs], []):
        tiny_engine().clear_cache()
        answers.append(index.as_query_engine(llm, node_postprocessors=steps).query(QUESTION))
    assert str(answers[0]) == str(answers[1]) != ""
    assert usages[0]["pack_tokens"] > 0 == usages[1]["pack_tokens"]
    assert usages[0]["prompt_tokens"] + usages[0]["pack_tokens"] == usages[1]["prompt_tokens"]


@pytest.mark.usefixtures("clean_settings")
def test_packs_beyond_the_window_go_as_text_in_further_prompts(packs, nodes, llm, usages, caplog):
    Settings.tokenizer = llm.token_ids
    answer = SummaryIndex(nodes).as_query_engine(llm, node_postprocessors=[packs]).query(QUESTION)
    assert str(answer) not in ("", "Empty Response")
    assert usages[0]["pack_tokens"] > 0
    assert len(usages) > 1
    assert "1024 fit beside a question" in caplog.text
    made = packs.postprocess_nodes(found(*nodes))
    handles = [bool(each.node.handle) for each in made]
    assert handles == sorted(handles, reverse=True), "the first have packs"
    assert [each.text for each in made] == [node.text for node in nodes]
    packs.divide = False
    assert all(each.node.handle for each in packs.postprocess_nodes(found(*nodes)))


async def test_behind_fusion_and_a_cutoff_sync_and_async(packs, nodes, llm, usages):
    index = VectorStoreIndex(nodes, embed_model=CountingEmbedding())
    fusion = QueryFusionRetriever([index.as_retriever(similarity_top_k=3)], llm=llm, num_queries=1, similarity_top_k=2)
    steps = [SimilarityPostprocessor(similarity_cutoff=-1), packs]
    nodes_found = steps[1].postprocess_nodes(steps[0].postprocess_nodes(await fusion.aretrieve(QUESTION)))
    assert len(nodes_found) == 2
    assert await packs.apostprocess_nodes(fusion.retrieve(QUESTION)) == nodes_found
    answer = await index.as_query_engine(llm, node_postprocessors=steps).aquery(QUESTION)
    assert usages[-1]["pack_tokens"] > 0
    assert not any(hit.text.startswith("kp:") for hit in answer.source_nodes)


def test_in_the_background(nodes, store, caplog):
    packs = KnowledgePackPostprocessor(engine=tiny_engine(), store=store)
    with caplog.at_level(logging.WARNING):
        [first] = packs.postprocess_nodes(found(nodes[0]))
    assert first.node.get_content(MetadataMode.LLM) == first.node.handle
    until(lambda: store.get(first.node.handle).kv)
    [second] = packs.postprocess_nodes([first])
    assert second.node.is_intact


@pytest.mark.parametrize("compress", ["lossless", "none"])
def test_packs_are_stored_as_compress_says(compress, nodes, store):
    packs = KnowledgePackPostprocessor(engine=tiny_engine(), store=store, precompile="now", compress=compress)
    packs.postprocess_nodes(found(nodes[0]))
    assert {store.get(handle).compression for handle in store} == {compress}


def test_packs_of_documents_that_a_pipeline_deleted_go_with_sync(packs, store, tmp_path):
    collection = chromadb.PersistentClient(str(tmp_path)).create_collection("theirs")
    vectors, docstore = ChromaVectorStore(chroma_collection=collection), SimpleDocumentStore()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), CountingEmbedding()],
        vector_store=vectors,
        docstore=docstore,
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    packs = KnowledgePackPostprocessor(
        engine=tiny_engine(), store=store, precompile="now", namespace="isles", lazy=True
    )
    index = VectorStoreIndex.from_vector_store(vectors, embed_model=CountingEmbedding())

    def found():
        return packs.postprocess_nodes(index.as_retriever(similarity_top_k=9).retrieve(QUESTION))

    mill, ship = (Document(text=f"The {name} of Veyl.", id_=name, metadata={"by": "Orla"}) for name in ("mill", "ship"))
    nodes = pipeline.run(documents=[mill, ship])
    assert len(found()) == len(list(store)) == 2
    assert packs.sync(vectors.get_nodes(None)) == []
    [changed] = pipeline.run(documents=[Document(text="The mill is gone.", id_="mill", metadata={"by": "Orla"})])
    found()
    removed = packs.sync(vectors.get_nodes(None))
    assert removed == sorted(str(store.handle(PackNode.from_node(node).llm_text(), "isles")) for node in nodes)
    assert [store.peek(handle).text for handle in store] == [PackNode.from_node(changed).llm_text()]


def test_the_empty_docstore_of_an_index_over_a_vector_store_removes_nothing(packs, nodes, store, tmp_path, caplog):
    collection = chromadb.PersistentClient(str(tmp_path)).create_collection("theirs")
    vectors = ChromaVectorStore(chroma_collection=collection)
    context = StorageContext.from_defaults(vector_store=vectors)
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=CountingEmbedding())
    assert packs.compile(index.docstore.docs.values(), progress=False) == []
    assert "get_nodes(None)" in caplog.text
    handles = packs.compile(vectors.get_nodes(None), progress=False)
    with pytest.raises(FactError, match=r"Got no nodes; nothing was removed.*get_nodes\(None\)"):
        packs.sync(index.docstore.docs.values())
    assert sorted(handles) == sorted(map(str, store))
    for of_nodes in (packs.compile, packs.sync):
        with pytest.raises(FactError, match=r"for a node; expected nodes, e.g. `index.docstore.docs.values\(\)`"):
            of_nodes({node.node_id: node for node in nodes})
    assert len(list(store)) == len(handles)


def test_bad_settings(store):
    with pytest.raises(ValueError, match="Acme Corp"):
        KnowledgePackPostprocessor(engine=tiny_engine(), store=store, namespace="Acme Corp")
    with pytest.raises(ValueError, match="precompile"):
        KnowledgePackPostprocessor(engine=tiny_engine(), store=store, precompile="later")


def test_equal_documents_are_no_news_and_one_outlives_the_other(packs, store):
    two = [Document(text="Return the key before nine.", id_=name) for name in ("a.md", "b.md")]
    index = VectorStoreIndex.from_documents(two, embed_model=CountingEmbedding())
    assert [index.refresh_ref_docs(two) for _ in range(2)] == [[False, False]] * 2

    def found():
        return packs.postprocess_nodes(index.as_retriever(similarity_top_k=4).retrieve("key"), query_str="key")

    assert sorted(scored.node.ref_doc_id for scored in found()) == ["a.md", "b.md"]
    assert len(list(store)) == 1
    index.delete_ref_doc("a.md", delete_from_docstore=True)
    packs.discard("a.md")
    assert index.refresh_ref_docs(two[1:]) == [False]
    [left] = found()
    assert (left.node.ref_doc_id, left.node.is_intact, len(list(store))) == ("b.md", True, 1)


def test_an_id_that_misses_that_of_a_document_is_answered_with_it(packs, store, caplog):
    documents = [Document(text="Return the key before nine.", id_="/notes/key.md"), Document(text="Ask.", id_="ask.md")]
    index = VectorStoreIndex.from_documents(documents, embed_model=CountingEmbedding())
    packs.compile(index.docstore.docs.values(), progress=False)
    for missed in ("key.md", "/notes/kay.md"):
        assert packs.discard(missed) == []
        assert f"No pack is of '{missed}', and none was removed. One is of '/notes/key.md'" in caplog.text
    [node] = (each for each in index.docstore.docs.values() if each.ref_doc_id == "/notes/key.md")
    assert packs.discard(node.node_id) == []
    assert f"No pack is of '{node.node_id}', and none was removed. One is of '/notes/key.md'" in caplog.text
    assert packs.discard("never-compiled.md") == []
    assert caplog.messages[-1] == "No pack is of 'never-compiled.md', and none was removed."
    caplog.clear()
    assert len(packs.discard("/notes/key.md")) == len(list(store)) == 1
    assert not caplog.text


@pytest.mark.parametrize("strategy", [DocstoreStrategy.UPSERTS, DocstoreStrategy.UPSERTS_AND_DELETE])
def test_a_pipeline_leaves_the_equal_text_of_another_document(packs, store, strategy):
    two = [Document(text="Return the key before nine.", id_=name) for name in ("a.md", "b.md")]
    vectors = ChromaVectorStore(chromadb.EphemeralClient().get_or_create_collection(f"equal-{strategy.name.lower()}"))
    parts = {"vector_store": vectors, "docstore": SimpleDocumentStore(), "docstore_strategy": strategy}
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(), CountingEmbedding()], **parts)
    assert [len(pipeline.run(documents=two)) for _ in range(2)] == [2, 0]
    changed = Document(text="Return it at ten.", id_="a.md")
    assert len(pipeline.run(documents=[changed, two[1]])) == 1
    index = VectorStoreIndex.from_vector_store(vectors, CountingEmbedding())
    found = packs.postprocess_nodes(index.as_retriever(similarity_top_k=4).retrieve("key"), query_str="key")
    assert {scored.node.ref_doc_id: scored.node.text for scored in found} == {
        "a.md": "Return it at ten.",
        "b.md": "Return the key before nine.",
    }
    assert len(list(store)) == 2
