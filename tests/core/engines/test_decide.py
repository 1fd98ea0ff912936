"""Typed questions about a state: probabilities of labels, however many are asked together."""

import asyncio
import math
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch

from kp_core import PackStore, Question, Session, load_engine
from kp_core.errors import (
    ContextOverflowError,
    GenerationTimeoutError,
    ModelError,
    OptionError,
    PackNotFoundError,
    PromptError,
    UnsupportedRequestError,
)
from kp_core.session.deciding import asked_behind, ballots_of
from tests.conftest import alike, tiny_engine
from tests.core.engines.test_session import Parrot
from tests.core.prompt.families import FAMILIES
from tests.kits import CHATML, tiny_model, tiny_tokenizer
from tests.matrix import models

TEXT = "The ferry to Veyl leaves at 7. The keeper of the lamps counts them at noon, and another man at dusk. " * 3
QUESTIONS = {
    "short": Question("Does a ferry leave?", ["A", "B"]),
    "long": Question("Who counts the lamps at noon, of all that this text names?", ["the keeper", "another man"]),
    "levels": Question("How late?", {"0": "In the morning", "1": "At noon", "2": "At dusk", "3": ""}),
    "words": Question("Is it so?"),
    "beyond a tile": Question("Is it so, " + "or not, " * 60 + "and why?"),
}


def plain(engine, state, question, rotations=1):
    """The same answer from prefills of plain strings, each in an empty cache."""
    shares = []
    for ballot in ballots_of({0: question}, rotations, engine.tokenizer):
        engine.clear_cache()
        logits = engine.prefill(f"{state}\n\n{ballot.text}", reuse=False).logits
        assert ballot.text.startswith(question.instructions)
        shares.append(ballot.shares(logits))
    return question.decided(shares)


def same(engine, one, other):
    values = [torch.tensor([*decision.probabilities.values()]) for decision in (one, other)]
    return [*one.probabilities] == [*other.probabilities] and alike(engine, *values)


@models
@pytest.mark.parametrize("rotations", [1, "all"])
def test_a_question_has_the_probabilities_of_asking_it_alone_and_as_text(architecture, dtype, rotations, tmp_path):
    engine, store = tiny_engine(architecture, dtype), PackStore(tmp_path)
    handle, view = store.put(engine.build_pack(TEXT, namespace="law")), store.view("law")
    together = engine.decide(str(handle), QUESTIONS, view=view, rotations=rotations)
    assert [*together.answers] == [*QUESTIONS]
    for name, question in QUESTIONS.items():
        answer = together.answers[name]
        assert math.isclose(sum(answer.probabilities.values()), 1, abs_tol=1e-12)
        alone = engine.decide(str(handle), {name: question}, view=view, rotations=rotations)
        assert same(engine, answer, alone.answers[name])
        assert same(engine, answer, plain(engine, TEXT, question, rotations))


def test_many_questions_are_rows_behind_one_state():
    engine = tiny_engine()
    questions = {n: Question(f"Is {n} named, {'or not ' * (n % 5)}?", ["A", "B", "C"]) for n in range(20)}
    engine.clear_cache()
    cold = engine.decide(TEXT, questions)
    usage = cold.usage
    alone = [engine.decide(TEXT, {n: question}) for n, question in questions.items()]
    assert {n: one.answers[n] for n, one in enumerate(alone)} == dict(cold.answers)
    assert usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert usage.prompt_tokens + usage.pack_tokens == usage.reused_tokens + usage.computed_tokens
    # The state is computed once, its questions each.
    state = len(engine.prefill(TEXT).prompt)
    assert usage.computed_tokens < usage.prompt_tokens - 18 * (state - 10)
    assert usage.completion_tokens == 0
    warm = engine.decide(TEXT, questions)
    assert warm.answers == cold.answers
    assert warm.usage.computed_tokens < usage.computed_tokens - state + 20
    assert engine.engine.pool.used == 0


def test_questions_need_no_memory_beyond_that_of_the_longest_one(monkeypatch):
    questions = {n: Question(f"Is {n} named?", ["A", "B"]) for n in range(5)}
    small = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(CHATML, 7), cache_bytes=500_000)
    pool, taken = small.engine.pool, []
    take = pool.take
    monkeypatch.setattr(pool, "take", lambda *room: taken.append(take(*room)) or taken[-1])
    assert small.decide(TEXT, questions).answers == tiny_engine().decide(TEXT, questions).answers
    assert len(taken) == 1
    assert pool.used == 0


