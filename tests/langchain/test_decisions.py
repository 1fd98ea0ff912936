"""LangChain's decision models: typed questions over packs, and the middlewares that ask them."""

import asyncio
import importlib
import json
import pickle
import threading

import langchain_core
import pytest
from langchain.agents import create_agent
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from kp_core import Question, Session
from kp_core.errors import MissingDependencyError, OptionError, PromptError
from kp_langchain.messages import ContextOverflowError

TEXT = "The ferry to Veyl leaves at 7. The keeper of the lamps counts them at noon, and another man at dusk."
IS_OLD = tuple(map(int, langchain_core.__version__.split(".")[:2])) < (1, 8)

if not IS_OLD:
    from langchain.agents.middleware import AutoModeMiddleware, ModelChoice, ModelRouterMiddleware
    from langchain_core.decisions import Box, Choice, Noul, NoulCriteria, Score

    from kp_langchain.decisions import KnowledgePackDecisions

newer = pytest.mark.skipif(IS_OLD, reason="decision models came with langchain-core 1.8")


@pytest.mark.skipif(not IS_OLD, reason="this langchain-core has decision models")
def test_an_older_core_is_told_which_version_it_takes():
    with pytest.raises(MissingDependencyError, match=f"1.8 or newer; {langchain_core.__version__}"):
        importlib.import_module("kp_langchain.decisions")


@pytest.fixture
def handle(chat_engine, store):
    return str(store.put(chat_engine.build_pack(TEXT, namespace="decided")))


@pytest.fixture
def model(chat_engine, store):
    return KnowledgePackDecisions(engine=chat_engine, store=store, namespaces=["decided"])


def questions():
    return {
        "leaves": Noul(instructions="Does a ferry leave?", criteria=NoulCriteria(true="At 7", false={"never": True})),
        "who": Choice(instructions="Who counts?", criteria={"the keeper": "of lamps", "another man": None}),
        "late": Score(instructions=["How late?"], criteria=["morning", {"at": "noon"}, "dusk"]),
    }


ASKED = {
    "leaves": Question("Does a ferry leave?", {"yes": "At 7", "no": '{"never": true}'}),
    "who": Question("Who counts?", {"the keeper": "of lamps", "another man": ""}),
    "late": Question('["How late?"]', {"0": "morning", "1": '{"at": "noon"}', "2": "dusk"}),
}


@newer
@pytest.mark.parametrize("way", ["text", "message", "messages"])
@pytest.mark.bundled
def test_answers_are_those_of_the_session(model, chat_engine, handle, way):
    states = {"text": handle, "message": HumanMessage(handle), "messages": [HumanMessage(handle)]}
    response = model.invoke({"state": states[way], "questions": questions()})
    decided = chat_engine.decide(TEXT, ASKED)
    expected = {key: [*answer.probabilities.values()] for key, answer in decided.answers.items()}
    assert response.nouls["leaves"].noul == pytest.approx(expected["leaves"][0], rel=1e-4)
    who, late = response.choices["who"], response.scores["late"]
    assert who.probabilities == pytest.approx(dict(decided.answers["who"].probabilities), rel=1e-4)
    assert (who.choice, who.confidence) == (
        max(who.probabilities, key=who.probabilities.get),
        max(who.probabilities.values()),
    )
    assert late.probabilities == pytest.approx(dict(enumerate(expected["late"])), rel=1e-4)
    assert late.score == pytest.approx(late.probabilities[1] + 2 * late.probabilities[2])
    assert late.legend == {0: "morning", 1: {"at": "noon"}, 2: "dusk"}
    assert late.confidence == max(late.probabilities.values())
    assert [*response.answers] == [*ASKED]
    usage = response.usage
    assert usage["input_tokens"] == usage["total_tokens"] == decided.usage.prompt_tokens
    assert 0 < usage["input_token_details"]["cache_read"] < usage["input_tokens"]
    assert response.model == model.model_name


@newer
def test_packs_and_system_stand_before_every_state(chat_engine, store, handle):
    settings = {"engine": chat_engine, "store": store, "namespaces": ["decided"]}
    model = KnowledgePackDecisions(**settings, packs=[handle], system="Be strict.", rotations="all")
    question = {"who": questions()["who"]}
    plain = {"role": "user", "content": "It is noon."}
    for state, system in (
        ("It is noon.", "Be strict."),
        ([SystemMessage("Be kind."), HumanMessage("It is noon.")], "Be strict.\n\nBe kind."),
    ):
        answer = model.invoke({"state": state, "questions": question}).choices["who"]
        messages = [{"role": "system", "content": f"{TEXT}\n\n{system}"}, plain]
        view = store.view("decided")
        expected = chat_engine.decide(
            [{"role": "system", "content": system}, plain],
            {"who": ASKED["who"]},
            packs=[handle],
            view=view,
            rotations="all",
        )
        assert answer.probabilities == dict(expected.answers["who"].probabilities)
        assert messages[0]["content"].startswith(TEXT)
        assert expected.usage.pack_tokens > 0


