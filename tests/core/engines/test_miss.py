"""Why tokens of a prompt are computed, in a sentence."""

import logging
import re

import pytest

from kp_core import PackStore
from kp_core.events import subscribe

SEARCH = {"name": "search", "description": "Search the handbook.", "parameters": {"type": "object"}}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": {"type": "object"}}
SYSTEM = "You answer briefly. Today is Thursday, 26 November 2026."


def talk(system=SYSTEM, *more):
    return [{"role": "system", "content": system}, {"role": "user", "content": "Who keeps the light?"}, *more]


@pytest.fixture
def ask(thin):
    """What the model says that it computed, after what `explain` said before."""
    thin.clear_cache()

    def ask(messages, **options):
        explained = thin.explain(messages, max_tokens=1, **options)
        said = thin.generate(messages, max_tokens=1, **options)
        assert said.usage.miss == explained.miss == explained.to_dict()["miss"]
        assert str(explained).endswith(explained.miss)
        if said.usage.miss.startswith("Computed from token "):
            assert said.usage.reused_tokens == int(said.usage.miss.split()[3])
        return said.usage.miss

    return ask


def test_nothing_is_in_memory_at_first_and_all_of_it_later(ask):
    first = "Computed from the first token on: no beginning of the prompt is in memory or stored."
    assert ask(talk()) == first
    assert ask(talk()) == ""
    assert ask(talk(), reuse=False) == "Computed from the first token on: the request says reuse=False."


def test_a_date_in_the_system_message(ask):
    ask(talk())
    said = ask(talk("You answer briefly. Today is Friday, 27 November 2026."))
    assert said.startswith("Computed from token ")
    assert "' Friday, 27" in said
    assert "in the system message" in said


def test_tools_in_another_order_and_changed_schemas(ask):
    ask(talk(), tools=[SEARCH, WEATHER])
    moved = ask(talk(), tools=[WEATHER, SEARCH])
    assert "in the offer of the tool 'weather'" in moved
    changed = ask(talk(), tools=[SEARCH, {**WEATHER, "description": "The weather of a town."}])
    assert "in the offer of the tool 'weather'" in changed
    assert "' town." in changed
    assert "in the offer of the tool 'search'" in ask(talk(), tools=[{**SEARCH, "description": "Look."}, WEATHER])


def test_the_next_message_of_a_conversation_is_what_is_new(ask):
    ask(talk())
    said = ask(talk(SYSTEM, {"role": "assistant", "content": "Orla."}, {"role": "user", "content": "Since when?"}))
    assert "a message of the role 'assistant'" in said
    other = ask([*talk()[:1], {"role": "user", "content": "Which boats are in?"}])
    assert "'Which boats" in other
    assert "in a message of the role 'user'" in other


def test_a_pack_that_is_computed_is_named(thin, ask, tmp_path):
    store = PackStore(tmp_path)
    lazy = store.put(thin.build_pack("The mill of Veyl has four sails, all new.", namespace="veyl", lazy=True))
    compiled = store.put(thin.build_pack("The lighthouse of Veyl is kept by Orla Venn.", namespace="veyl"))
    view = store.view("veyl")
    ask("Hi")
    assert f"in the pack {lazy}" in ask(f"{lazy}\nWhich?", view=view)
    assert ask(f"{lazy}\nWhich?", view=view) == ""
    # A compiled pack comes from the store, so what stands behind it is the first to be computed.
    behind = ask(f"{compiled}\n\nWho?", view=view)
    assert "Orla" not in behind
    assert behind.endswith("in a message of the role 'user': what is in memory or stored ends there, or differs.")
    ask([*talk()[:1], {"role": "user", "content": "Hi"}], view=view)
    elsewhere = ask([*talk()[:1], {"role": "user", "content": f"{compiled}\n\nWho?"}], view=view)
    assert f"in the pack {compiled}, which is compiled behind another beginning: " in elsewhere
    thin.clear_cache()
    first = ask(f"{compiled}\n\nWho?", view=view)
    count = len(store.get(compiled).token_ids)
    assert re.fullmatch(rf"Computed up to token \d+, where the first of {count} tokens with stored KV stands\.", first)
    thin.clear_cache()
    elsewhere = ask(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{compiled}\n\nWho?"}], view=view
    )
    assert elsewhere.startswith("Computed from the first token on: no beginning of the prompt is in memory or stored; ")
    assert elsewhere.endswith(f"; the pack {compiled} is compiled behind another beginning.")


def test_words_of_a_prompt_are_in_no_event_and_no_log(thin, caplog):
    seen = []
    end = subscribe(lambda *event: seen.append(event))
    with caplog.at_level(logging.DEBUG, "kp_core"):
        thin.generate(talk("A secret word is plumbago."), max_tokens=1)
        said = thin.generate(talk("A secret word is marigold."), max_tokens=1).usage.miss
    end()
    assert "marigold" in said
    assert seen
    assert "marigold" not in f"{seen}{caplog.text}"