@pytest.mark.parametrize(
    "options", [{"reuse": False}, {"steered": True}, {"composer": "splice"}, {"placement": "system"}]
)
def test_options_are_those_of_a_generation(options, tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    handles = [store.put(engine.build_pack(text, namespace="law")) for text in (TEXT, TEXT[::-1])]
    options, state = dict(options), f"{handles[0]}\n{handles[1]}"
    if options.pop("steered", False):
        pairs = [(f"good {n}", f"bad {n}") for n in range(4)]
        options |= {"steering": engine.make_steering(pairs), "scope": "prompt"}
    options["view"] = store.view("law")
    decided = engine.decide(state, QUESTIONS, **options)
    for name, question in QUESTIONS.items():
        [ballot] = ballots_of({name: question}, 1, engine.tokenizer)
        logits = engine.prefill(asked_behind(state, ballot.text), **options).logits
        assert decided.answers[name] == question.decided([ballot.shares(logits)])


def test_all_rotations_make_the_order_of_labels_irrelevant():
    engine, labels = tiny_engine(), {"the keeper": "of lamps", "another man": "", "the ferry": "to Veyl"}
    names = [*labels]
    turned = {name: labels[name] for name in names[1:] + names[:1]}
    asked = {"given": Question("Who counts?", labels), "turned": Question("Who counts?", turned)}
    one, other = engine.decide(TEXT, asked, rotations="all").answers.values()
    assert {name: pytest.approx(share, abs=1e-12) for name, share in one.probabilities.items()} == other.probabilities
    fixed, moved = engine.decide(TEXT, asked).answers.values()
    assert {name: pytest.approx(share, abs=1e-6) for name, share in fixed.probabilities.items()} != moved.probabilities
    # More rotations than labels are all of them.
    assert engine.decide(TEXT, asked, rotations=9).answers["given"] == one


def test_a_decision_tells_label_confidence_and_score():
    engine = tiny_engine()
    answer = engine.decide(TEXT, QUESTIONS).answers["levels"]
    shares = answer.probabilities
    assert answer.label == max(shares, key=shares.get)
    assert answer.confidence == max(shares.values())
    assert answer.score == pytest.approx(sum(int(level) * share for level, share in shares.items()))
    assert engine.decide(TEXT, {0: Question("Which?", ["only"])}).answers[0].probabilities == {"only": 1.0}


def test_labels_of_one_token_stand_for_themselves_and_others_get_letters():
    tokenizer = tiny_engine().tokenizer
    texts = {name: next(ballots_of({0: question}, 1, tokenizer)).text for name, question in QUESTIONS.items()}
    assert texts["short"] == "Does a ferry leave?\n\nAnswer with A or B, and nothing else."
    assert "\n\nA: the keeper\nB: another man\n\nAnswer with A or B" in texts["long"]
    assert (
        "\n\n0: In the morning\n1: At noon\n2: At dusk\n3\n\nAnswer with 0, 1, 2 or 3, and nothing else."
        in texts["levels"]
    )


@pytest.mark.parametrize("labels", [["a", "A"], ["the 1", "the 2"], ["long " * 200, "short"], ["<|im_end|>", "A"]])
def test_labels_that_no_token_tells_apart_are_decided_by_letters(labels):
    """They begin alike, differ in their first letter alone, are long, or are the text of a special token."""
    engine, question = tiny_engine(), Question("Which?", labels)
    [ballot] = ballots_of({0: question}, 1, engine.tokenizer)
    assert f"\n\nA: {labels[0]}\nB: {labels[1]}\n\n" in ballot.text
    decided = engine.decide(TEXT, {"few": question, "other": Question("Is it so?")}).answers
    assert [*decided] == ["few", "other"]
    assert same(engine, decided["few"], plain(engine, TEXT, question))


def test_a_state_is_read_once_for_all_questions():
    engine, said = tiny_engine("llama"), [{"role": "user", "content": "The mill has four sails."}]
    asked = {name: Question(f"Is it {name}?") for name in ("a mill", "a boat")}
    assert engine.decide((message for message in said), asked).answers == engine.decide(said, asked).answers


def test_a_question_ends_the_last_message_of_the_user():
    engine, question = tiny_engine(), Question("Is it?", ["A", "B"])
    user, parts = {"role": "user", "content": TEXT}, {"role": "user", "content": [{"type": "text", "text": TEXT}]}
    expected = engine.decide(TEXT, {0: question}).answers
    assert engine.decide([user], {0: question}).answers == expected
    assert engine.decide([parts], {0: question}).answers == expected
    talk = [user, {"role": "assistant", "content": "It leaves."}]
    asked = asked_behind(talk, "Is it?")
    assert asked == [*talk, {"role": "user", "content": "Is it?"}]
    assert engine.decide(talk, {0: question}).answers != expected


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (dict, OptionError, "at least one"),
        (lambda: [Question("Who?")], OptionError, "a mapping"),
        (lambda: {0: "Who?"}, OptionError, "kp_core.Question"),
        (lambda: {0: Question("Who?", [])}, OptionError, "0 labels"),
        (lambda: {0: Question("Who?", ["a", "a"])}, OptionError, "different names"),
        (lambda: {0: Question("Who?", ["a", " "])}, OptionError, "not blank"),
        (lambda: {0: Question("Who?", ["a", "\ud800"])}, OptionError, "not Unicode"),
        (lambda: {0: Question("Who?", "ab")}, OptionError, "a list of names"),
        (lambda: {0: Question("Who?", {"a": "", "b": 5})}, OptionError, "description 5 of 'b'"),
        (lambda: {0: Question("Who?", [str(n) for n in range(53)])}, OptionError, "53 labels"),
        (lambda: {0: Question(" ")}, OptionError, "text of a question"),
    ],
)
def test_bad_questions_are_refused(make, error, said):
    with pytest.raises(error, match=said):
        tiny_engine().decide(TEXT, make())


