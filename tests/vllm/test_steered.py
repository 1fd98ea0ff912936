"""Steered KV through a real server, and packs with errata."""

import pytest

from kp_core.steering import preset
from kp_methods.edit import amend
from tests.vllm.test_served import loaded


@pytest.fixture(scope="module")
def formal(smol):
    return smol.make_steering(preset("formal")[:4], progress=False)


@pytest.mark.parametrize(
    "part", [slice(5), pytest.param(slice(5, None), marks=pytest.mark.nightly)], ids=["few", "rest"]
)
def test_steered_answers_are_those_of_the_local_engine(both, formal, questions, part):
    different, moved = [], 0
    for number, (question, text) in enumerate(questions[part]):
        content = f"{{0}}\n{question}"
        alpha, scope = [(1.5, "pack"), (2.0, "system")][number % 2]
        steered = {"steering": (formal, alpha), "scope": scope, "max_tokens": 12}
        texts = [f"Told on the quay. {text}"]  # Other tests have packs of the text alone, and KV that is there.
        there, here = both.ask(content, texts, **steered)
        assert there.prompt.token_ids == here.prompt.token_ids
        if scope == "pack":
            assert there.usage.computed_tokens == len(there.prompt)
        if there.text != here.text:
            different.append((question, there.text, here.text))
        if number < 4:
            # What was altered is found by nobody who did not ask for it, and again by who does.
            plain, expected = both.ask(content, texts, max_tokens=12)
            moved += here.text != expected.text
            assert plain.text == expected.text
            again = both.ask(content, texts, **steered)[0]
            assert again.text == there.text
            assert again.usage.computed_tokens < there.usage.computed_tokens
    assert len(different) <= (part.start is not None), different  # One of all twenty may round differently.
    assert moved  # The test can fail.


def test_blocks_of_a_conversation_see_those_before_them(both, formal, questions):
    (_, first), (question, second) = questions[2:4]
    messages = [
        {"role": "user", "content": "{0}\nRemember this."},
        {"role": "assistant", "content": "I shall."},
        {"role": "user", "content": f"{{1}}\n{question}"},
    ]
    options = {"steering": (formal, 2.0), "scope": "pack", "max_tokens": 12}
    there, here = both.ask(messages, [f"Of old. {first}", second], **options)
    assert there.text == here.text
    assert there.usage.computed_tokens == len(there.prompt)


def test_an_edited_pack_is_a_pack(both, questions):
    """Its erratum, too, is read from the KV that the engine here computed."""
    server, smol = both.server, both.here
    text = "The lighthouse of Vint Harbour was built by Osk Merrel in the year 214.\n" + questions[5][1]
    pack = amend(smol.build_pack(text, namespace="own"), "Osk Merrel", "Ines Tarn", smol, squash_above=1.0)
    assert pack.text.startswith(text)
    asked = f"{server.store.put(pack)}\nWho built the lighthouse?"
    server.compile(questions[5][1])  # And what stands before packs.
    before = loaded(server)
    said, usage = server.chat(asked, max_tokens=12)
    assert loaded(server) - before == usage["prompt_tokens_details"]["cached_tokens"] >= len(pack.token_ids)
    here = f"{both.local.put(pack)}\nWho built the lighthouse?"
    assert said == smol.generate(here, view=both.local.view("own"), max_tokens=12).text
