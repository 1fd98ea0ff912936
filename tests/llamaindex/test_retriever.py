"""`KnowledgePackRetriever` and `KnowledgePackIndex`: building packs, finding them, filters, pipelines."""

import asyncio
import logging

import pytest
from llama_index.core import Document, MockEmbedding, PromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.tools import RetrieverTool

from kp_core import Handle, MemoryFactStore, Packs, find_handles
from kp_core.errors import FactError, OptionError, PackError, PromptError
from kp_llamaindex import (
    KnowledgePackIndex,
    KnowledgePackMemoryBlock,
    KnowledgePackPostprocessor,
    KnowledgePackRetriever,
    pack_place,
)
from tests.conftest import tiny_engine, until
from tests.llamaindex.conftest import QUESTION


def test_nodes_are_handles_to_the_model(tiny_index, nodes, store):
    found = tiny_index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    by_id = {node.node_id: node for node in nodes}
    assert len(found) == 3
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    for hit in found:
        handle = Handle.parse(hit.node.get_content(MetadataMode.LLM))
        original = by_id[hit.node_id]
        assert store.get(handle).text == hit.node.get_content() == original.text
        assert hit.node.metadata == original.metadata


def test_in_text_form(tiny_index, nodes):
    retriever = tiny_index.as_retriever(content="text")
    handles = tiny_index.as_retriever().retrieve(QUESTION)
    texts = retriever.retrieve(QUESTION)
    assert [hit.node_id for hit in texts] == [hit.node_id for hit in handles]
    assert not any(find_handles(hit.get_content(MetadataMode.LLM)) for hit in texts)
    with pytest.raises(FactError, match="content='wave'"):
        tiny_index.as_retriever(content="wave")


async def test_async_equals_sync(tiny_index):
    retriever = tiny_index.as_retriever()
    assert await retriever.aretrieve(QUESTION) == retriever.retrieve(QUESTION)
    several = await asyncio.gather(*(retriever.aretrieve(f"{QUESTION} {number}") for number in range(4)))
    assert all(len(found) == 4 for found in several)


def test_score_cutoff(tiny_index):
    scores = [hit.score for hit in tiny_index.as_retriever(similarity_top_k=5).retrieve(QUESTION)]
    kept = tiny_index.as_retriever(similarity_top_k=5, score_cutoff=scores[1]).retrieve(QUESTION)
    assert [hit.score for hit in kept] == [score for score in scores if score >= scores[1]]
    assert len(kept) < 5


def test_a_fact_without_a_pack_is_compiled_when_it_is_found(tiny_index, nodes, store, caplog):
    handle = store.handle(nodes[0].text, "default")
    store.remove(handle)
    plain = KnowledgePackRetriever(tiny_index.fact_store, store, similarity_top_k=1)
    with caplog.at_level(logging.WARNING, "kp_core"):
        [hit] = plain.retrieve(nodes[0].text)
    assert hit.node.get_content(MetadataMode.LLM) == nodes[0].text
    assert f"no pack of fact {nodes[0].node_id!r}" in caplog.text
    later = tiny_index.as_retriever(similarity_top_k=1)
    [hit] = later.retrieve(nodes[0].text)
    assert hit.node.get_content(MetadataMode.LLM) == nodes[0].text
    until(lambda: store.peek(handle) is not None)
    assert later.retrieve(nodes[0].text)[0].node.handle == str(handle)
    store.remove(handle)
    [hit] = tiny_index.as_retriever(similarity_top_k=1, precompile="now").retrieve(nodes[0].text)
    assert (hit.node.handle, store.get(handle).is_lazy) == (str(handle), True)
    store.remove(handle)
    settings = {"lazy": False, "compress": "lossless", "precompile": "now"}
    tiny_index.as_retriever(similarity_top_k=1, **settings).retrieve(nodes[0].text)
    assert store.get(handle).compression == "lossless"


def test_a_store_is_a_store_or_its_path(embedder, tmp_path, nodes):
    for make in (
        lambda store: KnowledgePackPostprocessor(engine=tiny_engine(), store=store),
        lambda store: KnowledgePackRetriever(MemoryFactStore(embedder), store),
        lambda store: KnowledgePackIndex(tiny_engine(), store, MemoryFactStore(embedder)),
    ):
        assert make(str(tmp_path / "packs")).delivery.store.path == tmp_path / "packs"
        with pytest.raises(PackError, match=r"Got a int as store; expected a `kp_core\.PackStore`, its path"):
            make(7)
    index = KnowledgePackIndex(tiny_engine(), str(tmp_path / "packs"), MemoryFactStore(embedder), progress=False)
    index.insert_nodes(nodes[:1])
    assert [index.store.peek(handle).text for handle in index.store] == [nodes[0].text]


