"""Agents whose memory is packs: real model, real LangGraph, real checkpointer."""

import logging
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    SummarizationMiddleware,
    wrap_model_call,
)
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, FakeMessagesListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command

from kp_core import Fact, Handle, Hit, MemoryFactStore, PackStore, find_handles, load_engine
from kp_core.banks.compiling import compile_facts
from kp_core.banks.delivery import Delivery
from kp_core.errors import OptionError, PackError
from kp_core.events import warn_once
from kp_langchain import (
    ChatKnowledgePacks,
    create_pack_search_tool,
    resolve_documents,
    to_handles,
    to_messages,
)
from kp_langchain.messages import with_texts
from kp_langchain.middleware import KnowledgePackMiddleware, PackSummarizer
from kp_langchain.store import KnowledgePackStore, namespace_of
from tests.conftest import tiny_engine, until
from tests.core.engines.test_keeping import fresh_engine
from tests.core.tools.test_tools import PARIS, Repeats
from tests.kits import HashEmbedder

PAGES = [
    f"Page {n}: the harbour of Veyl had {n * 7} boats in the year {1700 + n}, and {n} of them were red."
    for n in range(1, 21)
]


class Steps(AgentMiddleware):
    """Has the model call a tool `steps` times, then answer; notes what every call cost."""

    def __init__(self, steps):
        self.steps, self.usage = steps, []

    def wrap_model_call(self, request, handler):
        response = handler(request.override(tool_choice="any" if len(self.usage) < self.steps else "none"))
        self.usage.append(response.result[0].response_metadata["kp"])
        return response


def reader(pages):
    """A tool that gives the next page each time it is called."""
    left = iter(pages)

    @tool
    def read_next_page() -> str:
        """Read the next page of the book."""
        return next(left)

    return read_next_page


@pytest.fixture(scope="module")
def pages(chat_engine, store):
    facts = [Fact(page) for page in PAGES]
    handles = compile_facts(facts, chat_engine, store, namespace="book", compiled_for="system", progress=False)
    return [str(handle) for handle in handles]


@pytest.fixture
def model(chat_engine, call_tokens, store):
    return ChatKnowledgePacks(
        engine=chat_engine, store=store, namespaces=["book"], placement="system", max_tokens=call_tokens
    )


def ask(agent, text, thread="1"):
    config = {"configurable": {"thread_id": thread}, "recursion_limit": 100}
    return agent.invoke({"messages": [HumanMessage(text)]}, config)


@pytest.mark.slow
@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
def test_the_text_agent_grows(model):
    steps = Steps(6)
    ask(create_agent(model, [reader(PAGES)], middleware=[steps]), "Read the whole book.")
    sent = [usage["prompt_tokens"] for usage in steps.usage]
    assert sent == sorted(sent)
    assert sent[-1] > 2 * sent[0]


class Searches(AgentMiddleware):
    """In each turn of a conversation the model calls a tool `count` times, then says a word; notes what it was sent."""

    def __init__(self, count):
        self.count, self.usage, self.said = count, [], []

    def wrap_model_call(self, request, handler):
        people = [at for at, message in enumerate(request.messages) if message.type == "human"]
        called = sum(message.type == "tool" for message in request.messages[people[-1] :])
        settings = {**request.model_settings, **({} if called < self.count else {"max_tokens": 1})}
        choice = "any" if called < self.count else "none"
        answer = handler(request.override(tool_choice=choice, model_settings=settings)).result[0]
        self.usage.append(answer.response_metadata["kp"])
        self.said.append((answer.text, [(call["name"], call["args"]) for call in answer.tool_calls]))
        return answer


