"""LlamaIndex's agents over packs: what search returns is delivered, never sent, and never computed again."""

import asyncio
import json

import pytest
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import RetrieverTool
from llama_index.core.workflow import Context, JsonSerializer
from workflows.context.state_store import UnserializableKeyWarning

from kp_core import PackStore, find_handles, load_engine
from kp_llamaindex import KnowledgePackLLM
from tests.core.tools.test_tools import PARIS, Repeats
from tests.kits import CHATML, tiny_model, tiny_tokenizer
from tests.llamaindex.conftest import QUESTION

FLAG = "The flag of the Orrelay Isles shows a grey heron on a field of blue, and below it three silver rings."


@pytest.fixture(scope="module")
def world(chat_engine, call_tokens, tmp_path_factory):
    """A search tool that returns a handle, and an LLM that resolves it."""
    store = PackStore(tmp_path_factory.mktemp("agents"))
    handle = str(store.put(chat_engine.build_pack(FLAG, lazy=True)))

    def search(query: str) -> str:
        """Search the library."""
        return f"{handle} (for {len(query)} letters)"

    llm = KnowledgePackLLM(engine=chat_engine, store=store, namespaces=["default"], max_tokens=call_tokens + 20)
    return llm, search


def function_agent(llm, tool, **settings):
    """An agent that must search first, one call at a time, and is made to answer at its last iteration."""
    return FunctionAgent(
        tools=[tool],
        llm=llm,
        initial_tool_choice="search",
        allow_parallel_tool_calls=False,
        early_stopping_method="generate",
        **settings,
    )


async def run(workflow, question, **settings):
    """The answer, the tool results and the last responses of all model calls."""
    handler = workflow.run(question, **settings)
    events = [event async for event in handler.stream_events()]
    raws = [event.raw for event in events if isinstance(event, AgentStream) and event.raw]
    return await handler, [event for event in events if isinstance(event, ToolCallResult)], raws


@pytest.mark.bundled
async def test_a_function_agent_reads_packs(world):
    llm, search = world
    agent = function_agent(llm, search)
    answer, results, raws = await run(agent, QUESTION, max_iterations=2)
    assert results[0].tool_name == "search"
    assert len(find_handles(str(results[0].tool_output))) == 1
    assert raws[0]["kp"]["pack_tokens"] == 0 < raws[1]["kp"]["pack_tokens"]
    assert answer.response.content
    json.dumps(answer.raw)


async def test_a_function_agent_without_streaming(world):
    llm, search = world
    agent = function_agent(llm, search, streaming=False)
    answer, results, _ = await run(agent, QUESTION, max_iterations=2)
    assert len(results) == 1
    assert answer.response.content


# Random weights cannot read whom to hand over to.
@pytest.mark.bundled
@pytest.mark.parametrize("chat_engine", ["smol"], indirect=True)
async def test_agents_share_an_engine_and_hand_over(world):
    llm, search = world
    first = FunctionAgent(
        name="Researcher",
        description="Finds facts.",
        system_prompt="You must hand off to Writer.",
        tools=[search],
        llm=llm,
        initial_tool_choice="handoff",
        can_handoff_to=["Writer"],
    )
    second = FunctionAgent(name="Writer", description="Writes answers.", system_prompt="Write.", llm=llm)
    workflow = AgentWorkflow(agents=[first, second], root_agent="Researcher", early_stopping_method="generate")
    answer, results, _ = await run(workflow, "Hand off to Writer.", max_iterations=2)
    assert results[0].tool_kwargs["to_agent"] == "Writer"
    assert answer.current_agent_name == "Writer"


async def test_several_agents_at_once(world):
    llm, search = world
    agents = [function_agent(llm, search) for _ in range(3)]
    answers = await asyncio.gather(*(run(agent, QUESTION, max_iterations=2) for agent in agents))
    assert len({answer.response.content for answer, _, _ in answers}) == 1
    assert all(len(results) == 1 for _, results, _ in answers)


async def test_a_react_agent(world, usages):
    llm, search = world
    answer = await ReActAgent(tools=[search], llm=llm).run(QUESTION, max_iterations=3, early_stopping_method="generate")
    assert answer.response.content
    # What a tool returned stands in a user message here.
    llm.chat([ChatMessage(QUESTION), ChatMessage(f"Observation: {search('flag')}")])
    assert usages[-1]["pack_tokens"] > 0