@newer
def test_json_is_written_with_its_keys_in_order_and_messages_inside_it(model, chat_engine, handle, store):
    call = AIMessage("", tool_calls=[{"name": "look", "args": {"at": 1}, "id": "a"}])
    state = {
        "b": [1, 2.5, None, True],
        "a": {"messages": [HumanMessage(handle), call, ToolMessage("7", tool_call_id="a")]},
    }
    turned = dict(reversed(state.items()))
    one, other = (model.invoke({"state": it, "questions": questions()}) for it in (state, turned))
    assert one.answers == other.answers
    [message] = model._messages(state)
    assert message["role"] == "user"
    assert message["content"].index('"messages"') < message["content"].index('"b": [1, 2.5, null, true]')
    assert json.loads(message["content"])["a"]["messages"][0] == {"role": "user", "content": handle}
    # A handle in a message whose role is not trusted stays text, wherever the message stands.
    [wary] = KnowledgePackDecisions(
        engine=chat_engine, store=store, namespaces=["decided"], trusted_roles=["human"]
    )._messages({"messages": [AIMessage(handle), ToolMessage(handle, tool_call_id="a"), HumanMessage(handle)]})
    assert wary["content"].count(handle) == 1


@newer
def test_what_a_text_model_cannot_decide_is_refused(model):
    block = {"type": "image", "base64": "aGk=", "mime_type": "image/png"}
    ask = {"q": Noul(instructions="Is it?")}
    for state in ({"seen": [block]}, [block], HumanMessage([block]), {"at": {1, 2}}, b"bytes"):
        with pytest.raises(PromptError):
            model.invoke({"state": state, "questions": ask})
    with pytest.raises(PromptError, match="Noul, a Choice or a Score"):
        model.invoke({"state": TEXT, "questions": {"q": Box(instructions="Where?")}})
    with pytest.raises(PromptError, match="image"):
        model.invoke({"state": TEXT, "questions": {"q": Noul(instructions=[block])}})
    with pytest.raises(OptionError, match="at least one"):
        model.invoke({"state": TEXT, "questions": {}})
    with pytest.raises(ContextOverflowError):
        model.invoke({"state": "word " * 100_000, "questions": ask})
    with pytest.raises(OptionError, match="rotation"):
        KnowledgePackDecisions(rotation=2)


@newer
async def test_async_answers_are_the_same_and_do_not_block(model, handle, monkeypatch):
    request, is_free, decide = {"state": handle, "questions": questions()}, threading.Event(), Session._decide

    def decide_when_free(self, *asked):
        assert is_free.wait(60), "the event loop was blocked"
        return decide(self, *asked)

    monkeypatch.setattr(Session, "_decide", decide_when_free)
    asyncio.get_running_loop().call_later(0.01, is_free.set)
    # What they cost differs: one of two may reuse what the other computes.
    answers = [response.answers for response in await model.abatch([request, request])]
    assert answers == [response.answers for response in model.batch([request, request])]
    assert answers[0] == model.invoke(request).answers


@newer
def test_callbacks_see_the_model_and_its_usage(model, handle):
    from langchain_core.tracers import BaseTracer

    class Tracer(BaseTracer):
        def _persist_run(self, run):
            runs.append(run)

    runs = []
    model.invoke({"state": handle, "questions": questions()}, {"callbacks": [Tracer()]})
    [run] = runs
    assert (run.run_type, run.metadata["ls_provider"]) == ("llm", "knowledge_packs")
    assert run.metadata["ls_model_name"] == model.model_name


@newer
def test_the_router_of_langchain_routes_an_agent(model, handle):
    choices = {
        name: ModelChoice(model=FakeMessagesListChatModel(responses=[AIMessage(f"I am {name}.")]), criteria=criterion)
        for name, criterion in (("fast", "Simple tasks."), ("powerful", "Hard tasks."))
    }
    router = ModelRouterMiddleware(choices=choices, instructions="Which model suits the task?", classifier=model)
    agent = create_agent(choices["fast"].model, middleware=[router])
    asked = [HumanMessage(f"{handle}\n\nWho counts the lamps?")]
    result = agent.invoke({"messages": asked})
    question = Choice(instructions="Which model suits the task?", criteria={n: c.criteria for n, c in choices.items()})
    expected = model.invoke({"state": asked[0], "questions": {"model_route": question}}).choices["model_route"]
    assert result["model_route"] == expected
    assert result["messages"][-1].content == f"I am {expected.choice}."


@newer
@pytest.mark.parametrize("task", ["Delete the book.", "Read the book."])
def test_auto_mode_of_langchain_holds_back_calls(model, task):
    done, states = [], []

    @tool
    def touch(what: str) -> str:
        """Touch something."""
        done.append(what)
        return "done"

    class Noted(KnowledgePackDecisions):
        def _classify(self, state, asked):
            states.append((state, asked))
            return super()._classify(state, asked)

    noted = Noted(engine=model.engine, store=model.store, namespaces=model.namespaces)
    call = AIMessage("", tool_calls=[{"name": "touch", "args": {"what": "the book"}, "id": "a"}])
    chat = FakeCaller(responses=[call, AIMessage("So be it.")])
    agent = create_agent(chat, tools=[touch], middleware=[AutoModeMiddleware(tools=[touch], classifier=noted)])
    result = agent.invoke({"messages": [HumanMessage(task)]})
    [(state, asked)] = states
    risk = model._classify(state, asked).nouls["is_risky"].noul
    answer = result["messages"][2]
    assert (done == ["the book"]) == (answer.status == "success") == (risk < 0.5)
    assert f"{risk:.2f}" in answer.content or answer.content == "done"


class FakeCaller(FakeMessagesListChatModel):
    def bind_tools(self, *_, **__):
        return self


@newer
def test_a_model_by_name_is_pickled_with_its_settings():
    model = KnowledgePackDecisions(model="somewhere", system="Be strict.", rotations=2)
    assert pickle.loads(pickle.dumps(model)) == model  # noqa: S301 - ours
    assert model._traced_config(None)["metadata"]["ls_model_name"] == "somewhere"
