"""What stands in an agent's prompt, what leaves it, and what is found again."""

import itertools

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse, ToolCallRequest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from kp_core import Fact, Handle, MemoryFactStore, PackStore, find_handles
from kp_core.banks.base import Hit
from kp_core.banks.delivery import Delivery
from kp_core.errors import OptionError
from kp_langchain import ChatKnowledgePacks
from kp_langchain import middleware as middleware_file
from kp_langchain.messages import as_sent, to_messages
from kp_langchain.middleware import KnowledgePackMiddleware, RepeatedCallMiddleware
from kp_methods import recall
from tests.conftest import roomy_engine
from tests.kits.stores import HashEmbedder

PAGES = [
    f"page {n}| In the year {1700 + n} the harbour had {7 * n} boats, and {n} of them were red." for n in range(30)
]
ENGINE = roomy_engine()


@pytest.fixture
def packs(tmp_path):
    return PackStore(tmp_path / "packs")


@pytest.fixture
def facts():
    return MemoryFactStore(HashEmbedder())


@pytest.fixture
def delivery(facts, packs):
    # Without KV the nearest ones are found; a random model would choose any.
    return Delivery(facts, ENGINE, packs, namespace="book", kv="lazy")


@pytest.fixture
def handles(delivery, packs):
    delivery.add([Fact(page, id=str(number)) for number, page in enumerate(PAGES)], progress=False)
    return [str(packs.handle(page, "book")) for page in PAGES]


@pytest.fixture
def model(packs):
    return ChatKnowledgePacks(engine=ENGINE, store=packs, namespaces=["book"], max_tokens=8)


def exchange(number, *results):
    calls = [{"name": "read", "args": {"page": number}, "id": f"c{number}-{at}"} for at in range(len(results))]
    found = [ToolMessage(text, tool_call_id=call["id"]) for text, call in zip(results, calls, strict=True)]
    return [AIMessage("", tool_calls=calls), *found]


def reading(found, question="Read the book."):
    return [HumanMessage(question), *(part for at, text in enumerate(found) for part in exchange(at, text))]


def answered(middleware, model, messages, answer, *, packs=(), response_format=None, **settings):
    """The messages that the model gets, and its answer as the state keeps it."""
    request, got = (
        ModelRequest(
            model=model,
            messages=messages,
            system_message=SystemMessage("You read."),
            state={"messages": messages, "packs": [*packs]},
            model_settings=settings,
            response_format=response_format,
        ),
        [],
    )

    def handler(changed):
        got.extend(changed.messages)
        return ModelResponse([answer])

    [kept] = middleware.wrap_model_call(request, handler).result
    return got, kept


def called(middleware, model, messages, answer, **settings):
    """As `answered`, with handles as the model sends them."""

    def shown(message):
        content, before = as_sent(message)
        block = "".join(f"{handle}\n\n" for handle in before)
        content = block + content if isinstance(content, str) else [{"type": "text", "text": block}, *content]
        return message.model_copy(update={"content": content, "additional_kwargs": {}})

    got, kept = answered(middleware, model, messages, answer, **settings)
    return list(map(shown, got)), kept


def sent(middleware, model, messages, **state):
    return called(middleware, model, messages, AIMessage(""), **state)[0]


def behind(model, messages):
    """Tokens behind the head, with the generation prompt."""
    head = [SystemMessage("You read.")]
    return model.get_num_tokens_from_messages([*head, *messages]) - model.get_num_tokens_from_messages(head)


def results(messages):
    return [message.text for message in messages if message.type == "tool"]


def test_an_answer_leaves_with_its_question(model, handles):
    turns = [
        [HumanMessage(f"Question {at}?"), *exchange(at, text), AIMessage("So.")] for at, text in enumerate(handles)
    ]
    messages, lengths = [], set()
    for question, *rest in turns:
        messages.append(question)
        note, *others = sent(KnowledgePackMiddleware(memory_tokens=1500), model, messages)
        if "can be searched again" in note.text:
            assert others[0].type == "human" or others[0].tool_calls
            lengths.add(len(messages))
        messages += rest
    assert lengths