def talk(model, tool, count, *middleware):
    """Three turns of one conversation."""
    searches, config = Searches(count), {"configurable": {"thread_id": "1"}}
    agent = create_agent(model, [tool], middleware=[*middleware, searches], checkpointer=InMemorySaver())
    for number in range(3):
        agent.invoke({"messages": [HumanMessage(f"How many boats were there in the year 170{number}?")]}, config)
    return searches


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
@pytest.mark.parametrize("middleware", [(), (KnowledgePackMiddleware(),)])
def test_packs_in_place_are_the_prompts_and_calls_of_text(model, pages, chat_engine, middleware):
    model = model.model_copy(update={"placement": "in_place"})
    chat_engine.clear_cache()
    text = talk(model.model_copy(update={"store": None, "namespaces": ()}), reader(PAGES), 2)
    chat_engine.clear_cache()
    packs = talk(model, reader(pages), 2, *middleware)
    assert [usage["prompt_tokens"] + usage["pack_tokens"] for usage in packs.usage] == [
        usage["prompt_tokens"] for usage in text.usage
    ]
    assert packs.said == text.said
    assert packs.usage[-1]["pack_tokens"] > 100
    for with_packs, with_text in zip(packs.usage, text.usage, strict=True):
        assert with_packs["computed_tokens"] <= with_text["computed_tokens"]


def test_an_agent_computes_only_what_is_new_in_the_next_process(tmp_path):
    """A process is an engine with nothing in memory."""

    def follow(messages, count):
        steps, model = (
            Steps(count),
            ChatKnowledgePacks(engine=fresh_engine(), store=tmp_path, namespaces="book", max_tokens=80),
        )
        agent = create_agent(
            model, [reader(PAGES)], system_prompt="Read. " * 40, middleware=[KnowledgePackMiddleware(), steps]
        )
        return agent.invoke({"messages": messages})["messages"], steps.usage

    messages, before = follow([HumanMessage("Read two pages.")], 2)
    _, after = follow([*messages, HumanMessage("Go on.")], 0)
    assert before[-1]["prompt_tokens"] > 700
    assert after[0]["computed_tokens"] == after[0]["prompt_tokens"] - before[-1]["prompt_tokens"]


@pytest.mark.parametrize("precompile", ["now", "idle"])
def test_what_is_deleted_between_two_turns_is_in_no_file_and_in_no_prompt(tmp_path, precompile):
    engine, store, facts = fresh_engine(), PackStore(tmp_path), MemoryFactStore(HashEmbedder())
    library = Delivery(facts, engine, store, namespace="book", precompile=precompile)
    facts.add(Fact(page, id=str(number), namespace="book") for number, page in enumerate(PAGES[:3]))
    found = library.deliver([Hit(fact, 1.0) for fact in facts.facts()])  # "idle": before there is KV of them.
    handles, ids = [each.content for each in found], [engine.build_pack(page).token_ids for page in PAGES[:3]]

    def follow(messages, count):
        steps = Steps(count)
        model = ChatKnowledgePacks(engine=engine, store=store, namespaces="book", max_tokens=80, unresolved="error")
        agent = create_agent(model, [reader(handles)], middleware=[KnowledgePackMiddleware(), steps])
        return agent.invoke({"messages": messages})["messages"], steps.usage

    def holding():
        return [entry for entry, _ in store.kept() if {*handles} & entry.owners]

    messages, read = follow([HumanMessage("Read three pages.")], 3)
    assert read[-1]["pack_tokens"] > 150
    assert len(holding()) > 3
    library.delete(["0", "1", "2"])
    engine.when_idle(lambda: None).result(60)
    assert holding() == []
    _, [cost] = follow([*messages, HumanMessage("How many boats?")], 0)
    assert cost["pack_tokens"] == 0 < cost["completion_tokens"]
    assert not engine.engine.tree.packs
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        for page, handle, tokens in zip(PAGES, handles, ids, strict=False):
            for gone in (page, handle, ",".join(map(str, tokens))):
                assert gone.encode() not in file.read_bytes()


