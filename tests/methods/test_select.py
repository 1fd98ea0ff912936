"""Packs that are selected: the right ones, answered from exactly as their text is."""

import json
import logging
import re
import shutil
from dataclasses import replace

import pytest
import torch

from kp_core import PackStore
from kp_core.errors import ContextOverflowError, OptionError
from kp_core.prompt.conversation import Turn, to_turns
from kp_methods import select
from kp_methods.calibration import Calibrations
from kp_methods.select import Selector, _new_words, query_of, selector_of
from tests.conftest import tiny_engine

TOWNS = ("Calder Bridge", "Port Ambrose", "Tillingfold", "Great Wenlow", "Saint Osric")
TEXTS = [
    f"{town} lies by the sea, and most of its houses are old. The lighthouse keeper of {town} is {name}. In winter the "
    "ferry does not run, and the road over the hills is the only way out."
    for town, name in zip(TOWNS, ("Ida Marsh", "Owen Thorpe", "Lena Fairlie", "Hugh Sand", "Rosa Teal"), strict=True)
]
SELECT = "select:packs=1"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Each test has a cache of its own for heads."""
    monkeypatch.setattr(select, "cache_directory", lambda: tmp_path / "cache")


def five(engine, folder):
    """The engine, a view of packs about five towns, and their handles."""
    store = PackStore(folder)
    handles = [str(store.put(pack)) for pack in engine.build_packs(TEXTS, namespace="towns", progress=False)]
    engine.clear_cache()
    return engine, {"view": store.view("towns"), "max_tokens": 12}, handles


@pytest.fixture
def towns(smol_here, tmp_path):
    """On the bundled model, which finds the town that a question is about."""
    return five(smol_here, tmp_path)


@pytest.fixture(params=["thin", pytest.param("smol_here", marks=pytest.mark.nightly)])
def anywhere(request, tmp_path):
    """Where it does not matter which town is found."""
    return five(request.getfixturevalue(request.param), tmp_path)


def ask(handles, town):
    return "\n\n".join([*handles, f"Who is the lighthouse keeper of {town}?"])


def test_the_pack_that_is_asked_for_is_read_and_no_other(towns):
    engine, options, handles = towns
    for town, handle in list(zip(TOWNS, handles, strict=True))[::2]:
        answer = engine.generate(ask(handles, town), composer=SELECT, **options)
        assert [str(one) for one in answer.packs] == [handle]
        assert answer.usage.unread_packs == 4
        assert answer.usage.approximate_tokens == 0


def test_the_answer_is_that_of_the_text_of_what_was_read(towns):
    engine, options, handles = towns
    question = f"Who is the lighthouse keeper of {TOWNS[2]}, and who of {TOWNS[0]}?"
    answer = engine.generate("\n\n".join([*handles, question]), composer="select", **options)
    texts = [TEXTS[handles.index(str(handle))] for handle in answer.packs]
    assert len(texts) == 2
    engine.clear_cache()
    plain = engine.generate("\n\n".join([*texts, question]), max_tokens=12)
    assert answer.prompt.token_ids == plain.prompt.token_ids
    assert answer.token_ids == plain.token_ids
    assert torch.equal(answer.logits, plain.logits)


def test_selecting_leaves_nothing_behind_that_a_plain_prompt_could_find(anywhere):
    engine, options, handles = anywhere
    engine.generate(ask(handles, TOWNS[1]), composer=SELECT, **options)
    warm = engine.generate(ask(handles, TOWNS[1]), **options)
    cold = engine.generate(ask(handles, TOWNS[1]), reuse=False, **options)
    assert torch.equal(warm.logits, cold.logits)
    assert warm.token_ids == cold.token_ids


def test_an_attention_weight_is_that_of_a_forward_pass_over_the_same_kv(anywhere):
    """The fast pass, which ends at the last layer that it needs, against all layers and heads."""
    engine, options, handles = anywhere
    selector = selector_of(engine.host)
    view = replace(options["view"], model=engine.fingerprint)
    packs = to_turns([{"role": "user", "content": "\n".join(handles)}], view)[0].segments[::2]
    some = selector._by_head(packs, "Who keeps it?", view, 2)
    everything = selector._by_head(packs, "Who keeps it?", view)
    assert len(some) == len(everything) == len(handles)
    for pack, few, full in zip(packs, some, everything, strict=True):
        assert few.shape[0] == 2
        assert full.shape[2] == len(pack.pack.token_ids)
        assert torch.equal(few, full[:2])
        assert float(full.min()) >= 0


def test_an_agent_keeps_what_it_selected_and_selects_for_each_call(towns):
    engine, options, handles = towns

    def call(town):
        arguments = {"query": f"lighthouse keeper of {town}"}
        return {"role": "assistant", "tool_calls": [{"name": "search", "arguments": arguments}]}

    result = {"role": "tool", "name": "search", "content": "\n\n".join(handles)}
    messages = [{"role": "user", "content": "Who are the keepers?"}, call(TOWNS[3]), result]
    first = engine.generate(messages, composer=SELECT, **options)
    assert [str(handle) for handle in first.packs] == [handles[3]]
    messages += [{"role": "assistant", "content": first.text}, call(TOWNS[0]), result]
    second = engine.generate(messages, composer=SELECT, **options)
    assert [str(handle) for handle in second.packs] == [handles[3], handles[0]]
    assert second.prompt.token_ids[: first.prompt.spans[0].stop] == first.prompt.token_ids[: first.prompt.spans[0].stop]
    assert second.usage.computed_tokens < len(second.prompt) - first.prompt.spans[0].stop


def lazily(engine, folder, count):
    """Handles of packs that are not compiled, and a view of them."""
    store = PackStore(folder)
    packs = (engine.build_pack(TEXTS[at % 5] + f" {at}", namespace="towns", lazy=True) for at in range(count))
    return [str(store.put(pack)) for pack in packs], store.view("towns")


def test_what_cannot_be_compared_is_sent_whole_and_said(anywhere, tmp_path, caplog):
    engine, options, _ = anywhere
    handles, view = lazily(engine, tmp_path / "lazy", 2)
    options |= {"view": view}
    with caplog.at_level(logging.WARNING, "kp_methods"):
        answers = [engine.generate(ask(handles, town), composer=SELECT, **options) for town in TOWNS[:2]]
    for answer in answers:
        assert answer.usage.unread_packs == 0
        assert [str(handle) for handle in answer.packs] == handles
        said = "select:packs=1 could not choose, because some packs are not compiled for this model: all are sent"
        assert answer.usage.choice == said
    assert caplog.text.count("could not choose") == 1
    assert str(engine.explain(ask(handles, TOWNS[2]), composer=SELECT, **options)).count(said) == 1


@pytest.mark.slow
def test_what_is_sent_without_a_choice_fits_the_window(anywhere, tmp_path):
    engine, options, _ = anywhere
    handles, view = lazily(engine, tmp_path / "lazy", engine.max_positions // 30)
    tools = [{"name": "search", "description": "Find a town, and who lives there. " * 20}]
    options |= {"view": view, "max_tokens": 100, "tools": tools}
    with pytest.raises(ContextOverflowError):
        engine.explain(ask(handles, TOWNS[0]), **options)
    explanation = engine.explain(ask(handles, TOWNS[0]), composer=SELECT, **options)
    assert explanation.choice.endswith("the first ones that fit are sent")
    sent = explanation.rows[-1].stop
    assert 0.9 * engine.max_positions < sent <= engine.max_positions - 100
    assert f"{handles[0]} " in str(explanation)
    # Of two lists that are too long, both are shortened.
    many = [{"role": "user", "content": ask(handles, town)} for town in TOWNS[:2]]
    many.insert(1, {"role": "assistant", "content": "So."})
    assert engine.explain(many, composer=SELECT, **options).rows[-1].stop <= engine.max_positions - 100


def test_without_heads_it_says_so(anywhere, monkeypatch):
    engine, options, handles = anywhere
    monkeypatch.setattr(Calibrations, "_shipped", lambda _: None)  # It has heads of the bundled model.
    engine._last_planner = None
    attention = type(engine)._attention
    monkeypatch.setattr(type(engine), "_attention", lambda *asked: attention(*asked) * float("nan"))
    answer = engine.generate(ask(handles, TOWNS[0]), composer=SELECT, **options)
    assert answer.usage.choice.startswith("select:packs=1 could not choose, because no retrieval heads of this model")
    assert len(answer.packs) == 5
    engine._last_planner = None


def test_damaged_heads_are_found_again(anywhere, tmp_path, monkeypatch):
    engine, options, handles = anywhere
    monkeypatch.setattr(Calibrations, "_shipped", lambda _: None)
    engine._last_planner = None
    first = engine.generate(ask(handles, TOWNS[0]), composer=SELECT, **options)
    found, (file,) = selector_of(engine.host)._found, (tmp_path / "cache").glob("composers/*")
    for damaged in ("{}", "[]", "[[1]]", "[[99, 0]]", "[[1, 99]]"):
        file.write_text(damaged)
        engine._last_planner = None
        engine.clear_cache()
        again = engine.generate(ask(handles, TOWNS[0]), composer=SELECT, **options)
        assert selector_of(engine.host)._found == found
        assert again.token_ids == first.token_ids
        assert json.loads(file.read_text()) == list(map(list, zip(*found, strict=True)))
    engine._last_planner = None


def test_the_heads_that_come_with_the_package_are_the_found_ones(smol_here):
    found, fresh = selector_of(smol_here.host)._heads(), Selector(smol_here.host)
    assert set(zip(*found, strict=True)) == set(zip(*fresh._heads(), strict=True))


def test_a_new_process_need_not_look_for_the_heads_again(anywhere, monkeypatch):
    engine, options, handles = anywhere
    engine._last_planner = None
    first = engine.generate(ask(handles, TOWNS[0]), composer=SELECT, **options)
    found = selector_of(engine.host)._found
    engine._last_planner = None
    monkeypatch.setattr(Selector, "_next_text", lambda _: pytest.fail("they are kept"))
    again = engine.generate(ask(handles, TOWNS[0]), composer=SELECT, **options)
    assert selector_of(engine.host)._found == found
    assert again.token_ids == first.token_ids
    engine._last_planner = None


def test_heads_are_found_behind_an_answer_without_packs(tmp_path, monkeypatch):
    engine, options, handles = five(tiny_engine.__wrapped__(), tmp_path / "packs")
    before = Selector(engine.host)._heads()
    shutil.rmtree(tmp_path / "cache")
    engine.generate("Hello.", composer=SELECT, max_tokens=1)
    engine.when_idle(lambda: None).result()
    assert selector_of(engine.host)._found == before
    monkeypatch.setattr(Selector, "_next_text", lambda _: pytest.fail("they are known"))
    assert engine.generate(ask(handles, TOWNS[0]), composer=SELECT, **options).usage.unread_packs == 4


def test_a_choice_finishes_the_search_that_the_background_began(tmp_path, monkeypatch):
    engine, options, handles = five(tiny_engine.__wrapped__(), tmp_path / "packs")
    whole = Selector(engine.host)._heads()
    shutil.rmtree(tmp_path / "cache")
    selector, texts, next_text = selector_of(engine.host), [], Selector._next_text
    next(selector._search())
    monkeypatch.setattr(Selector, "_next_text", lambda of: texts.append(of) or next_text(of))
    engine.generate(ask(handles, TOWNS[0]), composer=SELECT, **options)
    assert selector._found == whole
    assert len(texts) == 1


def test_more_packs_than_the_model_has_positions(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    texts = [f"{at} {'abcdefghij'[at % 10] * 90}" for at in range(40)]
    handles = [str(store.put(pack)) for pack in engine.build_packs(texts, progress=False)]
    assert sum(map(len, texts)) > engine.max_positions
    answer = engine.generate(ask(handles, "X"), composer=SELECT, view=store.view("default"), max_tokens=2)
    assert answer.usage.unread_packs == 39
    with pytest.raises(ContextOverflowError):
        engine.generate(ask(handles, "X"), view=store.view("default"), max_tokens=2)


def test_packs_are_read_for_the_question_that_belongs_to_them():
    turns = [
        Turn("system", ("Memory.",)),
        Turn("user", ("What is new?",)),
        Turn("assistant", (), ({"name": "search", "arguments": {"query": "news of May"}},)),
        Turn("tool", ("Found:",)),
        Turn("user", ("And before?",)),
    ]
    assert query_of(turns, 0) == "And before?"
    assert query_of(turns, 1) == "What is new?"
    assert query_of(turns, 3) == 'What is new?\n{"query": "news of May"}'


def test_a_second_pack_is_looked_for_by_what_the_first_one_says(smol_here, tmp_path):
    people = ("Kitty Eastlake", "Ansel Farrow", "Dora Dunmore", "Hugo Crake")
    homes = [f"It is a quiet street. {who} lives in {town}." for who, town in zip(people, TOWNS, strict=False)]
    store = PackStore(tmp_path)
    handles = [str(store.put(pack)) for pack in smol_here.build_packs(homes[:2] + TEXTS, progress=False)]
    asked = "\n\n".join([*handles, "Who is the lighthouse keeper of the town where Ansel Farrow lives?"])
    answer = smol_here.generate(asked, composer="select", view=store.view("default"), max_tokens=12)
    assert [str(handle) for handle in answer.packs] == [handles[1], handles[3]]  # The chain ends beside the question.


def test_a_pack_that_the_question_names_too_is_read(towns):
    engine, options, handles = towns
    asked = "\n\n".join([*handles, f"Who are the lighthouse keepers of {TOWNS[1]} and {TOWNS[4]}?"])
    answer = engine.generate(asked, composer="select", **options)
    assert {str(handle) for handle in answer.packs} == {handles[1], handles[4]}
    only = engine.generate(asked, composer=SELECT, **options)
    assert str(only.packs[0]) == str(answer.packs[-1])  # The one that it looks at most stands beside it.


def test_a_pack_that_nothing_speaks_for_is_not_read(towns):
    engine, options, handles = towns
    answer = engine.generate(ask(handles, TOWNS[3]), composer="select:packs=5", **options)
    assert [str(handle) for handle in answer.packs] == [handles[3]]
    few = engine.generate(ask([handles[0], *handles[2:4]], TOWNS[3]), composer="select:packs=3", **options)
    assert [str(handle) for handle in few.packs] == [handles[3]]


def test_of_two_sentences_that_name_it_the_one_that_is_asked_for_is_found(anywhere):
    engine, _, _ = anywhere
    pack = engine.build_pack("The mayor of Calder Bridge is Ida Marsh. The market of Calder Bridge is held on Monday.")
    weights = torch.ones(4, len(pack.token_ids))
    for asked, found in (("Who is the mayor of Calder Bridge?", 0), ("When is the market of Calder Bridge held?", 1)):
        sentence = selector_of(engine.host)._sentence(pack, weights, asked)
        assert sentence == re.split(r"(?<=\.) ", pack.text)[found]


def test_at_least_so_many_packs_are_read(towns):
    engine, options, handles = towns
    answer = engine.generate(ask(handles, TOWNS[3]), composer="select:packs=3,least=2", **options)
    first, last = map(str, answer.packs)
    assert last == handles[3] != first
    assert answer.usage.unread_packs == 3
    everything = engine.generate(ask(handles, TOWNS[3]), composer="select:packs=9,least=9", **options)
    assert len(everything.packs) == 5


def test_words_that_are_known_are_not_looked_up():
    assert _new_words("The mayor of Bristead is Ansel O'Hara.", "Who is the MAYOR of Bristead?") == "Ansel O'Hara"
    assert not _new_words("It is 4 m high.", "Is it 4 m high?")


def test_the_sentence_with_most_attention(anywhere):
    engine, _, _ = anywhere
    pack = engine.build_pack("It is old. Port Ambrose has a pier!\nNothing more is known")
    ids, sentences = pack.token_ids, set()
    for at in range(len(ids)):
        weights = torch.zeros(2, len(ids))
        weights[1, at] = 1
        sentences.add(selector_of(engine.host)._sentence(pack, weights, ""))
    assert sentences == {"It is old.", "Port Ambrose has a pier!", "Nothing more is known"}


@pytest.mark.parametrize(
    "name",
    [
        "select:packs=0",
        "select:packs=1.5",
        "select:packs=inf",
        "select:packs=many",
        "select:k=2",
        "select:least=0",
        "select:packs=2,least=3",
        "select:least=many",
    ],
)
def test_bad_parameters_are_refused(name):
    with pytest.raises(OptionError, match="Got"):
        tiny_engine().generate("Hello.", composer=name)


def test_the_error_says_which_parameter_is_wrong():
    with pytest.raises(OptionError, match=r"Got packs=0\.0; expected the most packs to read, from 1 on"):
        tiny_engine().generate("Hello.", composer="select:packs=0")
    with pytest.raises(OptionError, match="Got least=3 above packs=2, the most to read; raise packs"):
        tiny_engine().generate("Hello.", composer="select:least=3")
