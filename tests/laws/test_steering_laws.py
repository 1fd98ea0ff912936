"""What must stay true of steering, on every supported architecture."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kp_core import PackStore
from kp_core.errors import PackError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import common_length
from kp_core.steering import Steering
from tests.conftest import alike, tiny_engine
from tests.matrix import EXAMPLES, architectures, models

law = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

PAIRS = [("The formal one.\n", "an 7 er"), ("the other, formal", "er er er 42"), ("中 the", "é an")]
SCOPES = [None, "system", "prompt", "last_token"]
HEAD = {"role": "system", "content": "The head of the 42 words, an er."}

# Multiples of an eighth, so that sums and products of some of them are exact in float32.
eighths = st.integers(-64, 64).map(lambda number: number / 8)
factors = st.integers(-16, 16).map(lambda number: number / 4)


@st.composite
def steerings(draw, layers=(0, 1, 3)):
    chosen = draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
    values = {
        layer: torch.tensor(draw(st.lists(eighths, min_size=6, max_size=6))).reshape(2, 3) for layer in sorted(chosen)
    }
    return Steering(values, ModelFingerprint.unknown(), scales=dict.fromkeys(chosen, 2.0))


def bits(steering):
    return {layer: delta.tolist() for layer, delta in steering.values.items()}


@law
@given(steerings(), steerings(), steerings(), factors, factors)
def test_steerings_form_a_vector_space(a, b, c, x, y):
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert x * (a + b) == x * a + x * b
    assert (x + y) * a == x * a + y * a
    assert x * (y * a) == (x * y) * a
    assert a - b == a + -b
    assert a * x == x * a
    assert 2 * a == a + a
    assert (a / 2) * 2 == a
    assert 1 * a == a
    assert (a - a).is_zero
    assert (0 * a).is_zero
    assert a + (b - b).restrict(b.layers) == a + 0 * b
    assert len({a, a + 0 * a, a * 1.0}) == 1


@law
@given(steerings(), steerings())
def test_operations_change_neither_operand(a, b):
    before = bits(a), bits(b), a.id, b.id
    _ = a + b, a - b, -a, 3 * a, a / 2, a.scaled(c_v=2), a.cosine(b)
    assert before == (bits(a), bits(b), a.id, b.id)


@law
@given(steerings(), steerings(), factors.filter(bool))
def test_cosine_is_that_of_directions(a, b, x):
    assert a.cosine(b) == pytest.approx(b.cosine(a))
    assert -1.0001 <= a.cosine(b) <= 1.0001
    assert (x * a).cosine(b) == pytest.approx(a.cosine(b) * (1 if x > 0 else -1), abs=1e-6)
    if not a.is_zero:
        assert a.cosine(a) == pytest.approx(1)
        assert a.cosine(-a) == pytest.approx(-1)
        assert (x * a).strength == pytest.approx(abs(x) * a.strength)
        assert a.at_strength(0.7).strength == pytest.approx(0.7)
        assert a.at_strength(0.7).cosine(a) == pytest.approx(1)
        assert a.at_strength(-0.7).cosine(a) == pytest.approx(-1)
    assert set(a.layer_cosines(b)) == set(a.layers) & set(b.layers)
    assert all(-1.0001 <= found <= 1.0001 for found in a.layer_cosines(b).values())


def question(user="Who is the 7th er?"):
    return [HEAD, {"role": "user", "content": user}]


def steering_of(engine, method="mean"):
    # Strong enough to change the logits of a model whose weights are random.
    return engine.make_steering(PAIRS, method=method, layers=(0.0, 1.0), progress=False).at_strength(3)


@models
@pytest.mark.parametrize("scope", SCOPES)
def test_warm_is_cold_and_steered_never_leaks(architecture, dtype, scope):
    engine = tiny_engine(architecture, dtype)
    steering = steering_of(engine, "last_token" if scope == "last_token" else "mean")
    asked = {"steering": steering, "scope": scope}
    engine.clear_cache()
    plain = engine.prefill(question(), reuse=False).logits
    cold = engine.prefill(question(), reuse=False, **asked).logits
    assert not torch.equal(plain, cold)
    assert alike(engine, engine.prefill(question(), **asked).logits, cold)  # Nothing is at hand.
    assert alike(engine, engine.prefill(question(), **asked).logits, cold)  # All of it is.
    assert alike(engine, engine.prefill(question()).logits, plain)
    assert alike(engine, engine.prefill(question(), **asked).logits, cold)
    engine.clear_cache()
    engine.prefill(question("Who is the 7th an, the?"), **asked)
    assert alike(engine, engine.prefill(question(), **asked).logits, cold)  # Half of it is.
    assert alike(engine, engine.prefill(question()).logits, plain)
    stronger = engine.prefill(question(), steering=(steering, 1.5), scope=scope).logits
    assert alike(
        engine, stronger, engine.prefill(question(), steering=(steering, 1.5), scope=scope, reuse=False).logits
    )
    assert not torch.equal(stronger, cold)


@models
@law
@given(data=st.data())
def test_any_order_of_plain_and_steered_requests_gives_what_each_gives_alone(architecture, dtype, data):
    engine = tiny_engine(architecture, dtype)
    mean, last = steering_of(engine), steering_of(engine, "last_token")
    pack = engine.build_pack("The 7th er is the an. " * 4, compiled_for="system")
    kinds = {
        "plain": {},
        "system": {"steering": mean, "scope": "system"},
        "weaker": {"steering": (mean, 0.5)},
        "prompt": {"steering": (mean, -1.0), "scope": "prompt"},
        "last": {"steering": last, "scope": "last_token"},
        "pack": {"packs": [pack]},
        "steered pack": {"packs": [pack.steer(mean)]},
        "both": {"packs": [pack.steer(mean)], "steering": mean, "scope": "pack"},
    }
    engine.clear_cache()
    for _ in range(4):
        user = data.draw(st.sampled_from(["Who?", "Who is the er, the one of 42 words?", "an"]))
        kind = data.draw(st.sampled_from(sorted(kinds)))
        warm, cold = (engine.generate(question(user), max_tokens=3, reuse=it, **kinds[kind]) for it in (True, False))
        assert alike(engine, warm.logits, cold.logits), kind
        assert warm.token_ids == cold.token_ids


@models
def test_a_steering_of_nothing_is_no_steering(architecture, dtype):
    engine = tiny_engine(architecture, dtype)
    steering = steering_of(engine)
    pack = engine.build_pack("A fact of the 42 words.", compiled_for="system")
    plain = engine.generate(question(), packs=[pack], max_tokens=4)
    for nothing in (steering - steering, 0 * steering, (steering, 0.0), None):
        for scope in (None, "system", "pack", "prompt"):
            found = engine.generate(question(), packs=[pack], steering=nothing, scope=scope, max_tokens=4)
            assert alike(engine, found.logits, plain.logits)
            assert found.token_ids == plain.token_ids
    for same in (
        pack.steer(steering, 0),
        pack.steer(steering, 2).steer(steering, -2),
        pack.steer(-steering + steering),
    ):
        assert same.steering is None
        assert same.kv is pack.kv


@architectures
def test_a_steered_pack_is_a_new_one_and_cannot_be_stored_as_plain(architecture, tmp_path):
    engine = tiny_engine(architecture)
    steering = steering_of(engine)
    pack = engine.build_pack("A fact of the 42 words.", compiled_for="system")
    before = [tensor.clone() for tensor in (*pack.kv.keys, *pack.kv.values)]
    steered = pack.steer(steering, 1.5)
    assert pack.steering is None
    assert steered.steering == 1.5 * steering
    assert steered.steer(steering, 0.5).steering == 2 * steering
    plain = engine.prefill(question(), packs=[pack])
    altered = engine.prefill(question(), packs=[steered])
    assert altered.usage.pack_tokens == plain.usage.pack_tokens > 0
    assert len(altered.prompt) == len(plain.prompt)
    assert not torch.equal(plain.logits, altered.logits)
    by_request = engine.prefill(question(), packs=[pack], steering=(steering, 1.5), scope="pack")
    assert alike(engine, by_request.logits, altered.logits)
    lazy = engine.prefill(question(), packs=[steered.without_kv()])
    assert alike(engine, lazy.logits, altered.logits)
    assert all(torch.equal(a, b) for a, b in zip(before, (*pack.kv.keys, *pack.kv.values), strict=True))
    store = PackStore(tmp_path)
    with pytest.raises(PackError, match="is steered"):
        store.put(steered)
    assert len(store) == 0


@architectures
def test_steering_costs_no_forward_pass(architecture):
    engine = tiny_engine(architecture)
    steering = steering_of(engine)
    packs = [
        engine.build_pack(text, compiled_for="system") for text in ("A fact of the 42 words.", "Another, of the an.")
    ]
    engine.clear_cache()
    plain = engine.prefill([{"role": "user", "content": "Who?"}], packs=packs)
    engine.clear_cache()
    steered = engine.prefill([{"role": "user", "content": "Who?"}], packs=packs, steering=steering)
    assert plain.usage.computed_tokens == steered.usage.computed_tokens
    again = engine.prefill([{"role": "user", "content": "Who else?"}], packs=packs, steering=steering)
    assert again.usage.reused_tokens >= again.usage.pack_tokens > 0


@architectures
def test_a_steered_conversation_reuses_its_turns(architecture):
    engine = tiny_engine(architecture)
    asked = {"steering": steering_of(engine), "scope": "system"}
    engine.clear_cache()
    messages = question()
    for _ in range(3):
        answer = engine.generate(messages, max_tokens=4, **asked)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And the er?"}]
        warm = engine.prefill(messages, **asked)
        assert alike(engine, warm.logits, engine.prefill(messages, reuse=False, **asked).logits)
        # What was decoded is reused, as far as it comes again as the same tokens.
        known = (*answer.prompt.token_ids, *answer.token_ids[:-1])
        assert warm.usage.reused_tokens >= common_length(known, warm.prompt.token_ids)