@pytest.mark.parametrize("memory", [{}, {"memory_tokens": 20}, {"memory_tokens": 400, "memory": "search"}])
def test_an_agent_goes_on_from_any_checkpoint(tmp_path, memory):
    """One of the release before, with an item that expired, a lost pack and a handle of somebody else."""
    engine, store, facts = fresh_engine(), PackStore(tmp_path), MemoryFactStore(HashEmbedder())
    items, labels = KnowledgePackStore(engine, store, facts), ("memories", "ana")
    items.put(labels, "boats", {"text": PAGES[0]}, ttl=0.0001)
    until(lambda: items.sweep_ttl() == 1)
    lost = store.put(engine.build_pack(PAGES[1], namespace=namespace_of(labels)))
    theirs = store.put(engine.build_pack("The password is heron.", namespace="theirs"))
    expired = store.handle(PAGES[0], namespace_of(labels))
    store.remove(lost)
    calls = [{"name": "read_next_page", "args": {}, "id": name} for name in "abcd"]
    results = [
        ToolMessage(str(text), tool_call_id=call["id"])
        for call, text in zip(calls, (expired, lost, theirs, PAGES[2]), strict=True)
    ]
    state = {
        "messages": [HumanMessage("Read."), AIMessage("", tool_calls=calls), *results, AIMessage("So.")],
        "packs": [str(expired), str(lost), str(theirs), "kp:no", 3],
    }
    steps, seen = Steps(1), []

    @wrap_model_call
    def look(request, handler):
        seen.extend(message.text for message in request.messages)
        return handler(request)

    model = ChatKnowledgePacks(engine=engine, store=store, namespaces=namespace_of(labels), max_tokens=80)
    middleware = KnowledgePackMiddleware(**memory, **({"facts": facts} if "memory" in memory else {}))
    agent = create_agent(model, [reader(PAGES)], middleware=[middleware, look, steps], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    agent.update_state(config, state)
    answered = agent.invoke({"messages": [HumanMessage("Go on.")]}, config)["messages"]
    assert [message.type for message in answered[7:]] == ["human", "ai", "tool", "ai"]
    assert not any("heron" in text for text in seen)
    assert any("This passage was deleted." in text for text in seen) == (not memory)


def test_a_tool_marks_the_head_that_is_kept(tmp_path):
    @tool(extras={"cache_control": {"type": "ephemeral"}})
    def look(at: str) -> str:
        """Look at a lamp."""
        return at

    for question in ("Which lamp burns?", "Who counts?"):
        model = ChatKnowledgePacks(engine=fresh_engine(), store=tmp_path, namespaces="book", max_tokens=3)
        answer = model.bind_tools([look]).invoke([("system", "You keep the lamps of Veyl."), ("human", question)])
    cost = answer.response_metadata["kp"]
    assert len(list(model.store.kept())) == 1
    assert cost["reused_tokens"] > 150
    assert cost["computed_tokens"] < 60


@pytest.mark.parametrize("kept", [{}, {"keep": "never"}, {"keep_in": "talk"}])
def test_of_several_namespaces_one_keeps_the_conversation(kept, tmp_path, caplog):
    warn_once.cache_clear()
    for question in ("Which lamp burns?", "Who counts?"):
        model = ChatKnowledgePacks(
            engine=fresh_engine(), store=tmp_path, namespaces=["book", "talk"], max_tokens=3, **kept
        )
        steps = Steps(0)
        agent = create_agent(
            model, [], middleware=[KnowledgePackMiddleware(), steps], system_prompt="You keep the lamps of Veyl. " * 9
        )
        ask(agent, question)
    assert (steps.usage[0]["reused_tokens"] > 100) == ("keep_in" in kept)
    told = [message for message in caplog.messages if "`keep_in=...`" in message]
    assert len(told) == (not kept)


def test_a_checkpointer_keeps_packs_across_processes(model, pages, tmp_path):
    path = str(tmp_path / "threads.sqlite")
    with SqliteSaver.from_conn_string(path) as saver:
        agent = create_agent(
            model, [reader(pages)], middleware=[KnowledgePackMiddleware(), Steps(2)], checkpointer=saver
        )
        ask(agent, "Read two pages.")
    with SqliteSaver.from_conn_string(path) as saver:
        steps = Steps(0)
        agent = create_agent(model, [reader(pages)], middleware=[KnowledgePackMiddleware(), steps], checkpointer=saver)
        config = {"configurable": {"thread_id": "1"}}
        assert agent.get_state(config).values["packs"] == pages[:2]
        ask(agent, "How many boats were there?")
        assert steps.usage[0]["pack_tokens"] > 0
        # Time travel: the state before the second page knew one pack.
        past = [s.values.get("packs") for s in agent.get_state_history(config)]
        assert [pages[0]] in past


def test_interrupts_leave_packs_alone(model, pages, tmp_path):
    with SqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
        agent = create_agent(
            model,
            [reader(pages)],
            middleware=[
                KnowledgePackMiddleware(),
                Steps(2),
                HumanInTheLoopMiddleware(interrupt_on={"read_next_page": True}),
            ],
            checkpointer=saver,
        )
        config = {"configurable": {"thread_id": "7"}}
        stopped = ask(agent, "Read two pages.", thread="7")
        assert stopped["__interrupt__"]
        agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
        done = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
        assert done["packs"] == pages[:2]
        assert isinstance(done["messages"][-1], AIMessage)


def test_agents_that_share_an_engine_do_not_see_each_others_packs(model, pages, chat_engine, store):
    mine = create_agent(model, [reader(pages)], middleware=[KnowledgePackMiddleware(), Steps(1)])
    other = ChatKnowledgePacks(
        engine=chat_engine, store=store, namespaces="elsewhere", placement="system", max_tokens=model.max_tokens
    )
    foreign = Steps(1)
    theirs = create_agent(other, [reader(pages)], middleware=[KnowledgePackMiddleware(), foreign])
    assert ask(mine, "Read.")["packs"] == pages[:1]
    ask(theirs, "Read.")
    assert all(usage["pack_tokens"] == 0 for usage in foreign.usage)


def totals_of(model, pages, *middleware, totals=None):
    """What the model reads and writes at each step of reading these pages, as it reports it; and the conversation."""
    totals = [] if totals is None else totals

    @wrap_model_call
    def note(request, handler):
        response = handler(request)
        totals.append(response.result[0].usage_metadata["total_tokens"])
        return response

    ours = KnowledgePackMiddleware(memory_tokens=None)
    agent = create_agent(model, [reader(pages)], middleware=[*middleware, ours, Steps(len(pages)), note])
    return totals, ask(agent, "Read the book.")["messages"]


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
def test_the_summariser_wakes_above_its_share_of_the_window_and_not_below(model, pages):
    model = model.model_copy(update={"placement": "in_place"})
    totals, _ = totals_of(model, pages[:5])
    window = round((totals[2] + totals[3]) / 2 / 0.8)  # Its share lies between what two steps report.
    small = model.model_copy(update={"profile": {**model.profile, "max_input_tokens": window}})
    settings = {"trigger": ("fraction", 0.8), "keep": ("messages", 2)}
    again, summaries = [], []

    def summarise(messages):
        summaries.append(len(again))
        return f"{sum(message.type == 'tool' for message in messages)} pages were read."

    totals_of(small, pages[:5], SummarizationMiddleware(small, **settings, summarizer=summarise), totals=again)
    assert again[:4] == totals[:4]
    assert summaries[0] == 4
    assert again[4] < int(0.8 * window)
    assert summaries == [step + 1 for step, total in enumerate(again[:-1]) if total >= int(0.8 * window)]


def test_a_summary_is_one_pack_that_frees_room(model, pages, chat_engine, store):
    model = model.model_copy(update={"placement": "in_place"})
    totals, _ = totals_of(model, pages[:6])
    window = round((totals[2] + totals[3]) / 2 / 0.8)
    small = model.model_copy(update={"profile": {**model.profile, "max_input_tokens": window}})
    summarizer = PackSummarizer(chat_engine, store, namespace="book", max_tokens=40)
    settings = {"trigger": ("fraction", 0.8), "keep": ("messages", 2), "summarizer": summarizer}
    sent = []

    @wrap_model_call
    def look(request, handler):
        sent.append([str(handle) for message in request.messages for *_, handle in find_handles(message.text)])
        return handler(request)

    again, messages = totals_of(small, pages[:6], SummarizationMiddleware(small, **settings), look)
    fired = [step for step, total in enumerate(again[:-1]) if total >= int(0.8 * window)]
    assert fired[0] == 3
    for step in fired:  # The summary, and the page that was read last.
        summary, page = sent[step + 1]
        assert summary not in pages
        assert page == pages[step]
    assert all(again[step + 1] < int(0.8 * window) for step in fired)
    [summary] = [m for m in messages if m.additional_kwargs.get("lc_source") == "summarization"]
    [(*_, handle)] = find_handles(summary.text)
    assert "Human: Read the book." in store.get(handle).text
    assert not any(page in store.get(handle).text for page in PAGES)


def test_a_summary_is_what_was_said_last(thin, store):
    summarizer = PackSummarizer(thin, store, namespace="book")
    assert summarizer([ToolMessage(str(Handle("book", "a" * 21)), tool_call_id="1")]) == ""
    first = summarizer([HumanMessage("The boat is red."), AIMessage("Noted.")])
    earlier = HumanMessage(f"So far:\n{first}", additional_kwargs={"lc_source": "summarization"})
    second = summarizer([earlier, HumanMessage("The sail is blue.")])
    text = store.get(Handle.parse(second)).text
    assert text == "Human: The boat is red.\nAI: Noted.\nHuman: The sail is blue."
    last = PackSummarizer(thin, store, namespace="book", max_tokens=4)([earlier, HumanMessage("It is blue.")])
    assert store.get(Handle.parse(last)).text.endswith("is blue.")
    assert len(thin.tokenizer.encode(store.get(Handle.parse(last)).text)) == 4
    # A handle of another namespace in a summary that somebody else wrote is not read.
    other = store.put(thin.build_pack("A secret of others.", namespace="other", lazy=True))
    foreign = HumanMessage(f"So far:\n{other}", additional_kwargs={"lc_source": "summarization"})
    assert summarizer([foreign]) == ""
    with pytest.raises(OptionError, match="max_tokens"):
        PackSummarizer(thin, store, max_tokens=0)


def test_tools_that_are_not_trusted_bring_no_packs(model, pages):
    steps = Steps(2)
    wary = model.model_copy(update={"trusted_roles": frozenset({"system"})})
    agent = create_agent(wary, [reader(pages)], middleware=[KnowledgePackMiddleware(), steps])
    ask(agent, "Read two pages.")
    agent.invoke({"messages": [HumanMessage("Go on.")], "packs": pages[:1]})
    assert all(usage["pack_tokens"] == 0 for usage in steps.usage)


class Other(BaseChatModel):
    """Another provider's model: keeps what it is sent, knows no option of ours, and fails if it is `broken`."""

    seen: list[Any] = []  # noqa: RUF012 - pydantic copies it
    broken: bool = False

    @property
    def _llm_type(self):
        return "other"

    def bind_tools(self, tools, *, tool_choice=None):
        return self.bind(tools=tools, tool_choice=tool_choice)

    def _generate(self, messages, stop=None, run_manager=None, *, tools=(), tool_choice=None):
        if self.broken:
            raise RuntimeError("the other model is out of order")
        self.seen.append(messages)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("It read."))])


