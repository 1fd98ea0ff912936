"""What an agent's memory has read is read again after a restart, by default, in both adapters."""

import asyncio

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.memory.memory import DEFAULT_MEMORY_BLOCKS_TEMPLATE

from kp_core import PackStore
from kp_langchain import ChatKnowledgePacks
from kp_langchain.middleware import KnowledgePackMiddleware
from kp_llamaindex import KnowledgePackLLM, KnowledgePackMemoryBlock
from tests.conftest import roomy_engine

NOTES = [
    f"Note {at}: the keeper of Veyl counted {at * 31} ships, and {at * 7} of them were red. " * 2 for at in range(5)
]
SETTINGS = {"namespaces": ["notes"], "max_tokens": 4}


@tool
def search(query: str) -> str:
    """Search the notes."""
    return query


def langchain(engine, store, handles, asked, **settings):
    """The next answer of an agent that has searched, by LangGraph and our middleware."""
    model = ChatKnowledgePacks(engine=engine, store=store, **SETTINGS, **settings)
    messages = [HumanMessage("How many ships?")]
    for at, handle in enumerate(handles):
        call = {"name": "search", "args": {"query": f"ships {at}"}, "id": f"call0000{at}"}
        messages += [AIMessage("", tool_calls=[call]), ToolMessage(handle, tool_call_id=call["id"], name="search")]
    agent = create_agent(model, [search], middleware=[KnowledgePackMiddleware()])
    found = agent.invoke({"messages": [*messages, HumanMessage(asked)]})
    return found["messages"][-1].response_metadata["kp"]


def remembering(engine, store, handles, asked, **settings):
    """A LlamaIndex memory of two flushed turns."""
    block = KnowledgePackMemoryBlock(engine=engine, store=store, namespace="notes")
    for note in NOTES[:2]:
        asyncio.run(block.aput([ChatMessage(note)]))
    parts = [(block.name, [TextBlock(text=asyncio.run(block.aget()))])]
    [memory] = DEFAULT_MEMORY_BLOCKS_TEMPLATE.format_messages(memory_blocks=parts)
    llm = KnowledgePackLLM(engine=engine, store=store, **SETTINGS, **settings)
    return llm.chat([ChatMessage(memory.content, role="system"), ChatMessage(asked)]).raw["kp"]


@pytest.mark.parametrize("memory", [langchain, remembering])
def test_knowledge_is_read_and_not_computed_after_a_restart(memory, tmp_path):
    engine, store = roomy_engine.__wrapped__(), PackStore(tmp_path)
    handles = [str(store.put(engine.build_pack(note, namespace="notes"))) for note in NOTES]
    first = memory(engine, store, handles, "And?")
    assert first["pack_tokens"] > 200
    again = memory(roomy_engine.__wrapped__(), PackStore(tmp_path), handles, "And now?")
    assert again["pack_tokens"] == first["pack_tokens"]
    assert again["computed_tokens"] <= again["prompt_tokens"]
    assert again["reused_tokens"] >= again["pack_tokens"]


@pytest.mark.parametrize("memory", [langchain, remembering])
def test_a_model_that_is_told_otherwise_keeps_nothing(memory, tmp_path):
    engine, store = roomy_engine.__wrapped__(), PackStore(tmp_path)
    handles = [str(store.put(engine.build_pack(note, namespace="notes"))) for note in NOTES]
    memory(engine, store, handles, "And?", keep="never")
    assert list(store.kept()) == []