def test_the_oldest_exchanges_leave_in_blocks(model, handles):
    middleware, most, messages, before = KnowledgePackMiddleware(memory_tokens=1500), 1500, reading(handles), []
    blocks = []
    for step in range(len(handles) + 1):
        kept = sent(middleware, model, messages[: 1 + 2 * step])
        assert behind(model, kept) <= most
        assert HumanMessage("Read the book.") in kept
        assert results(kept) == handles[step - len(results(kept)) : step]
        if kept[: len(before)] != before:
            blocks.append(step)
            assert behind(model, kept) <= 0.6 * most
            assert "can be searched again" in kept[0].text
        before = kept
    assert 1 < len(blocks) < len(handles) / 3
    # Another process, which sees the whole conversation at once, sends the same.
    assert sent(KnowledgePackMiddleware(memory_tokens=1500), model, messages) == before
    assert sent(KnowledgePackMiddleware(memory_tokens=None), model, messages) == messages


def test_earlier_turns_leave_with_what_people_said(model, handles):
    turns = [
        message
        for number, handle in enumerate(handles)
        for message in (HumanMessage(f"Page {number}?"), *exchange(number, handle), AIMessage("It had boats."))
    ]
    kept = sent(
        KnowledgePackMiddleware(memory_tokens=1500), model, [SystemMessage("Be kind."), *turns, HumanMessage("So?")]
    )
    assert [message.type for message in kept[:2]] == ["system", "human"]
    assert kept[-5:] == [*turns[-4:], HumanMessage("So?")]
    assert behind(model, kept[1:]) <= 1500
    for at, message in enumerate(kept):  # No result without its call.
        assert message.type != "tool" or kept[at - 1].type in ("ai", "tool")


def test_by_default_three_quarters_of_the_window_are_left_to_messages(model, handles):
    model = model.model_copy(update={"max_tokens": 2000})
    kept = sent(KnowledgePackMiddleware(), model, reading(handles * 10))
    room = ENGINE.max_positions - 2000 - model.get_num_tokens_from_messages([SystemMessage("You read.")])
    assert 0.3 * room < behind(model, kept) <= 0.75 * room
    half = sent(KnowledgePackMiddleware(memory_tokens=0.5), model, reading(handles * 10))
    assert 0.2 * room < behind(model, half) <= 0.5 * room
    # A long question keeps room for what is read about it.
    question = "Read. " * 1600
    kept = sent(KnowledgePackMiddleware(), model, reading(handles * 10, question))
    assert question in [message.text for message in kept]
    assert len(results(kept)) > 3
    assert behind(model, kept) <= room


@pytest.mark.parametrize("count", [1, 3])
def test_a_result_that_does_not_fit_is_named(model, handles, count):
    long = "boats " * 50_000
    messages = [HumanMessage("Read."), *exchange(0, *[long] * count)]
    kept = sent(KnowledgePackMiddleware(), model, messages)
    assert all("more than" in text and len(text) < 100 for text in results(kept))
    assert behind(model, kept) < 2000
    tight = sent(KnowledgePackMiddleware(memory_tokens=20), model, reading(handles[:3]))
    assert len(results(tight)) == 1
    assert "This result has" in results(tight)[0]


def test_the_first_packs_of_a_long_result_stay_and_a_composer_that_selects_gets_all(model, handles, caplog):
    messages = [HumanMessage("Read."), *exchange(0, "\n".join(handles))]
    kept = sent(KnowledgePackMiddleware(memory_tokens=600), model, messages)
    [result] = results(kept)
    shown = [str(handle) for *_, handle in find_handles(result)]
    assert 1 < len(shown) < len(handles)
    assert shown == handles[: len(shown)]
    assert "Ask for less" in result
    assert behind(model, kept) <= 600
    assert "does not go to the model whole" in caplog.text
    caplog.clear()
    selecting = model.model_copy(update={"composer": "select:packs=1"})
    assert sent(KnowledgePackMiddleware(memory_tokens=600), selecting, messages) == messages
    assert not caplog.text
    narrow = sent(KnowledgePackMiddleware(memory_tokens=60), selecting, messages)
    assert "This result has" in results(narrow)[0]


def found_in(messages):
    [asked] = [message for message in messages if message.type == "human" and "searched again" not in message.text]
    return [str(handle) for *_, handle in find_handles(asked.text)]


def searching(facts, most=1500):
    return KnowledgePackMiddleware(memory_tokens=most, memory="search", facts=facts)


