"""Packs whose order is free: exact for the order chosen, and never dearer than the order given."""

import random

import pytest
import torch

from kp_core import PackStore
from kp_core.errors import OptionError
from kp_core.packs.pack import common_length
from tests.conftest import tiny_engine

TEXTS = {
    name: f"Island {name} is {colour}. " + f"Its harbour is {colour} as well, and so are the boats of {name}. " * 5
    for name, colour in zip("abcde", ("green", "blue", "red", "white", "grey"), strict=True)
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def isles(request, tmp_path):
    """An engine with nothing in memory, its options, and how a question about some islands is asked."""
    engine, store = tiny_engine("llama", request.param, chunk_tokens=1024), PackStore(tmp_path)
    engine._planner._ordering.__init__()  # The engine is shared, and so is what it remembers.
    engine.clear_cache()
    handles = {name: str(store.put(engine.build_pack(text, namespace="isles"))) for name, text in TEXTS.items()}

    def ask(names, question="Which?", between="\n\n"):
        return between.join(handles[name] for name in names) + f"\n\n{question}"

    def sent(found):
        return "".join(name for span in found.prompt.spans for name in handles if handles[name] == span.handle)

    return engine, {"view": store.view("isles"), "order": "free"}, ask, sent


def test_a_known_beginning_is_continued(isles):
    engine, free, ask, sent = isles
    engine.prefill(ask("ca", "Why?"), **free | {"order": "given"})
    found = engine.prefill(ask("abc"), **free)
    assert sent(found) == "cab"
    assert found.usage.reordered_packs == 3
    given = engine.prefill(ask("cab"), **free | {"order": "given"}, reuse=False)
    assert found.prompt.token_ids == given.prompt.token_ids
    assert torch.equal(found.logits, given.logits)
    # Seen together, they compute the question alone, from its first other letter on.
    again = engine.prefill(ask("bca", "Who?"), **free)
    assert sent(again) == "cab"
    same = common_length(found.prompt.token_ids, again.prompt.token_ids)
    assert again.usage.computed_tokens == len(again.prompt) - same < len(again.prompt) - found.prompt.spans[-1].stop


def test_the_largest_pack_at_home_goes_first(isles, tmp_path):
    engine, free, _, _ = isles
    store = PackStore(tmp_path / "other")
    small, large = (str(store.put(engine.build_pack(TEXTS["a"] * times, namespace="isles"))) for times in (1, 2))
    elsewhere = engine.build_pack(TEXTS["b"] * 2, namespace="isles", compiled_for="system")
    away = str(store.put(elsewhere))
    found = engine.prefill(f"{away}\n\n{small}\n\n{large}\n\n?", **free | {"view": store.view("isles")})
    assert [span.handle for span in found.prompt.spans] == [large, away, small]
    assert found.usage.reused_tokens >= len(found.prompt.spans[0])


def test_a_pack_named_twice_is_sent_once(isles):
    engine, free, ask, sent = isles
    found = engine.prefill(ask("abacb"), **free)
    assert sorted(sent(found)) == ["a", "b", "c"]
    assert sent(engine.prefill(ask("aba"), **free | {"order": "given"})) == "aba"


def test_never_more_than_the_order_given(isles):
    engine, free, ask, sent = isles
    draw = random.Random(0)
    for number in range(25):
        question = ask(draw.sample(sorted(TEXTS), draw.randint(1, 4)), f"Number {number}?")
        given, planned = (
            engine.explain(question, **free | {"order": order}).counts.get("computed", 0) for order in ("given", "free")
        )
        assert planned <= given
        found = engine.prefill(question, **free)
        assert found.usage.computed_tokens == planned
        oracle = engine.prefill(ask(sent(found), f"Number {number}?"), view=free["view"], reuse=False)
        assert torch.equal(found.logits, oracle.logits)


def test_a_conversation_keeps_its_order(isles):
    engine, free, ask, sent = isles
    engine.prefill(ask("cb", "Why?"), **free | {"order": "given"})
    messages = [{"role": "user", "content": ask("abc")}]
    first = engine.generate(messages, **free, max_tokens=4)
    assert sent(first) == "cba"
    engine.prefill(ask("ab", "Why?"), **free)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": ask("ed", "And these?")}]
    second = engine.generate(messages, **free, max_tokens=4)
    assert sent(second)[:3] == "cba"
    assert second.usage.reused_tokens >= first.prompt.spans[-1].stop


def test_what_is_gone_from_memory_holds_nothing_up(isles):
    engine, free, ask, sent = isles
    engine.prefill(ask("abcd"), **free | {"order": "given"})
    engine.clear_cache()
    engine.prefill(ask("cd", "Why?"), **free | {"order": "given"})
    assert sent(engine.prefill(ask("abcd", "Who?"), **free))[:2] == "cd"


def test_what_is_no_list_keeps_its_order(isles):
    engine, free, ask, sent = isles
    engine.prefill(ask("ba", "Why?"), **free)
    compared = engine.prefill(ask("ab", between=" is older than "), **free)
    assert sent(compared) == "ab"
    numbered = engine.prefill(ask("ab").replace("\n\n", " 2. ", 1), **free)
    assert sent(numbered) == "ab"
    assert numbered.usage.reordered_packs == 0


def test_another_word_is_refused(isles):
    engine, free, ask, _ = isles
    with pytest.raises(OptionError, match="Got order='any'; expected 'given' or 'free'"):
        engine.generate(ask("a"), **free | {"order": "any"})