def test_errors(tiny_index, store, embedder, tmp_path):
    with pytest.raises(FactError, match="blank question"):
        tiny_index.as_retriever().retrieve("  ")
    with pytest.raises(FactError, match="k=0"):
        tiny_index.as_retriever(similarity_top_k=0).retrieve(QUESTION)
    with pytest.raises(FactError, match="brings its own"):
        KnowledgePackIndex.from_nodes(
            [], engine=tiny_engine(), store=store, fact_store=tiny_index.fact_store, path=tmp_path / "bank"
        )


def test_metadata_that_the_model_sees_is_in_the_pack(store, embedder):
    node = TextNode(text="Four sails.", metadata={"title": "Mill", "page": 7}, excluded_llm_metadata_keys=["page"])
    index = KnowledgePackIndex.from_nodes(
        [node], engine=tiny_engine(), store=store, fact_store=MemoryFactStore(embedder), lazy=True, progress=False
    )
    [hit] = index.as_retriever().retrieve("sails")
    assert store.get(Handle.parse(hit.get_content(MetadataMode.LLM))).text == node.get_content(MetadataMode.LLM)
    assert hit.text == "Four sails."


def test_the_first_pack_stands_where_the_prompt_has_it(tiny_index, store, usages):
    [hit] = tiny_index.as_retriever(similarity_top_k=1).retrieve(QUESTION)
    llm = tiny_index.llm.model_copy(update={"max_tokens": 1})
    engine = tiny_engine()
    tiny_index.delivery.kv = "stored"
    tiny_index.insert_nodes([hit.node])
    pack = store.get(Handle.parse(hit.get_content(MetadataMode.LLM)))
    assert not pack.is_lazy
    engine.clear_cache()
    tiny_index.as_query_engine(llm, similarity_top_k=1).query(QUESTION)
    assert usages[-1]["pack_tokens"] == usages[-1]["reused_tokens"] == len(pack.token_ids)


def test_pack_place():
    llm_prompt = PromptTemplate("Know:\n{context_str}\n\n{query_str}")
    assert pack_place(llm_prompt) == [{"role": "user", "content": "Know:\n{pack}\n\n?"}]
    with pytest.raises(PromptError, match="'query_str' stands before 'context_str'"):
        pack_place(PromptTemplate("{query_str} {context_str}"))
    with pytest.raises(PromptError, match="Got the variable 'context_str'"):
        pack_place(PromptTemplate("{query_str}"))


def test_documents_are_cut_as_asked(store, embedder):
    document = Document(text="One two three. " * 40, metadata={"title": "Count"})
    index = KnowledgePackIndex.from_documents(
        [document, Document(text="  ")],
        transformations=[SentenceSplitter(chunk_size=60, chunk_overlap=0)],
        engine=tiny_engine(),
        store=store,
        fact_store=MemoryFactStore(embedder),
        lazy=True,
        progress=False,
    )
    facts = list(index.fact_store.facts())
    assert len(facts) == len(store) > 1
    assert all(fact.text.startswith("title: Count\n\nOne") for fact in facts)


def test_a_retriever_tool_sends_handles_and_keeps_text(tiny_index):
    tool = RetrieverTool.from_defaults(
        tiny_index.as_retriever(similarity_top_k=2), name="search", description="Search."
    )
    output = tool.call(QUESTION)
    assert len(find_handles(output.content)) == 2
    assert all(not find_handles(hit.get_content()) for hit in output.raw_output)


def test_postprocessors_that_rewrite_text_are_obeyed(tiny_index, usages):
    class Redactor(BaseNodePostprocessor):
        def _postprocess_nodes(self, nodes, query_bundle=None):
            for hit in nodes:
                hit.node.set_content("[REDACTED]")
            return nodes

    llm = tiny_index.llm.model_copy(update={"max_tokens": 1})
    tiny_index.as_query_engine(llm, node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0)]).query(QUESTION)
    tiny_index.as_query_engine(llm, node_postprocessors=[Redactor()]).query(QUESTION)
    assert usages[0]["pack_tokens"] > 0 == usages[1]["pack_tokens"]
    # The next search finds the facts as they are.
    assert all(hit.node.is_intact for hit in tiny_index.as_retriever().retrieve(QUESTION))


def test_llms_that_resolve_no_handles_get_text(tiny_index, caplog):
    with caplog.at_level(logging.WARNING, "kp_llamaindex"):
        answer = tiny_index.as_query_engine(MockLLM(), similarity_top_k=1).query(QUESTION)
    assert "MockLLM resolves no handles; nodes go to it as text." in caplog.text
    assert answer.source_nodes[0].text in answer.response


@pytest.mark.parametrize("mode", [ChatMode.BEST, ChatMode.CONTEXT, ChatMode.CONDENSE_QUESTION, ChatMode.SIMPLE])
def test_chat_engines_answer(mode, tiny_index):
    llm = tiny_index.llm.model_copy(update={"max_tokens": 4})
    settings = {} if mode == ChatMode.SIMPLE else {"similarity_top_k": 2}
    engine = tiny_index.as_chat_engine(mode, llm, **settings)
    for question in (QUESTION, "And the coin?"):
        engine.chat(question)
    assert len(engine.chat_history) == 4


