"""The table of options in every place that takes options; `python -m tests.parity.test_options` writes its page."""

from pathlib import Path
from unittest import mock

import pytest
from langchain_core.language_models import BaseChatModel
from llama_index.core.llms.function_calling import FunctionCallingLLM
from pydantic import ValidationError

from kp_core import PackStore
from kp_core.errors import OptionError, PromptError
from kp_core.plan.engine import CAPABILITIES
from kp_core.plan.planner import Planner
from kp_core.plan.request import ABOUT, OF_THE_CORE, OPTIONS, PER_CALL
from kp_core.settings import CALL_OPTIONS, MODEL_OPTIONS
from kp_langchain import ChatKnowledgePacks
from kp_llamaindex import KnowledgePackLLM
from tests.conftest import tiny_engine
from tests.kits import CHATML, NaiveComposer
from tests.parity.test_seams import FixedEngine

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
ADAPTERS = {"langchain": ChatKnowledgePacks, "llamaindex": KnowledgePackLLM}
PAIRS = [("an 7 er", "er 42")]
FACT = "The mill of Veyl.\n"
THINKS = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"title": "Found", "type": "object", "properties": {"n": {"type": "integer"}}}
VALUES = {
    "max_tokens": lambda _: 2,
    "temperature": lambda _: 0.5,
    "top_p": lambda _: 0.9,
    "top_k": lambda _: 3,
    "repetition_penalty": lambda _: 1.5,
    "seed": lambda _: 7,
    "stop": lambda _: ["x"],
    "logprobs": lambda _: True,
    "top_logprobs": lambda _: 2,
    "packs": lambda store: [str(store.handle(FACT, "open"))],
    "placement": lambda _: "system",
    "composer": lambda _: NaiveComposer(),
    "keep": lambda _: "always",
    "keep_in": lambda _: "open",
    "mismatch": lambda _: "rebuild",
    "unresolved": lambda _: "error",
    "steering": lambda _: engine().make_steering(PAIRS, progress=False),
    "scope": lambda _: "system",
    "thinking": lambda _: False,
    "timeout": lambda _: 60.0,
    "tools": lambda _: [TOOL],
    "tool_choice": lambda _: "none",
    "parallel_tool_calls": lambda _: False,
    "response_schema": lambda _: SCHEMA,
    "reuse": lambda _: False,
}

either = pytest.mark.parametrize("adapter", ADAPTERS)


def page():
    """The page of options."""
    lines = [
        "# Options",
        "",
        "Made from `kp_core.plan.request.OPTIONS` by `python -m tests.parity.test_options`; do not edit.",
        "",
        "Each with its default (`None` leaves it there). Unknown names raise `OptionError`, which names the near miss.",
    ]
    for title, names in (
        ("Fields of a model, and options of each call", [name for name in OPTIONS if name in MODEL_OPTIONS]),
        ("Options of a call alone", PER_CALL),
        ("Options of a session's methods alone", OF_THE_CORE),
    ):
        lines += ["", f"## {title}", ""]
        lines += [f"- `{name}` (`{OPTIONS[name].default!r}`): {ABOUT[name]}" for name in names]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def engine():
    return tiny_engine(template=THINKS)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = PackStore(tmp_path_factory.mktemp("packs"))
    pack = engine().build_pack(FACT, namespace="open", compiled_for="system")
    store.put(pack)
    return store


def heard(adapter, store, fields, **options):
    """The request that the engine is asked when a model with `fields` is called with `options`."""
    fixed = FixedEngine(CAPABILITIES, like=engine())
    model = ADAPTERS[adapter](engine=fixed, store=store, namespaces=["open"], **fields)
    with mock.patch.object(Planner, "plan", autospec=True, side_effect=Planner.plan) as planned:
        (model.invoke if adapter == "langchain" else model.complete)("Hi", **options)
    [call] = planned.call_args_list
    return call.args[2]


def plain(value):
    return tuple(value) if isinstance(value, list) else value


def test_the_page_is_the_table():
    assert PAGE.read_text() == page()


def test_the_matrix_has_every_option(store):
    assert set(VALUES) == set(CALL_OPTIONS)
    assert all(OPTIONS[name].default != make(store) for name, make in VALUES.items())


@either
@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_a_field_means_what_the_table_says(adapter, name, store):
    made, option = ADAPTERS[adapter](), OPTIONS[name]
    assert type(made).model_fields[name].description == ABOUT[name]
    for given in (made, ADAPTERS[adapter](**{name: None}), made.model_copy(update={name: None})):
        value = plain(getattr(given, name))
        assert value in (None, option.default)
    assert getattr(heard(adapter, store, {name: None}), name) == option.default
    assert getattr(heard(adapter, store, {}), name) == option.default
    value = VALUES[name](store)
    assert plain(getattr(heard(adapter, store, {name: value}), name)) == plain(value)


