"""Typed questions that a real server answers, beside the engine here."""

from concurrent.futures import CancelledError
from threading import Event

import pytest

from kp_core import Question
from kp_core.errors import GenerationTimeoutError, ModelError, UnsupportedRequestError
from kp_core.session.deciding import ballots_of
from kp_core.steering import preset
from tests.kits import NaiveComposer

ISLES = "The Orrelay Isles have a coin, the tallin: a square piece of bronze with a round hole in it.\n" * 12
QUESTIONS = {
    "words": Question("Do the isles have a coin?"),
    "letters": Question("What is it?", {"a square of bronze": "with a hole", "a bar of iron": "", "a shell": ""}),
    "levels": Question("How well is the coin described?", {"0": "not", "1": "a little", "2": "well"}),
    "unlikely": Question("What do the isles have?", ["coin", "algebra"]),
}


def decide(both, text, **options):
    """The decisions of the server and of the engine here, about `text` as a pack behind a line of text."""
    decided = []
    for session, store in ((both.there, both.server.store), (both.here, both.local)):
        lazy = session is both.there or "composer" not in options  # The engine here moves what has KV.
        handle = store.put(session.build_pack(text, namespace="own", lazy=lazy))
        decided.append(session.decide(f"Of old.\n{handle}", QUESTIONS, view=store.view("own"), **options))
    return decided


def check_same(there, here):
    assert [*there.answers] == [*here.answers] == [*QUESTIONS]
    for name, answer in there.answers.items():
        assert sum(answer.probabilities.values()) == pytest.approx(1, abs=1e-12)
        assert answer.probabilities == pytest.approx(here.answers[name].probabilities, rel=0.01)


def test_probabilities_are_those_of_the_local_engine(both):
    there, here = decide(both, ISLES, rotations="all")
    check_same(there, here)
    usage = there.usage
    assert (usage.prompt_tokens, usage.pack_tokens) == (here.usage.prompt_tokens, here.usage.pack_tokens)
    assert usage.prompt_tokens + usage.pack_tokens == usage.reused_tokens + usage.computed_tokens
    assert usage.completion_tokens == 0
    # The first question computes the state; the others find whole blocks of it.
    asked = sum(1 for _ in ballots_of(QUESTIONS, "all", both.there.tokenizer))
    state = usage.pack_tokens // asked
    assert state > 256
    assert usage.reused_tokens >= (asked - 1) * (state - 128)
    again = both.there.decide(ISLES, QUESTIONS, reuse=False)
    assert again.usage.reused_tokens == 0
    check_same(again, both.here.decide(ISLES, QUESTIONS))


def test_likelihoods_are_those_of_the_local_engine(both):
    asked, answer = [ISLES, "The ferry leaves at six."], "What is the coin of the isles called?"
    there, here = (session.log_likelihoods(asked, answer) for session in (both.there, both.here))
    assert there == pytest.approx(here, rel=0.01)
    assert there[0] > there[1]


def test_an_unlikely_label_has_its_probability(both):
    [ballot] = ballots_of({0: QUESTIONS["unlikely"]}, 1, both.here.tokenizer)
    logits = both.here.prefill(f"{ISLES}\n\n{ballot.text}").logits
    best = logits[list(ballot.tokens[1])].max()
    assert (logits > best).sum() > 1000  # No list of the likeliest tokens has it.
    there = both.there.decide(ISLES, {0: QUESTIONS["unlikely"]}, temperature=2.0, top_k=1).answers[0]
    assert there.probabilities["algebra"] == pytest.approx(float(ballot.shares(logits)[1]), rel=0.01)
    assert 0 < there.probabilities["algebra"] < 0.01


def test_all_rotations_make_the_order_of_labels_irrelevant(both):
    labels = QUESTIONS["letters"].labels
    turned = dict([*labels.items()][1:] + [*labels.items()][:1])
    asked = {"given": Question("What is it?", labels), "turned": Question("What is it?", turned)}
    one, other = both.there.decide(ISLES, asked, rotations="all").answers.values()
    assert other.probabilities == pytest.approx(one.probabilities, rel=0.001)


@pytest.mark.parametrize(
    "options", [{"composer": "splice"}, {"scope": "pack"}, {"response_schema": {"type": "object"}}]
)
def test_options_are_those_of_a_generation(both, options):
    if "scope" in options:
        options = {**options, "steering": (both.here.make_steering(preset("formal")[:4], progress=False), 1.5)}
    there, here = decide(both, f"Told on the quay. {ISLES}", **options)
    check_same(there, here)
    assert there.usage.approximate_tokens == here.usage.approximate_tokens


def test_a_pack_of_another_namespace_is_not_read(both):
    server, there, text = both.server, both.there, f"Told to others. {ISLES}"
    handle, asked = server.compile(text, key="plain")["handle"], {"words": QUESTIONS["words"]}
    lost = there.decide(handle, asked, view=server.store.view("own"))
    assert (lost.usage.pack_tokens, lost.usage.unresolved_handles) == (0, 1)
    # A client that reads the folder itself sends the text; the KV there is not for its key.
    taken = there.decide(handle, asked, view=server.store.view("plain"))
    assert (taken.usage.pack_tokens > 256, taken.usage.reused_tokens) == (True, 0)
    assert there.decide(text, asked).usage.reused_tokens > 0
    with pytest.raises(ModelError, match=r"404.*no pack"):
        there.decide(f"Of old.\n{handle}", asked, view=server.store.view("plain"), composer="splice")


def test_what_fails_is_said(both):
    there, cancel = both.there, Event()
    with pytest.raises(UnsupportedRequestError, match="composer='naive"):
        decide(both, ISLES, composer=NaiveComposer())
    with pytest.raises(GenerationTimeoutError):
        there.decide(ISLES, QUESTIONS, timeout=1e-9)
    cancel.set()
    with pytest.raises(CancelledError):
        there.decide(ISLES, QUESTIONS, cancel=cancel)
    # With and without a blank, small and capital: four tokens each.
    words = "about above accept access account act action active activity add address adult after again age agent air"
    words += " all allow almost along already also always and any are area art as at back bad"
    with pytest.raises(ModelError, match=r"132.* max allowed: 128"):
        there.decide(ISLES, {**QUESTIONS, "many": Question("Which?", words.split())})