@wrap_model_call
def call_once(request, handler):
    has_read = any(message.type == "tool" for message in request.messages)
    return handler(request.override(tool_choice="none" if has_read else "any"))


def sent_to(choose, order, model, result, **settings):
    """What `choose`, a middleware, sends to another model of an agent once its tool gave `result`."""
    own = KnowledgePackMiddleware(model=model, **settings)
    middleware = [own, choose] if order == "in front" else [choose, own]
    agent = create_agent(model, [reader([result])], middleware=[*middleware, call_once], system_prompt="Be brief.")
    return agent.invoke({"messages": [HumanMessage("Read.")]})["messages"]


def routed(other):
    @wrap_model_call
    def route(request, handler):
        has_read = any(message.type == "tool" for message in request.messages)
        return handler(request.override(model=other) if has_read else request)

    return route


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
@pytest.mark.parametrize("settings", [{}, {"memory_tokens": None}], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("order", ["in front", "behind"])
def test_another_model_reads_the_texts_of_packs(order, settings, model, pages, chat_engine, store):
    foreign = store.put(chat_engine.build_pack("A secret of others.", namespace="others", lazy=True))
    other = Other()
    messages = sent_to(routed(other), order, model, f"{pages[0]}\n{foreign}", **settings)
    [seen] = other.seen
    assert [message.text for message in seen if message.type == "tool"] == [f"{PAGES[0]}\n"]
    assert not find_handles("".join(message.text for message in seen))
    assert messages[-1].text == "It read."
    # The conversation keeps the handles.
    assert [message.text for message in messages if message.type == "tool"] == [f"{pages[0]}\n{foreign}"]


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
@pytest.mark.parametrize("order", ["in front", "behind"])
def test_a_fallback_reads_the_texts_of_packs(order, model, pages):
    @wrap_model_call
    def overflow(request, handler):
        has_read = any(message.type == "tool" for message in request.messages)
        ours = isinstance(request.model, ChatKnowledgePacks)
        settings = {"max_tokens": 10**6} if has_read and ours else {}
        return handler(request.override(model=request.model.model_copy(update=settings)))

    other = Other()
    own = KnowledgePackMiddleware(model=model)
    fallback = ModelFallbackMiddleware(other)
    middleware = [own, fallback] if order == "in front" else [fallback, own]
    agent = create_agent(model, [reader(pages[:1])], middleware=[*middleware, overflow, call_once])
    assert agent.invoke({"messages": [HumanMessage("Read.")]})["messages"][-1].text == "It read."
    assert [message.text for message in other.seen[0] if message.type == "tool"] == [PAGES[0]]


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
@pytest.mark.parametrize("order", ["in front", "behind"])
def test_another_model_of_ours_computes_packs_from_their_texts(order, model, pages):
    settings = {"store": model.store, "namespaces": model.namespaces, "max_tokens": 8}
    other = ChatKnowledgePacks(engine=tiny_engine("qwen3"), **settings)
    with pytest.raises(PackError, match='mismatch="rebuild"'):
        sent_to(routed(other), order, model, pages[0])
    rebuilding = ChatKnowledgePacks(engine=other.engine, **settings, mismatch="rebuild")
    answer = sent_to(routed(rebuilding), order, model, pages[0])[-1]
    assert answer.response_metadata["model_name"] == rebuilding.model_name != model.model_name
    assert answer.response_metadata["kp"]["pack_tokens"] > 0


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
def test_a_fallback_in_front_takes_over_from_a_server_that_is_down(model, pages):
    down = ChatKnowledgePacks(base_url="http://127.0.0.1:9", store=model.store, namespaces=model.namespaces)
    middleware = [ModelFallbackMiddleware(model), KnowledgePackMiddleware(), call_once]
    agent = create_agent(down, [reader(pages[:1])], middleware=middleware)
    answer = agent.invoke({"messages": [HumanMessage("Read.")]})["messages"][-1]
    assert answer.response_metadata["model_name"] == model.model_name


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
@pytest.mark.parametrize("order", ["in front", "behind"])
def test_the_errors_of_another_model_are_its_own(order, model, pages):
    with pytest.raises(RuntimeError, match="out of order"):
        sent_to(routed(Other(broken=True)), order, model, pages[0])


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
def test_our_model_gets_handles_behind_the_middleware(model, pages):
    model = model.model_copy(update={"placement": "in_place"})
    plain, through = Steps(2), Steps(2)
    ask(create_agent(model, [reader(pages)], middleware=[plain]), "Read.")
    ask(create_agent(model, [reader(pages)], middleware=[KnowledgePackMiddleware(), through]), "Read.")
    counts = ("prompt_tokens", "pack_tokens")
    assert [[usage[name] for name in counts] for usage in through.usage] == [
        [usage[name] for name in counts] for usage in plain.usage
    ]
    assert through.usage[-1]["pack_tokens"] > 0


def test_whose_packs_another_model_reads_must_be_said(pages):
    def agent_of(tool_result):
        other = [AIMessage("", tool_calls=[{"name": "read_next_page", "args": {}, "id": "1"}]), AIMessage("Done.")]
        model = FakeMessagesListChatModel(responses=other)
        calls = type("Calls", (FakeMessagesListChatModel,), {"bind_tools": lambda self, *_, **__: self})
        model = calls(responses=other)
        return create_agent(model, [reader([tool_result])], middleware=[KnowledgePackMiddleware()])

    assert ask(agent_of("A page."), "Hi")["messages"][-1].text == "Done."
    with pytest.raises(OptionError, match="KnowledgePackMiddleware\\(model="):
        ask(agent_of(pages[0]), "Hi")


def test_a_text_that_somebody_changes_stays_changed(thin, store):
    handle = store.put(thin.build_pack("The key is under the mat.", namespace="book", lazy=True))
    blocks = [{"type": "text", "text": f"{handle}"}, {"type": "image", "url": "x"}]
    for content, read in ((f"[{handle}]", "[The key is under the mat.]"), (blocks, None)):
        changed = with_texts(ToolMessage(content, tool_call_id="1"), store.view("book"))
        assert "under the mat" in changed.text
        if read:
            assert (changed.content, to_messages([changed])[0]["content"]) == (read, content)
            redacted = changed.model_copy(update={"content": "[redacted]"})
            assert to_messages([redacted])[0]["content"] == "[redacted]"
    plain = HumanMessage("No handle.")
    assert with_texts(plain, store.view("book")) is plain
    # What a model said brings no packs, and nothing is read without a store.
    assert with_texts(AIMessage(f"{handle}!"), store.view("book")).content == "!"
    assert with_texts(ToolMessage(f"{handle}!", tool_call_id="1"), None).content == "!"
    inside = store.put(thin.build_pack(f"See {handle} for more.", namespace="book", lazy=True))
    assert not find_handles(with_texts(HumanMessage(f"{inside}"), store.view("book")).content)


async def test_the_search_tool_gives_handles_and_keeps_documents(retriever, store, chat):
    search = create_pack_search_tool(retriever, store)
    call = {"name": search.name, "args": {"query": "What bird is on the flag?"}, "id": "1", "type": "tool_call"}
    message = search.invoke(call)
    assert [document.page_content for document in message.artifact] == message.content.splitlines()
    assert {document.metadata["source"] for document in message.artifact} == {"demo"}
    texts = [document.page_content for document in resolve_documents(message.artifact, store)]
    assert texts
    assert all(text not in repr(message) for text in texts), "a checkpoint keeps none of them when they are deleted"
    assert not any(map(find_handles, texts))
    serde = JsonPlusSerializer()
    [restored] = serde.loads_typed(serde.dumps_typed([message]))
    assert [document.page_content for document in resolve_documents(restored.artifact, store)] == texts
    assert (await search.ainvoke(call)).content == message.content
    as_text = create_pack_search_tool(retriever.model_copy(update={"content": "text"}), store)
    again = as_text.invoke({**call, "name": as_text.name})
    assert again.content == message.content
    assert [document.page_content for document in again.artifact] == [d.page_content for d in message.artifact]


def test_rewritten_text_wins_over_its_handle(text_retriever, store, caplog):
    documents = text_retriever.invoke("flag")
    assert all(find_handles(document.page_content) for document in to_handles(documents, store))
    changed = Document("The bird is [redacted].", metadata=documents[0].metadata)
    with caplog.at_level(logging.WARNING):
        [kept] = to_handles([changed], store)
    assert kept.page_content == "The bird is [redacted]."
    assert "not that of" in caplog.text


def test_handles_that_stand_in_documents_of_earlier_releases(thin, store):
    # They put a line feed behind memory, and the handle into the metadata itself.
    handle = str(store.put(thin.build_pack("Ana keeps bees.\n", namespace="isles", lazy=True)))
    [made] = to_handles([Document("Ana keeps bees.", metadata={"handle": handle})], store)
    assert made.page_content == handle
    [theirs] = to_handles([Document("Ana keeps bees.", metadata={"handle": "brass"})], store)
    assert theirs.page_content == "Ana keeps bees."


@pytest.mark.parametrize("lead", ["", "```json\n"])
def test_an_agent_goes_on_with_a_call_that_has_no_tags(lead):
    @tool
    def weather(city: str, unit: str) -> str:
        """The weather of a city."""
        return f"Rain in {city}, and it is 9 degrees {unit}."

    agent = create_agent(ChatKnowledgePacks(engine=load_engine(Repeats())), [weather])
    asked = {"messages": [("human", lead + PARIS)]}
    said = agent.invoke(asked)["messages"]
    assert [message.type for message in said] == ["human", "ai", "tool", "ai"]
    assert said[1].content == ""
    assert said[1].response_metadata["finish_reason"] == "tool_calls"
    assert "9 degrees C" in said[-1].content
    pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages") if piece.type == "AIMessageChunk"]
    assert "".join(piece.content for piece in pieces) == said[-1].content
    assert sum(len(piece.tool_call_chunks) for piece in pieces) > 0


def test_structured_output_waits_for_a_call_that_is_forced(model, pages):
    """LangChain drops the choice where it asks a model for a schema: an answer would be invented."""

    @wrap_model_call
    def look_first(request, handler):
        is_first = len(request.messages) == 1
        return handler(request.override(**({"tool_choice": "any"} if is_first else {"tools": []})))

    boats = {"title": "boats", "type": "object", "properties": {"red": {"enum": [1, 2]}}, "required": ["red"]}
    agent = create_agent(
        model, [reader(pages)], middleware=[look_first, KnowledgePackMiddleware()], response_format=boats
    )
    state = agent.invoke({"messages": [("human", "How many boats are red on page 1?")]}, {"recursion_limit": 9})
    assert [message.type for message in state["messages"]][:3] == ["human", "ai", "tool"]
    assert state["structured_response"]["red"] in {1, 2}


@pytest.mark.parametrize("chat_engine", ["tiny"], indirect=True)
def test_one_agent_reads_for_each_user_what_that_user_may(chat_engine, store):
    @wrap_model_call
    def for_user(request, handler):
        own = {"namespaces": [request.runtime.context["user"]]}
        return handler(request.override(model=request.model.model_copy(update=own)))

    handles = [store.put(chat_engine.build_pack(page, namespace=user)) for user, page in zip("ab", PAGES, strict=False)]
    model = ChatKnowledgePacks(engine=chat_engine, store=store, namespaces=["nobody"], max_tokens=100)
    tools = [reader([f"{handles[0]}\n{handles[1]}"] * 2)]
    middleware = [for_user, KnowledgePackMiddleware(), call_once]
    agent = create_agent(model, tools, middleware=middleware, context_schema=dict)
    for user, handle in zip("ab", handles, strict=True):
        asked = {"messages": [HumanMessage("Read.")]}
        usage = agent.invoke(asked, context={"user": user})["messages"][-1].response_metadata["kp"]
        assert (usage["packs"], usage["unresolved_handles"]) == ([str(handle)], 1)