def test_chat_modes_that_are_gone(tiny_index):
    with pytest.raises(ValueError, match="deprecated and removed"):
        tiny_index.as_chat_engine(ChatMode.REACT)


def test_in_chroma_by_path(nodes, tmp_path, store, embedder):
    settings = {"engine": tiny_engine(), "store": store, "lazy": True, "progress": False}
    first = KnowledgePackIndex.from_nodes(nodes[:6], embedder=embedder, path=tmp_path / "bank", **settings)
    found = first.as_retriever().retrieve(QUESTION)
    first.fact_store.close()
    again = KnowledgePackIndex.from_nodes([], embedder=embedder, path=tmp_path / "bank", **settings)
    assert again.as_retriever().retrieve(QUESTION) == found
    again.fact_store.close()


# Units and options


@pytest.mark.parametrize("unit", ["bank", "document"])
def test_nodes_of_whole_banks_and_documents(unit, store, embedder):
    nodes = [TextNode(text=f"House {number} is green.", metadata={"source": f"{number % 2}.md"}) for number in range(6)]
    for node in nodes:
        node.excluded_llm_metadata_keys = ["source"]
    index = KnowledgePackIndex.from_nodes(
        nodes,
        engine=tiny_engine(),
        store=store,
        fact_store=MemoryFactStore(embedder, bank_size=3),
        unit=unit,
        lazy=True,
        progress=False,
    )
    found = index.as_retriever(similarity_top_k=9).retrieve("house")
    units = [hit.text.split("\n") for hit in found]
    assert sorted(line for unit in units for line in unit) == [node.text for node in nodes]
    assert len(found) == len(store) == (2 if unit == "document" else len(index.fact_store.banks()))
    for hit in found:
        assert store.get(Handle.parse(hit.node.get_content(MetadataMode.LLM))).text == hit.text
    assert index.as_retriever(unit="fact", similarity_top_k=9, content="text").retrieve("house")[0].text in str(units)


def test_misspelt_options_are_refused_before_anything_is_made(nodes, store, embedder, tiny_index, tmp_path):
    made = {"engine": tiny_engine(), "store": store}
    bank = MemoryFactStore(embedder)
    for ask, says in (
        (lambda: KnowledgePackRetriever(bank, store, similarity_topk=2), "Did you mean 'similarity_top_k'"),
        (lambda: KnowledgePackRetriever(bank, store, k=2), "has no option 'k'"),
        (lambda: KnowledgePackRetriever(bank, store, filter=1), "'filters'"),
        (lambda: KnowledgePackIndex(tiny_engine(), store, bank, lasy=True), "Did you mean 'lazy'"),
        (lambda: KnowledgePackIndex.from_nodes([], fact_store=bank, lasy=True, **made), "Did you mean 'lazy'"),
        (lambda: KnowledgePackPostprocessor(precompiled="use", **made), "Did you mean 'precompile'"),
        (lambda: tiny_index.as_retriever(scorecutoff=0.5), "Did you mean 'score_cutoff'"),
        (lambda: tiny_index.as_query_engine(respons_mode="compact"), "Did you mean 'response_mode'"),
        (lambda: tiny_index.as_chat_engine(system_promt="Be brief."), "Did you mean 'system_prompt'"),
    ):
        with pytest.raises(OptionError, match=says):
            ask()
    assert (len(bank), (tmp_path / "b").exists()) == (0, False)


def test_what_is_no_fact_store_is_named(store):
    for make in (
        lambda: KnowledgePackRetriever(MockEmbedding(embed_dim=2), store),
        lambda: KnowledgePackIndex(tiny_engine(), store, MockEmbedding(embed_dim=2)),
    ):
        with pytest.raises(FactError, match=r"MockEmbedding'> as fact store; expected a FactStore"):
            make()
    with pytest.raises(FactError, match=r"MockLLM'> as embedder; expected an Embedder"):
        KnowledgePackIndex.from_nodes([], engine=tiny_engine(), store=store, embedder=MockLLM(), progress=False)


def test_any_store_that_keeps_the_protocol_will_do(nodes, store, embedder, usages):
    class Toy(Packs):
        handle, peek, get, put, remove = store.handle, store.peek, store.get, store.put, store.remove

        def __iter__(self):
            return iter(store)

    toy = Toy()
    index = KnowledgePackIndex.from_nodes(
        nodes[:3], engine=tiny_engine(), store=toy, fact_store=MemoryFactStore(embedder), lazy=True, progress=False
    )
    index.as_query_engine(index.llm.model_copy(update={"max_tokens": 1})).query(QUESTION)
    assert usages[-1]["pack_tokens"] > 0
    memory = KnowledgePackMemoryBlock(store=toy, engine=tiny_engine(), lazy=True)
    asyncio.run(memory.aput([ChatMessage("Four sails.")]))
    assert memory.text() == "user: Four sails.\n"
