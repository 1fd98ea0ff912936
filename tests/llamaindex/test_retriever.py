"""`KnowledgePackRetriever`: facts as nodes with packs, and what is refused."""

import asyncio
import logging
from functools import partial

import pytest
from llama_index.core import MockEmbedding, PromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.tools import RetrieverTool

from kp_core import Fact, Handle, MemoryFactStore, Packs, find_handles
from kp_core.errors import FactError, OptionError, PackError, PromptError
from kp_llamaindex import (
    KnowledgePackLLM,
    KnowledgePackMemoryBlock,
    KnowledgePackPostprocessor,
    KnowledgePackRetriever,
    pack_place,
)
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import QUESTION


def test_nodes_are_handles_to_the_model(retriever_of, nodes, store):
    found = retriever_of(similarity_top_k=3).retrieve(QUESTION)
    by_id = {node.node_id: node for node in nodes}
    assert len(found) == 3
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    for hit in found:
        handle = Handle.parse(hit.node.get_content(MetadataMode.LLM))
        original = by_id[hit.node_id]
        assert store.get(handle).text == hit.node.get_content() == original.text
        assert hit.node.metadata == original.metadata


def test_in_text_form(retriever_of, nodes):
    retriever = retriever_of(content="text")
    handles = retriever_of().retrieve(QUESTION)
    texts = retriever.retrieve(QUESTION)
    assert [hit.node_id for hit in texts] == [hit.node_id for hit in handles]
    assert not any(find_handles(hit.get_content(MetadataMode.LLM)) for hit in texts)
    with pytest.raises(FactError, match="content='wave'"):
        retriever_of(content="wave")


async def test_async_equals_sync(retriever_of):
    retriever = retriever_of()
    assert await retriever.aretrieve(QUESTION) == retriever.retrieve(QUESTION)
    several = await asyncio.gather(*(retriever.aretrieve(f"{QUESTION} {number}") for number in range(4)))
    assert all(len(found) == 4 for found in several)


def test_score_cutoff(retriever_of):
    scores = [hit.score for hit in retriever_of(similarity_top_k=5).retrieve(QUESTION)]
    kept = retriever_of(similarity_top_k=5, score_cutoff=scores[1]).retrieve(QUESTION)
    assert [hit.score for hit in kept] == [score for score in scores if score >= scores[1]]
    assert len(kept) < 5


def test_a_fact_without_a_pack_is_compiled_when_it_is_found(retriever_of, nodes, store, caplog):
    handle = store.handle(nodes[0].text, "default")
    store.remove(handle)
    plain = KnowledgePackRetriever(retriever_of().delivery.facts, store, similarity_top_k=1)
    with caplog.at_level(logging.WARNING, "kp_core"):
        [hit] = plain.retrieve(nodes[0].text)
    assert hit.node.get_content(MetadataMode.LLM) == nodes[0].text
    assert f"no pack of fact {nodes[0].node_id!r}" in caplog.text
    later = retriever_of(similarity_top_k=1)
    [hit] = later.retrieve(nodes[0].text)
    assert hit.node.get_content(MetadataMode.LLM) == str(handle)
    assert later.retrieve(nodes[0].text)[0].node.handle == str(handle)
    store.remove(handle)
    [hit] = retriever_of(similarity_top_k=1, precompile="now").retrieve(nodes[0].text)
    assert (hit.node.handle, store.get(handle).is_lazy) == (str(handle), True)
    store.remove(handle)
    settings = {"lazy": False, "compress": "lossless", "precompile": "now"}
    retriever_of(similarity_top_k=1, **settings).retrieve(nodes[0].text)
    assert store.get(handle).compression == "lossless"


def test_a_store_is_a_store_or_its_path(embedder, tmp_path):
    for make in (
        lambda store: KnowledgePackPostprocessor(engine=tiny_engine(), store=store),
        lambda store: KnowledgePackRetriever(MemoryFactStore(embedder), store),
    ):
        assert make(str(tmp_path / "packs")).delivery.store.path == tmp_path / "packs"
        with pytest.raises(PackError, match=r"Got a int as store; expected a `kp_core\.PackStore`, its path"):
            make(7)


def test_errors(retriever_of):
    with pytest.raises(FactError, match="blank question"):
        retriever_of().retrieve("  ")
    with pytest.raises(FactError, match="k=0"):
        retriever_of(similarity_top_k=0).retrieve(QUESTION)


def test_metadata_that_the_model_sees_is_in_the_pack(store):
    node = TextNode(text="Four sails.", metadata={"title": "Mill", "page": 7}, excluded_llm_metadata_keys=["page"])
    packs = KnowledgePackPostprocessor(engine=tiny_engine(), store=store, lazy=True, precompile="now")
    [hit] = packs.postprocess_nodes([NodeWithScore(node=node)])
    assert store.get(Handle.parse(hit.get_content(MetadataMode.LLM))).text == node.get_content(MetadataMode.LLM)
    assert hit.text == "Four sails."