@pytest.mark.parametrize("rotations", [0, -1, True, "some", 1.5])
def test_bad_rotations_are_refused(rotations):
    with pytest.raises(OptionError, match="'all'"):
        tiny_engine().decide(TEXT, QUESTIONS, rotations=rotations)


def test_bad_states_are_refused(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    with pytest.raises(ContextOverflowError):
        engine.decide("word " * engine.max_positions, QUESTIONS)
    longest = {"fits": Question("Is it?"), "does not": Question("Is it?" * engine.max_positions)}
    with pytest.raises(ContextOverflowError):
        engine.decide(TEXT, longest)
    lost, view = "kp:law/" + "a" * 21, store.view("law")
    with pytest.raises(PackNotFoundError):
        engine.decide(lost, QUESTIONS, view=view, unresolved="error")
    sent = engine.decide(lost, QUESTIONS, view=view)
    assert sent.usage.unresolved_handles == 1
    assert same(engine, sent.answers["words"], plain(engine, lost, QUESTIONS["words"]))
    with pytest.raises(PromptError, match="a string or messages"):
        engine.decide(7, QUESTIONS)
    with pytest.raises(PromptError, match="'text'; expected a mapping"):
        engine.decide(["text"], QUESTIONS)
    with pytest.raises(OptionError, match="no option"):
        engine.decide(TEXT, QUESTIONS, rotation=2)
    with pytest.raises(UnsupportedRequestError, match="decisions"):
        Session(Parrot()).decide(TEXT, QUESTIONS)


def test_logits_that_are_no_numbers_decide_nothing():
    model = tiny_model("llama")
    engine = load_engine(model, tokenizer=tiny_tokenizer())
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.nan)
    engine.refresh()
    with pytest.raises(ModelError, match="'short' are not finite"):
        engine.decide(TEXT, QUESTIONS)
    assert engine.engine.pool.used == 0


def test_models_that_think_first_decide_without_or_not_at_all():
    begun = "{% if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}{# </think> #}"
    templates = CHATML + begun, CHATML + "<think>\n{# </think> #}", FAMILIES["gpt_oss"].template
    switchable, always, harmony = (tiny_engine(template=template) for template in templates)
    assert switchable.decide(TEXT, QUESTIONS).answers == tiny_engine().decide(TEXT, QUESTIONS).answers
    for engine, options in ((switchable, {"thinking": True}), (always, {}), (harmony, {})):
        with pytest.raises(UnsupportedRequestError, match="thought"):
            engine.decide(TEXT, QUESTIONS, **options)


def test_a_decision_ends_at_its_limit():
    engine, cancel = tiny_engine(), threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        engine.decide(TEXT, QUESTIONS, cancel=cancel)
    with pytest.raises(GenerationTimeoutError):
        engine.decide(TEXT, QUESTIONS, timeout=1e-9)
    assert engine.engine.pool.used == 0


def test_decisions_of_several_threads_and_tasks_are_the_same():
    engine = tiny_engine()
    states = [f"{TEXT} {n}" for n in range(4)]
    expected = [engine.decide(state, QUESTIONS).answers for state in states]
    engine.clear_cache()
    with ThreadPoolExecutor(4) as pool:
        assert [it.answers for it in pool.map(lambda state: engine.decide(state, QUESTIONS), states)] == expected

    async def all_of_them():
        return await asyncio.gather(*(engine.adecide(state, QUESTIONS) for state in states))

    assert [it.answers for it in asyncio.run(all_of_them())] == expected


def test_kv_behind_other_packs_is_kept_as_by_a_generation(tmp_path):
    engine, store = tiny_engine(), PackStore(tmp_path)
    handles = [store.put(engine.build_pack(text, namespace="law")) for text in (TEXT, TEXT[::-1])]
    request = {"view": store.view("law"), "keep": "always"}
    engine.clear_cache()
    first = engine.decide(f"{handles[0]}\n{handles[1]}", QUESTIONS, **request)
    engine.clear_cache()
    again = engine.decide(f"{handles[0]}\n{handles[1]}", QUESTIONS, **request)
    assert again.answers == first.answers
    assert again.usage.computed_tokens < first.usage.computed_tokens - 200
