"""What conversations begin with is kept, and found by the next process; here that is a session with an empty tree."""

import pytest
import torch

from kp_core import KnowledgePack, PackStore, load_engine
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.prompt.template import ChatTemplate
from kp_core.tools import AnswerShape
from tests.core.engines.test_keeping import TEXTS, fresh_engine
from tests.kits import tiny_model, tiny_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_{number}",
            "description": f"Looks at lamp {number}.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
    for number in range(4)
]
HEAD = [{"role": "system", "content": "You keep the lamps of Veyl."}]
ASKED = [*HEAD, {"role": "user", "content": "Which of the lamps burns kelp oil?"}]
OTHER = [*HEAD, {"role": "user", "content": "And who counts the ships?"}]
CACHED = {"cache_control": {"type": "ephemeral"}}


def ask(engine, store, messages, tools=TOOLS, **options):
    return engine.generate(messages, **{"view": store.view("mine"), "tools": tools, "max_tokens": 3, **options})


def computed(engine, store, messages, **options):
    return ask(engine, store, messages, **options).usage.computed_tokens


def prompt(messages, tools=TOOLS):
    return ChatTemplate(tiny_tokenizer(merges=7)).render(messages, shape=AnswerShape.of(tools))


def length(messages, tools=TOOLS):
    """The tokens of a prompt."""
    return len(prompt(messages, tools))


def head_of(messages, tools=TOOLS):
    """The tokens in front of the first message of the user."""
    return prompt(messages, tools).breaks[0]


def gone_on(messages, answer, said="And then?"):
    return [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": said}]


def differs(tools, at):
    changed = {**tools[at]["function"], "description": "Looks elsewhere."}
    return [*tools[:at], {**tools[at], "function": changed}, *tools[at + 1 :]]


def test_the_next_process_computes_what_is_new_and_sees_the_same(tmp_path):
    store, messages = PackStore(tmp_path), ASKED
    engine = fresh_engine()
    for _ in range(3):
        known = length(messages)
        messages = gone_on(messages, ask(engine, store, messages, keep="always"))
    found = fresh_engine().prefill(messages, view=PackStore(tmp_path).view("mine"), tools=TOOLS)
    assert known > 800
    assert found.usage.computed_tokens == len(found.prompt) - known, "the last answer, the new message, what follows"
    oracle = fresh_engine().prefill(messages, view=store.view("mine"), tools=TOOLS, reuse=False)
    assert torch.equal(found.logits, oracle.logits)


def test_by_default_what_was_met_twice_is_kept(tmp_path):
    store, engine = PackStore(tmp_path), fresh_engine()
    ask(engine, store, ASKED)
    engine.when_idle(lambda: None).result()
    assert list(store.kept()) == []
    ask(engine, store, OTHER)
    engine.when_idle(lambda: None).result()
    ((entry, _),) = store.kept()
    assert head_of(ASKED) <= len(entry.token_ids) < length(ASKED), "what both began with"
    assert computed(fresh_engine(), store, OTHER) == length(OTHER) - len(entry.token_ids)


def test_short_beginnings_are_not_kept(tmp_path):
    store, engine, short = PackStore(tmp_path), fresh_engine(), [{"role": "user", "content": "Hello?"}]
    for _ in range(2):
        ask(engine, store, short, (), keep="always")
    assert length(short, ()) < 64
    assert list(store.kept()) == []


@pytest.mark.parametrize("at", [0, 3])
def test_changed_schemas_are_found_up_to_the_first_token_that_differs(tmp_path, at):
    store, changed = PackStore(tmp_path), differs(TOOLS, at)
    first = ask(fresh_engine(), store, ASKED, keep="always").prompt.token_ids
    answer = ask(fresh_engine(), store, ASKED, changed, keep="always")
    second = answer.prompt.token_ids
    common = next(at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    assert answer.usage.computed_tokens == len(second) - common
    for tools in (TOOLS, changed):
        assert computed(fresh_engine(), store, ASKED, tools=tools) == 1, "both are stored, with what they share once"
    assert sum(len(entry.token_ids) for entry, _ in store.kept()) == len(first) + len(second) - common


MARKED = {
    "a part": [{"role": "system", "content": [{"type": "text", "text": HEAD[0]["content"], **CACHED}]}],
    "a cache point": [{"role": "system", "content": [HEAD[0]["content"], {"cachePoint": {"type": "default"}}]}],
    "a cache point with a type": [{"role": "system", "content": [HEAD[0]["content"], {"type": "cache_point"}]}],
    "a message": [{**HEAD[0], **CACHED}],
    "a tool": HEAD,
}


@pytest.mark.parametrize("what", MARKED)
def test_what_is_marked_is_kept_at_once_and_nothing_behind_it(tmp_path, what):
    store, tools = PackStore(tmp_path), [{**tool, **CACHED} for tool in TOOLS] if what == "a tool" else TOOLS
    ask(fresh_engine(), store, [*MARKED[what], *ASKED[1:]], tools)
    ((entry, _),) = store.kept()
    assert len(entry.token_ids) == head_of(ASKED)
    assert computed(fresh_engine(), store, OTHER) == length(OTHER) - head_of(ASKED)


def test_a_mark_in_a_conversation_keeps_all_before_it(tmp_path):
    store = PackStore(tmp_path)
    messages = gone_on(ASKED, ask(fresh_engine(), store, ASKED, keep="never"))
    ask(fresh_engine(), store, [*messages[:-1], {**messages[-1], **CACHED}])
    assert computed(fresh_engine(), store, messages) == 1


@pytest.mark.parametrize("keep", ["never", "always"])
def test_a_head_is_of_its_namespace(tmp_path, keep):
    store = PackStore(tmp_path)
    ask(fresh_engine(), store, ASKED, keep=keep)
    assert (computed(fresh_engine(), store, ASKED) == 1) == (keep == "always")
    for view in (store.view("other"), store.view("other", "mine")):  # The second does not say whose words these are.
        assert computed(
            fresh_engine(), store, ASKED, view=view, keep="always" if view.namespaces == {"other"} else "never"
        )
    assert bool(store.forget("mine")) == (keep == "always")
    assert computed(fresh_engine(), store, ASKED) == length(ASKED)


def test_words_that_hold_a_pack_as_text_are_deleted_with_it(tmp_path):
    """The template changes the pack, so it goes as text."""
    tokenizer = tiny_tokenizer(merges=7)
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content'] +", "message['content'] | upper +")
    engine, store = load_engine(tiny_model("llama"), tokenizer=tokenizer), PackStore(tmp_path)
    handle = store.put(KnowledgePack(TEXTS[0], "veyl", (), (), ModelFingerprint.unknown()))
    view = store.view("veyl", "mine")
    answer = engine.generate(f"{handle}\n\nWho?", view=view, keep="always", keep_in="mine", max_tokens=3)
    assert TEXTS[0].upper() in answer.prompt.rendered
    assert [entry.owners for entry, _ in store.kept()] == [{str(handle), "mine"}]
    store.remove(handle)
    assert list(store.kept()) == []