async def test_the_context_of_a_workflow_is_saved_and_restored(world):
    llm, search = world
    agent = function_agent(llm, search)
    context, memory = Context(agent), ChatMemoryBuffer.from_defaults(llm=llm)
    await run(agent, QUESTION, ctx=context, memory=memory, max_iterations=2)
    # LlamaIndex leaves the memory out of a context on purpose.
    with pytest.warns(UnserializableKeyWarning, match="memory"):
        state = json.dumps(context.to_dict(serializer=JsonSerializer()))
    turns = json.dumps([message.model_dump() for message in memory.get_all()])
    # What was found is part of the state, as handles.
    assert find_handles(state)
    again = Context.from_dict(agent, json.loads(state), serializer=JsonSerializer())
    remembered = ChatMemoryBuffer.from_defaults([ChatMessage(**turn) for turn in json.loads(turns)], llm=llm)
    assert remembered.get_all() == memory.get_all()
    _, _, raws = await run(agent, "And the rings?", ctx=again, memory=remembered, max_iterations=1)
    assert raws[0]["kp"]["pack_tokens"] > 0


async def test_retriever_tools_send_handles(retriever_of, llm, store):
    tool = RetrieverTool.from_defaults(retriever_of(similarity_top_k=2), name="search", description="Search.")
    llm = llm.model_copy(update={"max_tokens": 160})
    agent = function_agent(llm, tool)
    _, results, raws = await run(agent, QUESTION, max_iterations=2)
    assert len(find_handles(str(results[0].tool_output))) == 2
    assert raws[1]["kp"]["pack_tokens"] > 100


class Searching(KnowledgePackLLM):
    """Searches so many times and then answers, as a random model would not by itself."""

    searches: int

    def _prepare_chat_with_tools(self, tools, chat_history, **settings):
        done = sum(message.role == "tool" for message in chat_history)
        choice = "search" if done < self.searches else "none"
        return super()._prepare_chat_with_tools(tools, chat_history=chat_history, **settings, tool_choice=choice)


@pytest.fixture(scope="module")
def long_engine():
    """A tiny model with room for twenty steps."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 16384
    return load_engine(model, tokenizer=tiny_tokenizer(CHATML))


async def read_everything(engine, store, handles, **settings):
    """The usage of each step of an agent that reads one handle a step and then answers, and what its memory holds."""
    asked = iter(handles)

    def search(page: int) -> str:
        """Search the library."""
        return next(asked)

    llm = Searching(
        engine=engine, store=store, namespaces=["default"], max_tokens=80, searches=len(handles), **settings
    )
    agent = FunctionAgent(tools=[search], llm=llm, allow_parallel_tool_calls=False)
    memory = ChatMemoryBuffer.from_defaults(token_limit=100_000)
    handler = agent.run("Read everything.", memory=memory, max_iterations=len(handles) + 2)
    usages = [
        event.raw["kp"] async for event in handler.stream_events() if isinstance(event, AgentStream) and event.raw
    ]
    await handler
    return usages, memory.get_all()


async def test_a_prompt_grows_by_its_calls(long_engine, store):
    shelf = [f"Book {number}: " + f"the number {number * 7919} is on page {number}. " * 4 for number in range(6)]
    handles = [str(store.put(long_engine.build_pack(text, lazy=True))) for text in shelf]
    usages, _ = await read_everything(long_engine, store, handles)
    totals = [usage["prompt_tokens"] + usage["pack_tokens"] for usage in usages]
    for number in range(1, 6):
        sent = usages[number]["prompt_tokens"] - usages[number - 1]["prompt_tokens"]
        # A step sends the call that was made and the frame of its result; what was found is not sent.
        assert 0 < sent < usages[number - 1]["completion_tokens"] + 80
        assert usages[number]["pack_tokens"] - usages[number - 1]["pack_tokens"] > 100
        # What was read at earlier steps is not computed again.
        assert usages[number]["computed_tokens"] <= totals[number] - totals[number - 1]


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_agent_goes_on_with_a_call_that_has_no_tags(streaming):
    def weather(city: str, unit: str) -> str:
        """The weather of a city."""
        return f"Rain in {city}, and it is 9 degrees {unit}."

    llm = KnowledgePackLLM(engine=load_engine(Repeats()))
    answer, results, _ = await run(FunctionAgent(tools=[weather], llm=llm, streaming=streaming), PARIS)
    assert [result.tool_name for result in results] == ["weather"]
    assert "9 degrees C" in answer.response.content
