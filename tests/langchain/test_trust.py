"""A handle is a way in: who may bring one, and where it stops."""

import logging

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from kp_core import Fact, find_handles
from kp_core.errors import PackNotFoundError
from kp_langchain import ChatKnowledgePacks, KnowledgePackRetriever

FACT = "The vault opens with the word heron-nine."


@pytest.fixture
def handle(chat_engine, store):
    return str(store.put(chat_engine.build_pack(FACT, namespace="isles")))


def pack_tokens(chat, messages):
    return chat.invoke(messages, max_tokens=1).response_metadata["kp"]["pack_tokens"]


def test_trusted_roles_bring_packs(chat, handle):
    call = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "call00001"}])
    conversations = [
        [HumanMessage(handle)],
        [SystemMessage(handle), HumanMessage("?")],
        [HumanMessage("?"), call, ToolMessage(handle, tool_call_id="call00001", name="search")],
    ]
    for messages in conversations:
        assert pack_tokens(chat, messages) > 0, messages


def test_a_namespace_that_is_not_allowed_stays_text(chat_engine, store, handle, caplog):
    chat = ChatKnowledgePacks(engine=chat_engine, store=store, namespaces=["elsewhere"])
    with caplog.at_level(logging.WARNING, "kp_core"):
        assert pack_tokens(chat, [HumanMessage(handle)]) == 0
    assert "is not allowed" in caplog.text


def test_the_model_itself_may_not_bring_packs(chat, handle):
    assert pack_tokens(chat, [HumanMessage("Hi"), AIMessage(handle), HumanMessage("And?")]) == 0


def test_raw_user_input_can_be_shut_out(chat_engine, store, handle):
    chat = ChatKnowledgePacks(engine=chat_engine, store=store, namespaces=["isles"], trusted_roles=["system", "tool"])
    assert pack_tokens(chat, [HumanMessage(handle)]) == 0
    named = ChatKnowledgePacks(engine=chat_engine, store=store, namespaces=["isles"], trusted_roles=["human"])
    assert pack_tokens(named, [HumanMessage(handle)]) > 0


def test_a_handle_inside_a_fact_is_not_followed(chat_engine, store, handle, chat):
    smuggler = Fact(f"For more, see {handle} at once.")
    retriever = KnowledgePackRetriever.from_facts(
        [smuggler],
        engine=chat_engine,
        store=store,
        namespace="isles",
        embedder=_Flat(),
        k=1,
        content="handle",
        progress=False,
    )
    [document] = retriever.invoke("more?")
    own = chat_engine.build_pack(smuggler.text, namespace="isles", lazy=True)
    assert pack_tokens(chat, [HumanMessage(document.page_content)]) == len(own.token_ids)


def test_without_a_store_handles_are_text_and_each_answer_says_so(chat_engine, handle, caplog):
    chat = ChatKnowledgePacks(engine=chat_engine)
    counted = [chat.invoke(handle, max_tokens=1).response_metadata["kp"] for _ in range(2)]
    assert [(usage["pack_tokens"], usage["unresolved_handles"]) for usage in counted] == [(0, 1)] * 2
    assert caplog.text.count(f"Handle {handle} stays text: there is no store to look in") == 2
    with pytest.raises(PackNotFoundError, match="there is no store to look in; give a model `store=`"):
        chat.invoke(handle, unresolved="error")


def test_handles_that_may_be_text_are_counted_and_not_logged(chat_engine, handle, caplog):
    usage = ChatKnowledgePacks(engine=chat_engine, unresolved="text").invoke(handle, max_tokens=1)
    assert usage.response_metadata["kp"]["unresolved_handles"] == 1
    assert handle not in caplog.text


def test_raw_user_input_raises_nothing_where_it_is_not_trusted(chat_engine, store, handle):
    chat = ChatKnowledgePacks(
        engine=chat_engine, store=store, namespaces=["isles"], trusted_roles=["tool"], unresolved="error"
    )
    assert pack_tokens(chat, [HumanMessage(handle)]) == 0


def test_packs_of_a_call_must_resolve(chat, chat_engine, store):
    foreign = str(store.put(chat_engine.build_pack(FACT, namespace="elsewhere", lazy=True)))
    with pytest.raises(PackNotFoundError, match="does not resolve"):
        chat.invoke("Hi", packs=[foreign])


@pytest.mark.bundled
def test_the_model_cannot_say_a_handle(chat_engine, handle):
    # A grammar that admits one answer makes any model say it.
    schema = {"type": "object", "properties": {"file": {"const": handle}}, "required": ["file"]}
    raw = chat_engine.generate("What is my file called?", response_schema=schema, max_tokens=60)
    assert find_handles(chat_engine.tokenizer.decode(raw.token_ids))
    chat = ChatKnowledgePacks(engine=chat_engine, max_tokens=60).bind(response_format={"title": "f", **schema})
    said = chat.invoke("What is my file called?").text
    assert said == "".join(chunk.text for chunk in chat.stream("What is my file called?"))
    assert "".join(said.split()) == '{"file":""}'


class _Flat:
    """An embedder for one fact."""

    name, dimensions = "flat", 2

    def embed(self, texts):
        import numpy as np

        return np.tile(np.array([[1.0, 0.0]], np.float32), (len(texts), 1))

    def embed_query(self, text):
        return self.embed([text])[0]
