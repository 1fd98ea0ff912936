"""A namespace is the same everywhere: both retrievers deliver, show and count what is in theirs, and nothing else."""

import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from kp_core import Fact, Handle, MemoryFactStore, PackStore, find_handles
from kp_core.errors import PromptError
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever, create_pack_search_tool, resolve_documents
from kp_llamaindex import KnowledgePackPostprocessor
from kp_llamaindex import KnowledgePackRetriever as NodeRetriever
from tests.conftest import tiny_engine
from tests.llamaindex.conftest import LetterEmbedder

MINE = [Fact(f"The gate of house {number} is green.") for number in range(6)]
THEIRS = [Fact(f"The secret of house {number} is red.", namespace="theirs") for number in range(6)]
QUESTION = "What is the secret of house 3?"


@pytest.fixture
def store(tmp_path):
    return PackStore(tmp_path / "packs")


def documents(facts, store, held, **settings):
    made = KnowledgePackRetriever.from_facts(
        facts, engine=tiny_engine(), store=store, fact_store=held, namespace="mine", k=99, kv="lazy", **settings
    )
    return [(each.page_content, each.metadata["kp"]["handle"], str(each.metadata)) for each in made.invoke(QUESTION)]


def nodes(facts, store, held, **settings):
    made = NodeRetriever(
        held, store, engine=tiny_engine(), namespace="mine", similarity_top_k=99, lazy=True, **settings
    )
    made.delivery.add(facts, progress=False)
    return [(hit.text, hit.node.handle, str(hit.node.metadata)) for hit in made.retrieve(QUESTION)]


@pytest.mark.parametrize("unit", ["fact", "bank", "document"])
@pytest.mark.parametrize("given", ["before", "with them"])
@pytest.mark.parametrize("retrieve", [documents, nodes])
def test_a_retriever_sees_its_namespace_alone(retrieve, given, unit, store):
    held = MemoryFactStore(LetterEmbedder(), bank_size=4)
    if given == "before":
        held.add([*MINE[:2], *THEIRS])
    found = retrieve(MINE if given == "before" else [*MINE, *THEIRS], store, held, unit=unit)
    texts = [line for text, _, _ in found for line in text.split("\n")]
    assert sorted(texts) == [fact.text for fact in MINE]
    assert "secret" not in str(found)
    assert {handle.partition("/")[0] for _, handle, _ in found} == {"kp:mine"}
    # Packs are made where their facts are, and of nobody's facts but those given.
    spaces = {handle.namespace: store.peek(handle).text for handle in store}
    assert set(spaces) == ({"mine"} if given == "before" else {"mine", "theirs"})
    assert all("secret" in store.peek(handle).text for handle in store.handles("theirs"))
    assert not any("secret" in store.peek(handle).text for handle in store.handles("mine"))


@pytest.mark.parametrize("retrieve", [documents, nodes])
def test_a_filter_does_not_open_another_namespace(retrieve, store):
    held = MemoryFactStore(LetterEmbedder())
    marked = [Fact(fact.text, namespace=fact.namespace, metadata={"namespace": "mine"}) for fact in THEIRS]
    found = retrieve([*MINE, *marked], store, held)
    assert len(found) == len(MINE)


def test_the_same_text_in_two_namespaces_is_two_packs(store):
    held = MemoryFactStore(LetterEmbedder())
    both = [Fact("The gate is green."), Fact("The gate is green.", namespace="theirs")]
    [(_, handle, _)] = documents(both, store, held)
    assert handle.startswith("kp:mine/")
    assert {each.namespace for each in store} == {"mine", "theirs"}


def test_nodes_go_into_the_namespace_of_their_postprocessor(store):
    for name, text in (("mine", "The gate is green."), ("theirs", "The secret is red.")):
        packs = KnowledgePackPostprocessor(
            engine=tiny_engine(), store=store, namespace=name, lazy=True, precompile="now"
        )
        [hit] = packs.postprocess_nodes([NodeWithScore(node=TextNode(text=text))])
        assert Handle.parse(hit.node.get_content(MetadataMode.LLM)).namespace == name
    assert {handle.namespace: store.peek(handle).text for handle in store} == {
        "mine": "The gate is green.",
        "theirs": "The secret is red.",
    }


def test_tools_follow_no_handle_inside_a_fact(store):
    engine = tiny_engine()
    secret = str(store.put(engine.build_pack("The secret is red.", namespace="theirs", lazy=True)))
    for text in (secret, f"For the secret of house 3, see {secret}."):
        retriever = KnowledgePackRetriever.from_facts(
            [Fact(text)],
            engine=engine,
            store=store,
            fact_store=MemoryFactStore(LetterEmbedder()),
            namespace="mine",
            kv="lazy",
        )
        for content in ("text", "handle"):
            tool = create_pack_search_tool(retriever.model_copy(update={"content": content}), store)
            message = tool.invoke({"name": tool.name, "args": {"query": QUESTION}, "id": "1", "type": "tool_call"})
            assert [handle.namespace for _, _, handle in find_handles(message.content)] == ["mine"]
            assert [document.page_content for document in message.artifact] == [message.content]
            read = resolve_documents(message.artifact, store.view("mine"))
            assert [document.page_content for document in read] == [text]


def test_resolving_reads_the_namespaces_that_are_given(store):
    engine = tiny_engine()
    mine, theirs = (str(store.put(engine.build_pack("Red.", namespace=name, lazy=True))) for name in ("mine", "theirs"))
    read = resolve_documents([mine, theirs], store.view("mine"))
    assert [document.page_content for document in read] == ["Red.", theirs]


def test_what_is_counted_is_what_is_delivered(store):
    engine = tiny_engine()
    retriever = KnowledgePackRetriever.from_facts(
        [*MINE, *THEIRS],
        engine=engine,
        store=store,
        fact_store=MemoryFactStore(LetterEmbedder()),
        namespace="mine",
        k=99,
        content="handle",
        progress=False,
    )
    model = ChatKnowledgePacks(engine=engine, store=store, namespaces=["mine"], max_tokens=1)
    found = retriever.invoke(QUESTION)
    usage = model.invoke([HumanMessage("\n".join(document.page_content for document in found))])
    lengths = [len(store.get(handle).token_ids) for handle in store.handles("mine")]
    assert usage.response_metadata["kp"]["pack_tokens"] == sum(lengths)


def test_namespaces_are_refused_at_the_first_touch(store):
    held = MemoryFactStore(LetterEmbedder())
    for touch in (
        lambda: KnowledgePackRetriever(fact_store=held, store=store, namespace="Acme Corp"),
        lambda: NodeRetriever(held, store, namespace="Acme Corp"),
        lambda: KnowledgePackPostprocessor(engine=tiny_engine(), store=store, namespace="Acme Corp"),
    ):
        with pytest.raises((PromptError, ValueError), match="'acme-corp'"):
            touch()
