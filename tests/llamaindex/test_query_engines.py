"""LlamaIndex's query engines and chat engines: packs answer as text does, in fewer calls."""

from typing import NamedTuple

import pytest
from llama_index.core import PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import CitationQueryEngine, SubQuestionQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE, CITATION_REFINE_TEMPLATE
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from llama_index.core.tools import QueryEngineTool, ToolMetadata

from kp_core import PackStore, find_handles, load_engine
from kp_llamaindex import KnowledgePackLLM, KnowledgePackPostprocessor, NumberSources, pack_place
from tests.conftest import tiny_engine
from tests.kits import CHATML, tiny_model, tiny_tokenizer
from tests.llamaindex.conftest import QUESTION, CountingEmbedding

MODES = [
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.SIMPLE_SUMMARIZE,
    ResponseMode.ACCUMULATE,
    ResponseMode.COMPACT_ACCUMULATE,
    ResponseMode.GENERATION,
]


class Isles(NamedTuple):
    """An index of LlamaIndex, an LLM, and what puts packs between them."""

    index: VectorStoreIndex
    llm: KnowledgePackLLM
    packs: KnowledgePackPostprocessor

    def as_query_engine(self, steps=(), content="handle", **settings):
        steps = [self.packs, *steps] if content == "handle" else [*steps]
        return self.index.as_query_engine(self.llm, node_postprocessors=steps, **settings)


def made_isles(engine, store, nodes, llm=None, **packing):
    llm = llm or KnowledgePackLLM(engine=engine, store=store, namespaces=["isles"], max_tokens=10)
    packs = KnowledgePackPostprocessor(engine=engine, store=store, namespace="isles", precompile="now", **packing)
    packs.compile(nodes, progress=False)
    return Isles(VectorStoreIndex(nodes, embed_model=CountingEmbedding()), llm, packs)


@pytest.fixture(scope="module")
def isles(nodes, chat_engine, tmp_path_factory):
    return made_isles(chat_engine, PackStore(tmp_path_factory.mktemp("isles")), nodes[:8])


def both(isles, chat_engine, **settings):
    """The answer from packs and the answer from text, each on a cold cache."""
    answers = []
    for content in ("handle", "text"):
        chat_engine.clear_cache()
        answers.append(isles.as_query_engine(content=content, **settings).query(QUESTION))
    return answers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.bundled
def test_packs_answer_as_text_does(mode, isles, chat_engine, usages):
    pack, text = both(isles, chat_engine, response_mode=mode, similarity_top_k=2)
    assert str(pack) == str(text) != ""
    half = len(usages) // 2
    assert len(usages) == 2 * half
    for with_packs, with_text in zip(usages[:half], usages[half:], strict=True):
        total = with_packs["prompt_tokens"] + with_packs["pack_tokens"]
        assert total == with_text["prompt_tokens"]
    delivered = sum(usage["pack_tokens"] for usage in usages[:half])
    assert delivered == 0 if mode == ResponseMode.GENERATION else delivered > 0


@pytest.mark.bundled
def test_citations_number_packs(isles, chat_engine, usages):
    prompts = {"text_qa_template": CITATION_QA_TEMPLATE, "refine_template": CITATION_REFINE_TEMPLATE}
    pack, text = both(isles, chat_engine, steps=[NumberSources()], **prompts, similarity_top_k=2)
    assert str(pack) == str(text)
    assert usages[0]["pack_tokens"] > 0 == usages[1]["pack_tokens"]
    assert [hit.text for hit in pack.source_nodes] == [hit.text for hit in text.source_nodes]
    assert not any(find_handles(hit.text) for hit in pack.source_nodes)


def test_llama_index_cites_texts(isles):
    engine = CitationQueryEngine.from_args(
        isles.index, llm=isles.llm, similarity_top_k=2, node_postprocessors=[isles.packs]
    )
    answer = engine.query(QUESTION)
    assert str(answer)
    assert all(hit.text.startswith("Source ") and not find_handles(hit.text) for hit in answer.source_nodes)


def test_streaming_and_async_answer_the_same(isles):
    whole = isles.as_query_engine(similarity_top_k=1).query(QUESTION)
    streamed = isles.as_query_engine(similarity_top_k=1, streaming=True).query(QUESTION)
    assert "".join(streamed.response_gen) == str(whole)


async def test_async_answers_the_same(isles):
    engine = isles.as_query_engine(similarity_top_k=1)
    assert str(await engine.aquery(QUESTION)) == str(engine.query(QUESTION))