def test_what_is_noted_of_a_conversation_is_bounded(model, handles, facts, monkeypatch):
    messages = reading([f"{page} Most sailed." for page in PAGES], "page 3")
    expected = sent(searching(facts, 500), model, messages)
    monkeypatch.setattr(middleware_file, "_REMEMBERED", 4)
    middleware = searching(facts, 500)
    assert [message.text for message in sent(middleware, model, messages)] == [message.text for message in expected]
    assert max(len(middleware._sizes), len(middleware._packs)) == 4


def test_what_left_is_found_beside_the_question(model, handles, facts, delivery):
    middleware = searching(facts)
    messages = reading(handles, "page 3")
    kept = sent(middleware, model, messages, packs=handles)
    assert handles[3] in found_in(kept)
    assert len(found_in(kept)) <= 2
    assert not set(found_in(kept)) & set(results(kept))
    assert behind(model, kept) <= 1500
    # What this conversation has not met is not found, nor what was deleted.
    assert handles[3] not in found_in(sent(searching(facts), model, reading(handles[4:], "page 3"), packs=handles[4:]))
    delivery.delete(["3"])
    assert handles[3] not in found_in(sent(middleware, model, messages, packs=handles))


def test_what_left_of_a_store_of_ones_own_is_found_without_a_copy(model, packs, facts):
    theirs = Delivery(None, ENGINE, packs, namespace="book", kv="lazy")
    hits = [Hit(Fact(page, id=str(number), namespace="book"), 1.0) for number, page in enumerate(PAGES)]
    handles = [str(found.handle) for found in theirs.deliver(hits)]
    middleware, messages = searching(facts), reading(handles, "page 3")
    kept = sent(middleware, model, messages, packs=handles)
    assert handles[3] in found_in(kept)
    assert behind(model, kept) <= 1500
    assert len(facts) == 0
    # Beside facts, and without what was deleted there or not met here.
    Delivery(facts, ENGINE, packs, namespace="book", kv="lazy").add([Fact("page 31| Of rope.")], progress=False)
    rope = str(packs.handle("page 31| Of rope.", "book"))
    messages = reading([rope, *handles], "page 31")
    assert rope in found_in(sent(middleware, model, messages, packs=[rope, *handles]))
    assert handles[3] not in found_in(sent(searching(facts), model, reading(handles[4:], "page 3"), packs=handles[4:]))
    theirs.sync(lambda _: [page for page in PAGES if page != PAGES[3]])
    assert handles[3] not in found_in(sent(middleware, model, reading(handles, "page 3"), packs=handles))


def test_what_was_found_stays_before_its_question(model, handles, facts, packs, delivery):
    messages, before, blocks, middleware, last = [], [], [], searching(facts, 1000), ()
    for number, handle in enumerate(handles):
        messages.append(HumanMessage(f"page {number // 2}"))
        call, result = exchange(number, handle)
        for answer in (call, AIMessage("So.")):
            kept, noted = called(middleware, model, messages, answer, packs=handles[:number])
            # The next process knows what was noted.
            assert sent(searching(facts, 1000), model, messages, packs=handles[:number]) == kept
            assert behind(model, kept) <= 1000
            blocks.append(kept[: len(before)] != before)
            before = kept
            asked = [message.text for message in kept if message.type == "human" and find_handles(message.text)]
            last = ("".join(asked[:-1]), [*messages]) if len(asked) > 1 else last
            messages += [noted, result] if answer is call else [noted]
    assert 2 < sum(blocks) < len(blocks) / 3
    stayed, messages = last
    (*_, handle), *_, (*_, other) = find_handles(stayed)
    packs.remove(handle)
    delivery.delete([fact.id for fact in facts.facts() if packs.handle(fact.text, "book") == other])
    after = sent(middleware, model, messages, packs=handles)
    asked = "".join(message.text for message in after if message.type == "human")
    assert str(handle) not in asked, "lost"
    assert str(other) in asked, "deleted, which one line says in its place"
    assert sent(middleware, model, [message for message in messages if message.type != "human"], packs=handles)
    # What somebody else noted brings no more than this conversation may read.
    theirs = Handle("theirs", other.id)
    for noted in (5, [None, str(theirs)], {"x": handles[0][:-1]}):
        for message in messages:
            message.additional_kwargs.update({middleware_file._FOUND: noted} if message.type == "ai" else {})
        assert str(theirs) not in str(sent(middleware, model, messages, packs=handles))


