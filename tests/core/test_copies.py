"""Copies share engines and stores; pickles travel as the call that opens them, or say what to do."""
# ruff: noqa: S301 - the pickles are our own

import asyncio
import copy
import multiprocessing
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import llama_index.core
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from llama_index.core.extractors import KeywordExtractor
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import Document, TextNode
from pydantic import BaseModel

from kp_core import PackStore, PackView, load_engine, pickling
from kp_core.banks import ChromaFactStore, Fact, MemoryFactStore
from kp_core.banks.embed import SentenceTransformerEmbedder
from kp_core.errors import ModelError, PackError
from kp_langchain import ChatKnowledgePacks
from kp_langchain import KnowledgePackRetriever as LangChainRetriever
from kp_llamaindex import KnowledgePackLLM, KnowledgePackMemoryBlock, KnowledgePackPostprocessor, NumberSources
from kp_llamaindex import KnowledgePackRetriever as LlamaIndexRetriever
from tests.kits import HashEmbedder, tiny_model, tiny_tokenizer

TEXT = "The gate of the harbour is green and old, and nobody knows who painted it."
KINDS = (
    "session",
    "packs",
    "memory",
    "chroma",
    "embedder",
    "chat",
    "bound",
    "llm",
    "found",
    "wrapped",
    "nodes",
    "post",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def parts_of(engine, folder):
    """One of each that holds `engine` or a store, with what it answers."""
    store, facts = PackStore(folder / "packs"), MemoryFactStore(HashEmbedder())
    chroma = ChromaFactStore(folder / "facts", HashEmbedder())
    for each in (facts, chroma):
        each.add([Fact(TEXT)])
    chat = ChatKnowledgePacks(engine=engine, store=store, namespaces="default", max_tokens=3)
    found = LangChainRetriever(fact_store=chroma, store=store, engine=engine)
    node = TextNode(text=TEXT)
    return {
        "session": (engine, lambda of: of.generate("Hi", max_tokens=3).token_ids),
        "packs": (store, lambda of: str(of.handle(TEXT, "default"))),
        "memory": (facts, lambda of: [hit.fact.text for hit in of.search(TEXT, 1)]),
        "chroma": (chroma, lambda of: [hit.fact.text for hit in of.search(TEXT, 1)]),
        "embedder": (SentenceTransformerEmbedder("a/b", query_prompt="q: "), repr),
        "chat": (chat, lambda of: of.invoke("Hi").text),
        "bound": (chat.bind(max_tokens=2), lambda of: asyncio.run(of.ainvoke("Hi")).text),
        "llm": (KnowledgePackLLM(engine=engine, max_tokens=3), lambda of: of.complete("Hi").text),
        "found": (found, lambda of: [document.page_content for document in of.invoke(TEXT)]),
        "wrapped": (
            LangChainRetriever.from_retriever(found, store=store, engine=engine),
            lambda of: [document.page_content for document in of.invoke(TEXT)],
        ),
        "nodes": (LlamaIndexRetriever(chroma, store=store, engine=engine), lambda of: of.retrieve(TEXT)[0].text),
        "post": (
            KnowledgePackPostprocessor(engine=engine, store=store),
            lambda of: of.compile([node]),
        ),
    }


@pytest.fixture(scope="module", params=["folder", "object"])
def parts(request, folder, tmp_path_factory):
    loaded = folder if request.param == "folder" else tiny_model("llama")
    engine = load_engine(loaded, tokenizer=tiny_tokenizer() if loaded != folder else None, dtype="float32")
    engine.generate("Hi", max_tokens=1)  # What is made on first use is there, too.
    made = parts_of(engine, tmp_path_factory.mktemp("stores"))
    yield made
    made["chroma"][0].close()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_share_the_engine_and_the_store(kind, parts):
    part, ask = parts[kind]
    expected = ask(part)
    copies = [copy.copy(part), copy.deepcopy(part), copy.deepcopy({"a": [part]})["a"][0]]
    if hasattr(part, "model_copy"):
        copies += [part.model_copy(deep=True), part.model_copy()]
    for copied in copies:
        assert ask(copied) == expected
        assert getattr(copied, "engine", None) is getattr(part, "engine", None)
        assert getattr(copied, "store", None) is getattr(part, "store", None)
        assert getattr(copied, "fact_store", None) is getattr(part, "fact_store", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_travels_as_what_opens_it_or_says_what_to_do(kind, parts, request):
    part, ask = parts[kind]
    is_object = "object" in request.node.callspec.id
    if kind == "memory" or (is_object and kind not in ("packs", "chroma", "embedder")):
        with pytest.raises((ModelError, TypeError), match="cannot be pickled"):
            pickle.dumps(part)
        return
    sent = pickle.dumps(part)
    assert len(sent) < 50_000, "no weights"
    assert ask(pickle.loads(sent)) == ask(part)


class Colour(BaseModel):
    """An answer of a fixed form."""

    name: bool


TOOL = {"name": "look", "description": "Looks."}
WRAPPED = {
    "not loaded": lambda of: ChatKnowledgePacks(model=of.folder, dtype="float32", max_tokens=3),
    "llm not loaded": lambda of: KnowledgePackLLM(model=of.folder, dtype="float32", max_tokens=3),
    "tools": lambda of: of.chat.bind_tools([TOOL]),
    "a tool that must be called": lambda of: of.chat.bind_tools([TOOL], tool_choice="look", max_tokens=90),
    "structured": lambda of: of.chat.model_copy(update={"max_tokens": 60}).with_structured_output(Colour),
    "structured by a call": lambda of: of.chat.model_copy(update={"max_tokens": 90}).with_structured_output(
        Colour, method="function_calling"
    ),
    "chain": lambda of: ChatPromptTemplate([("human", "{x}")]) | of.chat | StrOutputParser(),
    "parallel": lambda of: RunnableParallel(a=of.chat, b=of.chat),
    "fallbacks": lambda of: of.chat.with_fallbacks([of.chat.bind(max_tokens=1)]),
    "retries": lambda of: of.chat.with_retry(),
    "configurable": lambda of: of.chat.configurable_fields(max_tokens=ConfigurableField(id="n")),
    "tagged": lambda of: of.chat.with_config(tags=["x"], metadata={"a": 1}),
    "settings": lambda of: ChatKnowledgePacks(engine=of.engine, stop=["x"], temperature=1.0, seed=3, max_tokens=3),
    "composer": lambda of: ChatKnowledgePacks(engine=of.engine, composer="splice", max_tokens=3),
    "handles": lambda of: LangChainRetriever(fact_store=of.facts, store=of.store, engine=of.engine, content="handle"),
    "banks": lambda of: LangChainRetriever(fact_store=of.facts, store=of.store, engine=of.engine, unit="bank"),
    "retriever in a chain": lambda of: of.found | RunnableLambda(len),
    "query engine": lambda of: RetrieverQueryEngine.from_args(
        LlamaIndexRetriever(of.facts, store=of.store, engine=of.engine),
        llm=KnowledgePackLLM(engine=of.engine, max_tokens=3),
        node_postprocessors=[NumberSources()],
    ),
    "memory": lambda of: KnowledgePackMemoryBlock(engine=of.engine, store=of.store, name="m"),
    "view": lambda of: of.store.view("default"),
    "list": lambda of: [of.chat, {"llm": KnowledgePackLLM(engine=of.engine, max_tokens=3)}, of.found],
}


def asked(part):  # noqa: PLR0911 - one kind after the other
    """What a part answers, by whichever method it has."""
    if isinstance(part, list):
        return [asked(part[0]), asked(part[1]["llm"]), asked(part[2])]
    if isinstance(part, KnowledgePackLLM):
        return part.complete("Hi").text
    if isinstance(part, RetrieverQueryEngine):
        return str(part.query(TEXT))
    if isinstance(part, KnowledgePackMemoryBlock):
        return part.name, part.engine.generate("Hi", max_tokens=2).token_ids
    if isinstance(part, PackView):
        return part.namespaces, str(part.source.handle(TEXT, "default"))
    answer = part.invoke({"x": "Hi"} if "PromptTemplate" in repr(part)[:200] else TEXT)
    if isinstance(answer, dict):
        return {name: said.text for name, said in answer.items()}
    if isinstance(answer, AIMessage):
        return answer.text, [call["name"] for call in answer.tool_calls]
    return [each.page_content for each in answer] if isinstance(answer, list) else answer


@pytest.fixture(scope="module")
def shared(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("wrapped")
    engine, store = load_engine(folder, dtype="float32"), PackStore(path / "packs")
    with ChromaFactStore(path / "facts", HashEmbedder()) as facts:
        facts.add([Fact(TEXT)])
        chat = ChatKnowledgePacks(engine=engine, store=store, namespaces="default", max_tokens=3)
        found = LangChainRetriever(fact_store=facts, store=store, engine=engine)
        yield SimpleNamespace(folder=folder, engine=engine, store=store, facts=facts, chat=chat, found=found)


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_holds_a_model_is_copied_and_pickled_with_it(kind, shared):
    part = WRAPPED[kind](shared)
    expected = asked(part)
    copies = [copy.copy(part), copy.deepcopy(part), copy.deepcopy({"in": (part,)})["in"][0]]
    copies += [part.model_copy(deep=True), part.model_copy()] if hasattr(part, "model_copy") else []
    sent = pickle.dumps(part)
    assert len(sent) < 50_000, "no weights"
    for copied in (*copies, pickle.loads(sent), copy.deepcopy(pickle.loads(sent))):
        assert asked(copied) == expected


def test_another_process_opens_each_once(folder, monkeypatch):
    engine = load_engine(folder, dtype="float32", chunk_tokens=16)
    sent = pickle.dumps(
        (ChatKnowledgePacks(engine=engine, max_tokens=3), KnowledgePackLLM(engine=engine, max_tokens=3))
    )
    expected = engine.generate("Hi", max_tokens=3).text
    monkeypatch.setattr(pickling, "_here", {})  # As in a process that has none of them.
    (chat, llm), (again, _) = pickle.loads(sent), pickle.loads(sent)
    assert chat.engine is llm.engine is again.engine is not engine
    assert chat.engine.engine.scheduler.pass_tokens == 16
    assert chat.invoke("Hi").text == llm.complete("Hi").text == expected
    assert pickle.loads(pickle.dumps(chat.engine)) is chat.engine


@pytest.mark.slow
def test_a_spawned_process_answers_from_a_pickle(folder, tmp_path):
    engine = load_engine(folder, dtype="float32")
    chat = ChatKnowledgePacks(engine=engine, store=PackStore(tmp_path), namespaces="default", max_tokens=3)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(chat.invoke, ("Hi",)).text == chat.invoke("Hi").text


def test_what_another_process_cannot_open_raises_at_its_first_use(folder, tmp_path, monkeypatch):
    moved = tmp_path / "model"
    shutil.copytree(folder, moved)
    sent = pickle.dumps(KnowledgePackLLM(engine=load_engine(moved, dtype="float32"), max_tokens=3))
    monkeypatch.setattr(pickling, "_here", {})
    moved.rename(tmp_path / "elsewhere")
    llm = pickle.loads(sent)  # Does not raise: a pool would wait forever for that worker.
    with pytest.raises(ModelError, match="model"):
        llm.complete("Hi")
    (tmp_path / "elsewhere").rename(moved)
    assert pickle.loads(sent).complete("Hi").text


@pytest.mark.slow
def test_a_pool_tells_that_its_workers_cannot_open_the_model(folder, tmp_path):
    moved = tmp_path / "model"
    shutil.copytree(folder, moved)
    chat = ChatKnowledgePacks(engine=load_engine(moved, dtype="float32"), max_tokens=3)
    moved.rename(tmp_path / "elsewhere")
    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(ModelError, match="model"):
        pool.apply_async(chat.invoke, ("Hi",)).get(timeout=120)


def test_a_secret_is_not_pickled(tmp_path, monkeypatch):
    store = PackStore(tmp_path, secret="ab" * 32)
    with pytest.raises(PackError, match="KP_SECRET"):
        pickle.dumps(store)
    assert copy.deepcopy(store) is store
    bounded = pickle.dumps(PackStore(tmp_path / "other", max_bytes=10**6, keep_seconds=9))
    monkeypatch.setattr(pickling, "_here", {})
    assert (pickle.loads(bounded).quota.max_bytes, pickle.loads(bounded).quota.keep_seconds) == (10**6, 9)


def test_a_graph_whose_model_was_copied_answers_and_shares_the_engine(folder):
    engine = load_engine(folder, dtype="float32")
    chat = ChatKnowledgePacks(engine=engine, max_tokens=3)
    expected = chat.invoke("Hi").text
    for model in (chat, chat.model_copy(deep=True)):
        agent = create_agent(model, [], checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1", "model": model}}
        copied = copy.deepcopy(config)
        assert copied["configurable"]["model"].engine is engine
        assert agent.invoke({"messages": [("user", "Hi")]}, copied)["messages"][-1].text == expected


def test_a_graph_with_the_model_in_its_state_answers(folder):
    chat = ChatKnowledgePacks(engine=load_engine(folder, dtype="float32"), max_tokens=3)
    graph = StateGraph(dict)
    graph.add_node("ask", lambda state: {"answer": copy.deepcopy(state)["model"].invoke("Hi").text})
    graph.add_edge(START, "ask")
    assert graph.compile().invoke({"model": chat})["answer"] == chat.invoke("Hi").text


@pytest.mark.slow
def test_an_ingestion_pipeline_runs_our_model_and_reads_its_answers_from_the_cache(folder):
    llm = KnowledgePackLLM(engine=load_engine(folder, dtype="float32"), max_tokens=3)
    steps = [SentenceSplitter(chunk_size=64, chunk_overlap=0), KeywordExtractor(llm=llm, keywords=2, num_workers=1)]
    documents = [Document(text=f"{TEXT} It is gate {number}.", id_=str(number)) for number in range(4)]
    cache = IngestionCache()
    runs = [IngestionPipeline(transformations=steps, cache=cache).run(documents=documents) for _ in range(2)]
    first, again = ([node.metadata["excerpt_keywords"] for node in run] for run in runs)
    assert len(first) == 4
    assert first == again
    assert llm.engine is copy.deepcopy(steps)[1].llm.engine


@pytest.mark.slow
def test_workers_of_an_ingestion_pipeline_load_our_model(folder, tmp_path, monkeypatch):
    # Workers load LlamaIndex's own tokenizer by its name, from the network unless this folder has it.
    cache = Path(llama_index.core.__file__).parent / "_static/tiktoken_cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    llm = KnowledgePackLLM(engine=load_engine(folder, dtype="float32"), max_tokens=3)
    steps = [SentenceSplitter(chunk_size=64, chunk_overlap=0), KeywordExtractor(llm=llm, keywords=2, num_workers=1)]
    documents = [Document(text=f"{TEXT} It is gate {number}.", id_=str(number)) for number in range(2)]
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(IngestionPipeline(transformations=steps).run, documents=documents, num_workers=2)
        nodes = run.result(timeout=300)
    alone = IngestionPipeline(transformations=steps).run(documents=documents)
    assert [node.metadata for node in nodes] == [node.metadata for node in alone]
    assert all("excerpt_keywords" in node.metadata for node in nodes)