def test_pack_place():
    llm_prompt = PromptTemplate("Know:\n{context_str}\n\n{query_str}")
    assert pack_place(llm_prompt) == [{"role": "user", "content": "Know:\n{pack}\n\n?"}]
    with pytest.raises(PromptError, match="'query_str' stands before 'context_str'"):
        pack_place(PromptTemplate("{query_str} {context_str}"))
    with pytest.raises(PromptError, match="Got the variable 'context_str'"):
        pack_place(PromptTemplate("{query_str}"))


def test_a_retriever_tool_sends_handles_and_keeps_text(retriever_of):
    tool = RetrieverTool.from_defaults(retriever_of(similarity_top_k=2), name="search", description="Search.")
    output = tool.call(QUESTION)
    assert len(find_handles(output.content)) == 2
    assert all(not find_handles(hit.get_content()) for hit in output.raw_output)


def test_postprocessors_that_rewrite_text_are_obeyed(retriever_of, llm, usages):
    class Redactor(BaseNodePostprocessor):
        def _postprocess_nodes(self, nodes, query_bundle=None):
            for hit in nodes:
                hit.node.set_content("[REDACTED]")
            return nodes

    for step in (SimilarityPostprocessor(similarity_cutoff=0), Redactor()):
        RetrieverQueryEngine.from_args(retriever_of(), llm, node_postprocessors=[step]).query(QUESTION)
    assert usages[0]["pack_tokens"] > 0 == usages[1]["pack_tokens"]
    # The next search finds the facts as they are.
    assert all(hit.node.is_intact for hit in retriever_of().retrieve(QUESTION))


# Units and options


@pytest.mark.parametrize("unit", ["bank", "document"])
def test_nodes_of_whole_banks_and_documents(unit, store, embedder):
    facts = [Fact(f"House {number} is green.", source=f"{number % 2}.md") for number in range(6)]
    make = partial(KnowledgePackRetriever, MemoryFactStore(embedder, bank_size=3), store, engine=tiny_engine())
    retriever = make(unit=unit, lazy=True, similarity_top_k=9)
    retriever.delivery.add(facts, progress=False)
    found = retriever.retrieve("house")
    units = [hit.text.split("\n") for hit in found]
    assert sorted(line for unit in units for line in unit) == [fact.text for fact in facts]
    assert len(found) == len(store) == (2 if unit == "document" else len(retriever.delivery.facts.banks()))
    for hit in found:
        assert store.get(Handle.parse(hit.node.get_content(MetadataMode.LLM))).text == hit.text
    assert make(unit="fact", similarity_top_k=9, content="text").retrieve("house")[0].text in str(units)


def test_misspelt_options_are_refused_before_anything_is_made(store, embedder):
    made = {"engine": tiny_engine(), "store": store}
    bank = MemoryFactStore(embedder)
    for ask, says in (
        (lambda: KnowledgePackRetriever(bank, store, similarity_topk=2), "Did you mean 'similarity_top_k'"),
        (lambda: KnowledgePackRetriever(bank, store, k=2), "has no option 'k'"),
        (lambda: KnowledgePackRetriever(bank, store, filter=1), "'filters'"),
        (lambda: KnowledgePackRetriever(bank, store, lasy=True), "Did you mean 'lazy'"),
        (lambda: KnowledgePackRetriever(bank, store, scorecutoff=0.5), "Did you mean 'score_cutoff'"),
        (lambda: KnowledgePackPostprocessor(precompiled="use", **made), "Did you mean 'precompile'"),
    ):
        with pytest.raises(OptionError, match=says):
            ask()
    assert (len(bank), list(store)) == (0, [])


def test_what_is_no_fact_store_is_named(store):
    with pytest.raises(FactError, match=r"MockEmbedding'> as fact store; expected a FactStore"):
        KnowledgePackRetriever(MockEmbedding(embed_dim=2), store)


def test_any_store_that_keeps_the_protocol_will_do(nodes, store):
    class Toy(Packs):
        handle, peek, get, put, remove = store.handle, store.peek, store.get, store.put, store.remove

        def __iter__(self):
            return iter(store)

    toy = Toy()
    packs = KnowledgePackPostprocessor(engine=tiny_engine(), store=toy, lazy=True, precompile="now")
    [hit] = packs.postprocess_nodes([NodeWithScore(node=nodes[0])])
    llm = KnowledgePackLLM(engine=tiny_engine(), store=toy, namespaces=["default"], max_tokens=1)
    assert llm.complete(hit.node.handle).raw["kp"]["pack_tokens"] > 0
    memory = KnowledgePackMemoryBlock(store=toy, engine=tiny_engine(), lazy=True)
    asyncio.run(memory.aput([ChatMessage("Four sails.")]))
    assert memory.text() == "user: Four sails.\n"