@either
@pytest.mark.parametrize("name", CALL_OPTIONS)
def test_an_option_of_a_call_reaches_the_engine(adapter, name, store):
    value = VALUES[name](store)
    assert plain(getattr(heard(adapter, store, {}, **{name: value}), name)) == plain(value)
    assert plain(getattr(heard(adapter, store, {}, **{name: None}), name)) == OPTIONS[name].default


@either
@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelling_is_refused_with_the_near_miss(adapter, name):
    wrong = name + name[-1]
    model = ADAPTERS[adapter](engine=tiny_engine())
    calls = {
        "session": lambda: tiny_engine().generate("Hi", **{wrong: 1}),
        "field": lambda: ADAPTERS[adapter](**{wrong: 1}),
        "call": lambda: (model.invoke if adapter == "langchain" else model.complete)("Hi", **{wrong: 1}),
        "bind": lambda: model.bind(**{wrong: 1}) if adapter == "langchain" else model.stream_chat([], **{wrong: 1}),
    }
    taken = {"session": OPTIONS, "field": MODEL_OPTIONS, "call": CALL_OPTIONS, "bind": CALL_OPTIONS}
    for place, call in calls.items():
        with pytest.raises(OptionError, match=f"no option '{wrong}'") as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert name not in taken[place] or f"Did you mean '{name}'?" in str(caught.value), place


@either
@pytest.mark.parametrize("name", ["view", "cancel", "temprature", "max_new_tokens"])
def test_what_is_no_option_of_an_adapter(adapter, name, store):
    with pytest.raises(OptionError, match=f"no option '{name}'"):
        ADAPTERS[adapter](**{name: 1})
    with pytest.raises(OptionError, match=f"no option '{name}'"):
        heard(adapter, store, {}, **{name: 1})


@either
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("compact", "It is gone in 0.3; packs stand in place of results"),
        ("absorb", "It is gone in 0.3; packs stand in place of results"),
        ("upgrade", "It is gone in 0.3; a request with composer='exact'"),
        ("order", "It is gone in 0.3; packs stand as they are given"),
        ("foreign", "Did you mean 'mismatch'"),
        ("recognise", "It is gone in 0.3; a text is a text"),
        ("co_compile", "It is gone in 0.3; `keep='always'`"),
        ("deterministic", "It is gone in 0.3; an engine computes in one way"),
    ],
)
def test_an_option_of_an_earlier_release_is_refused_and_says_what_to_do(adapter, name, instead, store):
    for ask in (lambda: heard(adapter, store, {name: 1}), lambda: heard(adapter, store, {}, **{name: 1})):
        with pytest.raises(OptionError, match=f"no option '{name}'. {instead}"):
            ask()


@either
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_new_tokens", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("request_timeout", "timeout"),
        ("format", "response_schema"),
        ("json_mode", "response_schema"),
    ],
)
def test_an_option_of_other_chat_models_is_refused_and_names_ours(adapter, name, ours, store):
    with pytest.raises(OptionError, match=f"no option '{name}'. Did you mean '{ours}'"):
        heard(adapter, store, {}, **{name: 1})


@either
@pytest.mark.parametrize("name", ["bank", "banks"])
def test_namespaces_have_one_name(adapter, name, store):
    with pytest.raises(OptionError, match=f"no option '{name}'. Did you mean 'namespaces'"):
        ADAPTERS[adapter](store=store, **{name: ["open"]})


@pytest.mark.parametrize(
    ("adapter", "base"), [("langchain", BaseChatModel), ("llamaindex", FunctionCallingLLM)], ids=ADAPTERS
)
def test_fields_of_the_framework_stay(adapter, base, store):
    made = ADAPTERS[adapter]
    given = {name: getattr(made(), name) for name in base.model_fields}
    assert all(getattr(made(**given), name) == value for name, value in given.items())
    assert made(model_name="a", stop_sequences=["x"], store=store, namespaces="open").namespaces == ("open",)


@either
@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("temperature", -1), ("timeout", 0), ("top_p", "much"), ("placement", "up")]
)
def test_a_bad_value_is_refused_when_the_model_is_made(adapter, name, value, store):
    with pytest.raises(ValidationError, match=name):
        ADAPTERS[adapter](**{name: value})
    with pytest.raises((OptionError, PromptError), match=name):
        heard(adapter, store, {}, **{name: value})
    with pytest.raises(ValidationError, match="expected a composer"):
        ADAPTERS[adapter](composer=NaiveComposer)


if __name__ == "__main__":
    PAGE.write_text(page())