def test_what_stands_before_an_earlier_question_is_not_found_again(model, handles, facts):
    messages, middleware = reading(handles, "page 3"), searching(facts)
    _, noted = called(middleware, model, messages, AIMessage("So."), packs=handles)
    messages += [noted, HumanMessage("page 3")]
    kept = sent(middleware, model, messages, packs=handles)
    [first, again] = [message.text for message in kept if message.type == "human" and message.text.endswith("page 3")]
    assert handles[3] in first
    assert again != "page 3", "others are found"
    assert not {handle for *_, handle in find_handles(first)} & {handle for *_, handle in find_handles(again)}


def test_the_heads_of_the_model_choose_among_the_nearest(model, handles, facts, packs, caplog, monkeypatch):
    monkeypatch.setattr(recall, "_ABOUT", 0)  # This model attends to nothing.
    Delivery(facts, ENGINE, packs, namespace="book").compile(facts.facts())
    with caplog.at_level("INFO"):
        found = found_in(sent(searching(facts), model, reading(handles, "page 3"), packs=handles))
    assert 1 <= len(found) <= 2
    assert set(found) < set(handles)
    assert "cannot be compared" not in caplog.text


def test_what_tools_found_stands_as_a_pack_before_an_untrusted_user(model, handles, facts):
    wary = model.model_copy(update={"trusted_roles": ("tool",)})

    def prompt(model, question):
        got, _ = answered(searching(facts), model, reading(handles, question), AIMessage("Yes."), packs=handles)
        assert PAGES[3] in got[1].text, "for other models"
        assert not find_handles(got[1].text)
        return ENGINE.prefill(to_messages(got), view=model.reading()[1]).prompt

    asked = prompt(wary, "page 3")
    assert asked.token_ids == prompt(model, "page 3").token_ids
    assert handles[3] in [span.handle for span in asked.spans], "so that deleting it takes its KV"
    typed = prompt(wary, f"page 3 {handles[0]}")
    assert handles[0] not in [span.handle for span in typed.spans], "the user is not trusted"
    nobody = model.model_copy(update={"trusted_roles": ("system",)})
    assert not found_in(sent(searching(facts), nobody, reading(handles, "page 3"), packs=handles))


def test_results_of_no_fact_become_facts_of_the_conversation(model, facts, packs):
    kept = sent(searching(facts), model, reading(PAGES, "page 2"))
    left = len(PAGES) - len(results(kept))
    assert {packs.get(Handle.parse(handle)).text for handle in found_in(kept)} < set(PAGES[:left])
    assert {fact.text for fact in facts.facts(namespace="book")} == set(PAGES[:left])
    # Again, in another process: nothing is stored twice.
    assert found_in(sent(searching(facts), model, reading(PAGES, "page 2"))) == found_in(kept)
    assert len(facts) == left
    both = model.model_copy(update={"namespaces": ("book", "other")})
    with pytest.raises(OptionError, match="keep_in"):
        sent(searching(facts), both, reading(PAGES, "page 2"))
    with pytest.raises(OptionError, match="keep_in='theirs'"):
        sent(searching(facts), both, reading(PAGES, "page 2"), keep_in="theirs")
    sent(searching(facts), both, reading([f"{page} Most sailed." for page in PAGES], "page 2"), keep_in="other")
    assert facts.namespaces() == ("book", "other")


def test_states_of_others_and_lost_packs_do_no_harm(model, handles, facts, packs, delivery):
    secret = Delivery(facts, ENGINE, packs, namespace="theirs")
    secret.add([Fact("page 3| The password is heron.")], progress=False)
    theirs = str(packs.handle("page 3| The password is heron.", "theirs"))
    state = [1, None, "x", "kp:no", theirs, *handles]
    kept = sent(searching(facts), model, reading([theirs, *handles], "page 3"), packs=state)
    assert found_in(kept)[-1] == handles[3]
    assert theirs not in found_in(kept)
    assert not any("heron" in fact.text for fact in facts.facts(namespace="book"))
    packs.remove(Handle.parse(handles[3]))
    assert handles[3] not in found_in(sent(searching(facts), model, reading(handles, "page 3"), packs=handles))
    assert middleware_file._union(["kp:no", 1], [{"x": 1}, None, "kp:no", "x"]) == ["kp:no", "x"]
    # A checkpoint without the channel.
    request = ModelRequest(model=model, messages=reading(handles), state={"messages": []})
    assert searching(facts).wrap_model_call(request, lambda changed: ModelResponse([*changed.messages])).result


