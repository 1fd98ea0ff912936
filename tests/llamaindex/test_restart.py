"""An agent that goes on after a restart: its turns from SQLite, older ones from packs."""

import json

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.memory import Memory

from kp_core import PackStore, find_handles
from kp_llamaindex import KnowledgePackLLM, KnowledgePackMemoryBlock
from tests.conftest import roomy_engine

FACT = "The lighthouse of Veyl is kept by Orla Venn."


async def ask(folder, question):
    """Opens everything from `folder`, asks, and leaves everything there; only the weights stay in memory."""
    engine, store, saved = roomy_engine(), PackStore(folder / "packs"), folder / "block.json"
    engine.clear_cache()
    state = json.loads(saved.read_text()) if saved.exists() else {"store": store, "namespace": "ana"}
    block = KnowledgePackMemoryBlock(**state, engine=engine)
    memory = Memory.from_defaults(
        session_id="ana",
        async_database_uri=f"sqlite+aiosqlite:///{folder / 'talk.db'}",
        token_limit=100,
        chat_history_token_ratio=0.5,
        memory_blocks=[block],
    )
    before = [message.content for message in await memory.aget_all()]
    handle = str(store.put(engine.build_pack(FACT, namespace="veyl")))

    def search() -> str:
        """Search the handbook."""
        return handle

    llm = KnowledgePackLLM(engine=engine, store=store, namespaces=["veyl", "ana"], max_tokens=64)
    agent = FunctionAgent(tools=[search], llm=llm, initial_tool_choice="search", early_stopping_method="generate")
    run = agent.run(question, memory=memory, max_iterations=2)
    usages = [event.raw["kp"] async for event in run.stream_events() if isinstance(event, AgentStream) and event.raw]
    await run
    saved.write_text(block.model_dump_json())
    return before, block.handles, usages


@pytest.mark.slow
async def test_an_agent_goes_on_from_sqlite(tmp_path):
    before, handles, _ = await ask(tmp_path, "Who keeps the light of Veyl?")
    assert before == []
    known = [*handles]
    before, handles, usages = await ask(tmp_path, "And who rang the bell?")
    assert before
    assert handles[: len(known)] == known
    assert handles
    assert usages[0]["pack_tokens"] > 0  # Of the memory: nothing was searched for yet.
    remembered = KnowledgePackMemoryBlock(**json.loads((tmp_path / "block.json").read_text()), engine=roomy_engine())
    assert "Who keeps the light of Veyl?" in remembered.text()
    assert not find_handles(remembered.text())