@pytest.mark.bundled
def test_sub_questions(isles, usages):
    class TwoQuestions:
        def generate(self, tools, query):
            asked = [QUESTION, "What is the coin of the Orrelay Isles called?"]
            return [SubQuestion(sub_question=question, tool_name="isles") for question in asked]

    tool = QueryEngineTool(
        query_engine=isles.as_query_engine(similarity_top_k=1),
        metadata=ToolMetadata(name="isles", description="All about the isles."),
    )
    engine = SubQuestionQueryEngine.from_defaults(
        [tool], llm=isles.llm, question_gen=TwoQuestions(), use_async=False, verbose=False
    )
    answer = engine.query("Tell me about the flag and the coin.")
    assert str(answer)
    assert [usage["pack_tokens"] > 0 for usage in usages] == [True, True, False]


def test_a_chat_with_context(isles, chat_engine, usages):
    said = []
    for content in ("handle", "text"):
        chat_engine.clear_cache()
        steps = [isles.packs] if content == "handle" else []
        engine = isles.index.as_chat_engine(
            ChatMode.CONDENSE_PLUS_CONTEXT, isles.llm, similarity_top_k=2, node_postprocessors=steps
        )
        assert isinstance(engine, CondensePlusContextChatEngine)
        said.append([str(engine.chat(question)) for question in (QUESTION, "And what is the coin called?")])
    assert said[0] == said[1]
    assert usages[0]["pack_tokens"] > 0


@pytest.mark.parametrize("mode", [ChatMode.BEST, ChatMode.CONTEXT, ChatMode.CONDENSE_QUESTION])
def test_chat_engines_answer(mode, nodes, store, llm):
    isles = made_isles(tiny_engine(), store, nodes[:3], llm, lazy=True)
    engine = isles.index.as_chat_engine(mode, llm, similarity_top_k=2, node_postprocessors=[isles.packs])
    for question in (QUESTION, "And the coin?"):
        engine.chat(question)
    assert len(engine.chat_history) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("clean_settings")
def test_sixty_nodes_in_one_call(usages, store):
    model = tiny_model("llama")
    model.config.max_position_embeddings = 8192
    engine = load_engine(model, tokenizer=tiny_tokenizer(CHATML))
    nodes = [
        TextNode(
            id_=str(number), text=f"Room {number:02} of the castle is painted {number * 7919:06} and has a window. " * 2
        )
        for number in range(60)
    ]
    sizes = [len(engine.tokenizer.encode(node.text)) for node in nodes]
    assert 90 < min(sizes) <= max(sizes) < 120
    llm = KnowledgePackLLM(engine=engine, store=store, namespaces=["isles"], max_tokens=8)
    Settings.llm, Settings.tokenizer = llm, llm.token_ids
    index = made_isles(engine, store, nodes, llm, lazy=True)
    question = "Which room is painted 000000?"
    answer = index.as_query_engine(similarity_top_k=60).query(question)
    assert len(usages) == 1
    assert usages[0]["pack_tokens"] > 60 * 90
    texts = [hit.node.llm_text() for hit in answer.source_nodes]
    assert len(texts) == 60
    engine.clear_cache()
    one_prompt = DEFAULT_TEXT_QA_PROMPT_SEL.format_messages(llm=llm, context_str="\n\n".join(texts), query_str=question)
    assert llm.chat(one_prompt).message.content == str(answer) != ""
    usages.clear()
    index.as_query_engine(similarity_top_k=60, content="text").query(question)
    assert len(usages) > 1


@pytest.mark.parametrize("is_its", [True, False])
def test_packs_are_compiled_for_the_prompt_of_the_engine(is_its, store, usages):
    """The pack of the first node is then read from the store."""
    template = PromptTemplate("{context_str}\n\nQuestion: {query_str}\nAnswer:")
    nodes = [TextNode(text=f"Pier {number} has {number} boats and no cranes at all.") for number in range(3)]
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(CHATML), cache_bytes=20_000_000)
    llm = KnowledgePackLLM(engine=engine, store=store, namespaces=["isles"], max_tokens=4)
    made = made_isles(engine, store, nodes, llm, compiled_for=pack_place(template, llm) if is_its else None)
    asked = made.as_query_engine(similarity_top_k=1, text_qa_template=template)
    asked.query("How many boats?")
    engine.clear_cache()
    asked.query("How many cranes?")
    assert (usages[-1]["reused_tokens"] > 20) is is_its