def blocks(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_a_handle_ends_where_its_block_does(model, handles, packs, facts):
    content = blocks("See", handles[0], "Source: page 1", handles[1], handles[2])
    view = model.reading()[1]
    prompt = ENGINE.prefill(to_messages([HumanMessage(content)]), view=view).prompt
    assert [span.handle for span in prompt.spans] == handles[:3]
    text = f"See{PAGES[0]}Source: page 1{PAGES[1]}{PAGES[2]}"
    assert prompt.token_ids == ENGINE.prefill(text, reuse=False).prompt.token_ids
    middleware, found = KnowledgePackMiddleware(), ToolMessage(content, tool_call_id="1")
    assert middleware.before_model({"messages": [found]}, None) == {"packs": handles[:3]}
    assert middleware_file._packs_in(found, view) == list(map(Handle.parse, handles[:3]))
    found, _ = answered(middleware, model, [HumanMessage(content)], AIMessage(""))
    assert middleware_file._words(found[0]) == "SeeSource: page 1"
    for forged in (5, "kp:book/x", handles[:1], [None], {"kp": 1}):
        said = [{"role": "user", "content": "Hi", "before": forged}]
        assert not ENGINE.prefill(said, view=view).prompt.spans, "only objects, which JSON cannot hold"
    pages = [[block] for block in blocks(*PAGES)]
    sent(searching(facts), model, reading([*([handle, {"type": "text", "text": "Source"}] for handle in handles)]))
    assert len(list(facts.facts())) == len(PAGES), "only the pages themselves"
    assert sent(KnowledgePackMiddleware(), model, reading(pages[:3]))


def test_errors_and_our_own_lines_are_no_facts(model, facts):
    long = f"{PAGES[0]}{' boats' * 50_000}"
    messages = reading([long, *PAGES[1:]], "page 3")
    refused = RepeatedCallMiddleware()
    calls = [message.tool_calls[0] for message in messages if message.type == "ai"]
    messages[4] = messages[4].model_copy(update={"status": "error"})
    assert PAGES[1] == messages[4].text
    sent(searching(facts), model, messages)
    stored = {fact.text for fact in facts.facts(namespace="book")}
    assert long in stored
    assert PAGES[2] in stored
    assert PAGES[1] not in stored
    assert not any("This result has" in text for text in stored)
    same = [AIMessage("", tool_calls=[{**calls[0], "id": str(number)}]) for number in range(3)]
    said = middleware_file._refusal(ToolCallRequest(same[-1].tool_calls[0], None, {"messages": same}, None))
    assert said.status == "error"
    assert refused.wrap_tool_call(ToolCallRequest(calls[0], None, {"messages": []}, None), lambda _: said) is said


def test_the_schema_of_the_answer_takes_room(model, handles):
    fields = {f"field_{n}": {"type": "string", "description": "What is said of it, in a word. " * 20} for n in range(9)}
    schema = {"title": "Said", "description": "", "type": "object", "properties": fields}
    messages, middleware = reading(handles * 10), KnowledgePackMiddleware(memory_tokens=1.0)
    for strategy in (ToolStrategy(schema), ProviderStrategy(schema), AutoStrategy(schema)):
        tools, most = list(middleware_file._schemas(strategy)), 0
        for count in range(400, 600, 2):
            kept = sent(middleware, model, messages[: count + 1], response_format=strategy)
            read = model.get_num_tokens_from_messages([SystemMessage("You read."), *kept], tools) + model.max_tokens
            most = max(most, read)
        assert 0.9 * ENGINE.max_positions < most <= ENGINE.max_positions


def test_a_bound_model_and_a_model_that_sees(model, handles):
    messages = reading(handles * 10)
    bound = model.bind(stop=["\n"])
    assert sent(KnowledgePackMiddleware(), bound, messages) == sent(KnowledgePackMiddleware(), model, messages)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = [HumanMessage([*blocks("What is this?"), image])]
    other = GenericFakeChatModel(messages=iter(()))
    assert sent(KnowledgePackMiddleware(model=model), other, seen)[0].content[-1] == image


def test_a_line_never_parts_a_call_from_its_result(model, handles):
    messages = [*reading(handles[:20]), SystemMessage("The user has gone."), *exchange(50, *handles[20:22])]
    kept = sent(KnowledgePackMiddleware(memory_tokens=600), model, messages)
    assert any("searched again" in message.text for message in kept)
    for before, message in itertools.pairwise(kept):
        assert message.type != "tool" or before.type in ("ai", "tool")


def test_nothing_and_no_list_do_no_harm(model, handles):
    assert sent(KnowledgePackMiddleware(), model, reading(handles[:2]), packs=())
    request = ModelRequest(model=model, messages=reading(handles[:2]), model_settings={"packs": None}, state={})
    assert not KnowledgePackMiddleware().wrap_model_call(request, lambda _: ModelResponse([])).result
    assert middleware_file._union(None, ["x"]) == middleware_file._union(["x"], 5) == ["x"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_tokens": 0}, "memory_tokens=0"),
        ({"memory_tokens": "all"}, "memory_tokens='all'"),
        ({"memory_tokens": 1.5}, "a share up to 1.0"),
        ({"memory": "search"}, "with the store of the facts"),
        ({"memory": "find"}, "memory='find'"),
        ({"facts": object()}, "expected memory='search'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(OptionError, match=message):
        KnowledgePackMiddleware(**settings)


@pytest.mark.slow
async def test_an_agent_reads_beyond_its_window(model, handles):
    class Reads(AgentMiddleware):
        async def awrap_model_call(self, request, handler):
            called = sum(message.type == "tool" for message in request.state["messages"])
            assert behind(model, request.messages) <= 2000
            return await handler(request.override(tool_choice="any" if called < 30 else "none"))

    left = iter(handles)

    @tool
    def read() -> str:
        """Read the next page."""
        return next(left)

    model = model.model_copy(update={"max_tokens": 60})
    agent = create_agent(model, [read], middleware=[KnowledgePackMiddleware(memory_tokens=2000), Reads()])
    state = await agent.ainvoke({"messages": [HumanMessage("Read.")]}, {"recursion_limit": 200})
    assert results(state["messages"]) == state["packs"] == handles


class Insists(AgentMiddleware):
    """A model that makes these calls, then answers."""

    def __init__(self, *calls):
        self.calls = list(calls)

    def wrap_model_call(self, request, handler):
        if not self.calls:
            return AIMessage("Done.")
        named = [
            {"name": "look", "args": {"at": at}, "id": f"{len(self.calls)}{n}"} for n, at in enumerate(self.calls[0])
        ]
        del self.calls[0]
        return AIMessage("", tool_calls=named)

    async def awrap_model_call(self, request, handler):
        return self.wrap_model_call(request, handler)


async def test_the_third_identical_call_in_a_row_is_answered(model):
    looked = []

    @tool
    def look(at: str) -> str:
        """Look at a thing."""
        looked.append(at)
        return f"It is {at}."

    steps = ["a"], ["a"], ["b"], ["a"], ["a"], ["a"], ["a"], ["c", "c", "c"]
    for run in ("invoke", "ainvoke"):
        looked.clear()
        agent = create_agent(model, [look], middleware=[RepeatedCallMiddleware(), Insists(*steps)])
        asked = {"messages": [HumanMessage("Look.")]}
        state = agent.invoke(asked) if run == "invoke" else await agent.ainvoke(asked)
        assert sorted(looked) == ["a", "a", "a", "a", "b", "c", "c"]
        assert ["three times in a row" in text for text in results(state["messages"])] == [
            *[False] * 5,
            *[True] * 2,
            *[False] * 2,
            True,
        ]
    # The user may ask for the same again.
    agent = create_agent(model, [look], middleware=[RepeatedCallMiddleware(), Insists(["a"])])
    again = agent.invoke({"messages": [*state["messages"][:4], HumanMessage("Again.")]})
    assert results(again["messages"])[-1] == "It is a."
