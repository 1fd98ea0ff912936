"""Steering: against a slow path by hand, its file, its presets, and everything that may be asked wrongly."""

import itertools
import json
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kp_core import PackStore, load_engine
from kp_core.engines.local.buffer import TILE
from kp_core.engines.local.tree import PrefixTree
from kp_core.errors import OptionError, PackError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.steering import (
    Steering,
    SteeringWarning,
    load_steering,
    preset,
    preset_names,
    save_steering,
)
from kp_core.steering.value import resolve_layers
from tests.conftest import alike, tiny_engine
from tests.core.packs.made import encode
from tests.kits import tiny_model, tiny_tokenizer
from tests.matrix import architectures

PAIRS = [("The formal one.\n", "an 7 er"), ("the other, formal", "er er er 42"), ("中 the", "é an")]
MESSAGES = [
    {"role": "system", "content": "The head of the 42 words, an er. " * 3},
    {"role": "user", "content": "Who is the 7th er?"},
]
SCOPES = ["system", "prompt", "last_token"]


def steering_of(engine, method="mean", **settings):
    settings = {"layers": (0.0, 1.0), "progress": False} | settings
    return engine.make_steering(PAIRS, method=method, **settings).at_strength(2)


def by_hand(architecture, ids, parts, passes, tokens):
    """Greedy answer of plain transformers: run pass by pass, add deltas in the cache wherever a part is complete."""
    model, cache, logits = tiny_model(architecture), DynamicCache(), None
    chosen, logits_of_first = [], None
    with torch.inference_mode():
        for start, stop in passes:
            logits = model(torch.tensor([ids[start:stop]]), past_key_values=cache).logits[0, -1]
            for first, last, steering in parts:
                if last == stop:
                    for layer, delta in steering.values.items():
                        cache.layers[layer].values[:, :, first:last] += delta[:, None]
                    for layer, delta in steering.keys.items():
                        cache.layers[layer].keys[:, :, first:last] += delta[:, None]
        logits_of_first = logits
        for _ in range(tokens):
            chosen.append(int(logits.argmax()))
            logits = model(torch.tensor([[chosen[-1]]]), past_key_values=cache).logits[0, -1]
    return logits_of_first, tuple(chosen)


def passes_between(*cuts):
    return list(itertools.pairwise(sorted({0, *cuts})))


@architectures
@pytest.mark.parametrize("scope", SCOPES)
def test_steered_is_what_plain_transformers_gives_with_deltas_added_to_its_cache(architecture, scope):
    engine = tiny_engine(architecture)
    steering = steering_of(engine, "last_token" if scope == "last_token" else "mean")
    found = engine.generate(MESSAGES, steering=steering, scope=scope, max_tokens=6)
    ids = found.prompt.token_ids
    end = len(ids) - 1
    start, stop = {"system": (0, found.prompt.breaks[0]), "prompt": (0, end), "last_token": (end - 1, end)}[scope]
    logits, tokens = by_hand(architecture, ids, [(start, stop, steering)], passes_between(stop, len(ids)), 6)
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=1e-3)
    shared = found.token_ids[: len(found.token_ids)]
    assert shared == tokens[: len(shared)]
    plain, _ = by_hand(architecture, ids, [], passes_between(len(ids)), 1)
    assert not torch.allclose(plain, logits, atol=1e-4, rtol=1e-3)


@architectures
def test_packs_of_several_messages_are_steered_one_after_the_other(architecture):
    engine = tiny_engine(architecture)
    first, second = engine.build_pack("The an of it. " * 3), engine.build_pack("An er, the 42nd. " * 3)
    a, b = steering_of(engine), steering_of(engine) * -0.5
    prompt = engine.template.render(MESSAGES)
    assert prompt.spans == ()

    from kp_core import Packs, PackView

    class Both(Packs):
        """Resolves two handles to two steered packs."""

        def __init__(self, packs):
            self.packs = packs

        def peek(self, handle, key=None):
            return self.packs.get(handle.id[0])

        get = peek

    handles = {letter: f"kp:law/{letter * 21}" for letter in "ab"}
    view = PackView(Both({"a": first.steer(a, 1), "b": second.steer(b, 1)}), ("default", "law"))
    messages = [
        {"role": "user", "content": f"{handles['a']} Who?"},
        {"role": "assistant", "content": "the er"},
        {"role": "user", "content": f"{handles['b']} And?"},
    ]
    found = engine.generate(messages, view=view, max_tokens=4)
    spans = [(span.start, span.stop) for span in found.prompt.spans]
    assert len(spans) == 2
    parts = [(*spans[0], a), (*spans[1], b)]
    cuts = passes_between(*spans[0], *spans[1], len(found.prompt))
    logits, tokens = by_hand(architecture, found.prompt.token_ids, parts, cuts, 4)
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=1e-3)
    assert found.token_ids == tokens[: len(found.token_ids)]
    assert alike(engine, found.logits, engine.prefill(messages, view=view, reuse=False).logits)


def test_packs_of_one_message_are_computed_first_and_altered_together():
    engine = tiny_engine()
    packs = [engine.build_pack(text, compiled_for="system") for text in ("The an of it.", "An er, the 42nd.")]
    steering = steering_of(engine)
    found = engine.generate("Who?", packs=packs, steering=steering, scope="pack", max_tokens=4)
    spans = [(span.start, span.stop) for span in found.prompt.spans]
    stop = spans[1][1]
    logits, tokens = by_hand(
        "llama",
        found.prompt.token_ids,
        [(0, 0, steering), *((start, stop, steering) for start, _ in spans[:1])],
        passes_between(stop, len(found.prompt)),
        4,
    )
    assert spans[0][1] == spans[1][0]
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=1e-3)
    assert found.token_ids == tokens[: len(found.token_ids)]


def test_without_a_scope_the_head_is_steered_with_its_packs_and_packs_alone_elsewhere():
    engine = tiny_engine()
    steering, half = steering_of(engine), 0.5 * steering_of(engine)
    pack = engine.build_pack("A fact of the an.", compiled_for="system")

    def logits(messages=MESSAGES, **request):
        return engine.prefill(messages, **request).logits

    head = logits(packs=[pack], steering=steering)
    assert torch.equal(head, logits(packs=[pack], steering=steering, scope="system"))
    assert not torch.equal(head, logits(packs=[pack], steering=steering, scope="pack"))
    # A pack with a steering of its own adds up with what is asked for.
    assert torch.equal(
        logits(packs=[pack.steer(half, 1)], steering=half), logits(packs=[pack], steering=steering, scope="pack")
    )


@architectures
def test_the_mean_steering_is_the_mean_difference_of_cached_values(architecture):
    engine, model = tiny_engine(architecture), tiny_model(architecture)
    found = engine.make_steering(PAIRS, layers=(0.0, 1.0), progress=False)

    def mean_values(text):
        prompt = engine.template.render(text, add_generation_prompt=False)
        cache = DynamicCache()
        with torch.inference_mode():
            model(torch.tensor([prompt.token_ids]), past_key_values=cache)
        return [layer.values[0, :, prompt.breaks[0] :].mean(dim=1) for layer in cache.layers]

    sides = [(mean_values(positive), mean_values(negative)) for positive, negative in PAIRS]
    for layer, delta in found.values.items():
        expected = torch.stack([positive[layer] - negative[layer] for positive, negative in sides]).mean(dim=0)
        torch.testing.assert_close(delta, expected, atol=1e-5, rtol=1e-3)
    assert found.layers == (0, 1)
    assert not found.keys
    assert all(scale > 0 for scale in found.scales.values())


def test_the_last_token_steering_holds_keys_and_values_of_one_position():
    engine, model = tiny_engine(), tiny_model("llama")
    found = engine.make_steering(PAIRS[:1], method="last_token", layers=[1], progress=False)
    found = found.scaled(c_k=0.5, c_v=2)

    def last(text):
        prompt, cache = engine.template.render(text), DynamicCache()
        with torch.inference_mode():
            model(torch.tensor([prompt.token_ids]), past_key_values=cache)
        return cache.layers[1].keys[0, :, -2], cache.layers[1].values[0, :, -2]

    (key, value), (other_key, other_value) = (last(text) for text in PAIRS[0])
    torch.testing.assert_close(found.keys[1], 0.5 * (key - other_key), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(found.values[1], 2 * (value - other_value), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (None, 30, range(10, 20)),
        (None, 32, range(11, 21)),
        (None, 2, [1]),
        (None, 1, [0]),
        ((0.0, 1.0), 4, range(4)),
        ((0, 0.5), 4, [0, 1]),
        ((2 / 3, 1.0), 30, range(20, 30)),
        (range(2, 5), 8, [2, 3, 4]),
        ([5, 1], 8, [1, 5]),
        ((0, 1), 8, [0, 1]),
    ],
)
def test_layers_are_fractions_or_indices(layers, count, expected):
    assert resolve_layers(layers, count) == tuple(expected)


@pytest.mark.parametrize(
    "layers", [(0.5, 0.5), (0.7, 0.2), (-0.1, 0.5), (0.5, 1.5), [], [8], [-1], [1, 1], ["a"], [True]]
)
def test_layers_that_are_none_of_the_model_are_refused(layers):
    with pytest.raises(OptionError, match="expected two fractions"):
        resolve_layers(layers, 8)


@pytest.mark.parametrize(
    ("pairs", "settings", "says"),
    [
        ([], {}, "expected pairs"),
        ("formal", {}, "expected pairs"),
        (["formal"], {}, "for pair 0"),
        ([("a", "b"), ("a", "b", "c")], {}, "for pair 1"),
        ([(1, 2)], {}, "for pair 0"),
        ([7], {}, "for pair 0"),
        (iter([]), {}, "expected pairs"),
        (PAIRS, {"layers": 1}, "expected two fractions"),
        ([("The formal", " ")], {}, "Pair 0 has an empty side"),
        ([([], "b")], {}, "Pair 0 has an empty side"),
        ([("a", "b"), ("the same", "the same")], {}, "pair 1 are the same"),
        (PAIRS, {"method": "median"}, "expected 'mean' or 'last_token'"),
        (PAIRS, {"layers": [7]}, "model of 2 layers"),
    ],
)
def test_pairs_that_say_nothing_are_refused(pairs, settings, says):
    with pytest.raises(OptionError, match=says):
        tiny_engine().make_steering(pairs, progress=False, **settings)


def test_what_cannot_be_applied_is_refused_at_the_call():
    engine, steering = tiny_engine(), steering_of(tiny_engine())
    last = steering_of(engine, "last_token")
    pack = engine.build_pack("A fact of the an.", compiled_for="system")
    other = tiny_engine("qwen3")
    for request, error, says in [
        ({"steering": "formal"}, OptionError, "type str"),
        ({"steering": (steering,)}, OptionError, r"\(Steering, alpha\)"),
        ({"steering": (steering, float("nan"))}, OptionError, "alpha=nan"),
        ({"steering": (steering, float("inf"))}, OptionError, "alpha=inf"),
        ({"steering": (steering, "strong")}, OptionError, "None for the default strength"),
        ({"steering": steering, "scope": "all"}, OptionError, "expected one of pack"),
        ({"steering": steering, "scope": "pack"}, OptionError, "without packs"),
        ({"steering": last, "scope": "system"}, OptionError, "RoPE rotates keys"),
        ({"packs": [pack.steer(steering)], "steering": steering, "scope": "system"}, OptionError, "adds up"),
        ({"steering": steering_of(other)}, PackError, "config: steering has"),
        ({"steering": 0 * steering, "scope": "all"}, OptionError, "expected one of pack"),
    ]:
        with pytest.raises(error, match=says):
            engine.stream("Who?", **request)
    with pytest.raises(PackError, match="make_steering"):
        pack.steer(steering_of(other))
    foreign = other.build_pack("A fact of the an.", compiled_for="system").steer(steering_of(other))
    with pytest.raises(PackError, match="steering has"):
        engine.stream("Who?", packs=[foreign], mismatch="rebuild")
    recovered = replace(pack, kv=None, token_ids=(), fingerprint=ModelFingerprint.unknown())
    assert torch.equal(
        engine.prefill("Who?", packs=[recovered.steer(steering)]).logits,
        engine.prefill("Who?", packs=[pack.steer(steering)]).logits,
    )
    with pytest.raises(PackError, match="steering has"):
        engine.stream("Who?", packs=[recovered.steer(steering_of(other))])
    with pytest.raises(OptionError, match="alpha=nan"):
        pack.steer(steering, float("nan"))
    with pytest.raises(OptionError, match="alpha='strong'"):
        pack.steer(steering, "strong")
    for wrong in (PAIRS, None, "formal"):
        with pytest.raises(OptionError, match=r"expected a Steering\. Make one"):
            pack.steer(wrong)
    assert pack.steer(steering, np.float32(0.5)).steering == 0.5 * steering
    wide = replace(steering, values={0: torch.ones(2, 99)})
    with pytest.raises(OptionError, match=r"shape \(2, 99\)"):
        engine.generate("Who?", steering=wide)
    with pytest.raises(OptionError, match="has 2 layers"):
        engine.generate("Who?", steering=replace(steering, values={9: torch.ones(2, 8)}))
    assert engine.generate("Who?", steering=steering, max_tokens=2).token_ids  # It still works.


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "median"}, "expected 'mean'"),
        ({"keys": {0: torch.ones(2, 3)}}, "RoPE"),
        ({"values": {}}, "without layers"),
        ({"values": {0: torch.ones(3)}}, "kv_heads, head_dim"),
        ({"values": {-1: torch.ones(2, 3)}}, "layer -1"),
        ({"values": {0: torch.full((2, 3), float("nan"))}}, "not finite"),
    ],
)
def test_deltas_that_form_no_steering_are_refused(fields, says):
    with pytest.raises(OptionError, match=says):
        Steering(**{"values": {0: torch.ones(2, 3)}, "fingerprint": ModelFingerprint.unknown()} | fields)


def test_a_steering_is_frozen():
    given = torch.ones(2, 3)
    one = Steering({0: given}, ModelFingerprint.unknown())
    given += 1
    assert one.values[0].tolist() == torch.ones(2, 3).tolist()
    for found in (one, one + one, 2 * one):
        with pytest.raises(RuntimeError, match=r"[Ii]nference"):
            found.values[0].add_(1)
        with pytest.raises(TypeError):
            found.values[1] = given
        with pytest.raises(AttributeError):
            found.method = "last_token"


def test_algebra_refuses_what_does_not_belong_together():
    one = Steering({0: torch.ones(2, 3)}, ModelFingerprint.unknown())
    with pytest.raises(PackError):
        one + steering_of(tiny_engine())
    with pytest.raises(OptionError, match="different positions"):
        one + replace(one, method="last_token")
    with pytest.raises(OptionError, match="shapes"):
        one + replace(one, values={0: torch.ones(2, 4)})
    with pytest.raises(OptionError, match="finite"):
        one / 0
    with pytest.raises(OptionError, match="finite"):
        one * float("inf")
    for wrong in ({"c_v": float("nan")}, {"c_k": float("inf")}):
        with pytest.raises(OptionError, match="finite"):
            replace(one, method="last_token", keys=one.values).scaled(**wrong)
    with pytest.raises(OptionError, match="not finite"):
        one * 1e30 * 1e30
    with pytest.raises(OptionError, match="no scale"):
        one.at_strength(1)
    with pytest.raises(OptionError, match="no direction"):
        (0 * steering_of(tiny_engine())).at_strength(1)
    with pytest.raises(OptionError, match="without layers"):
        one.restrict([5])
    for wrong in ("a", None, [1]):
        with pytest.raises(TypeError):
            one * wrong
        with pytest.raises(TypeError):
            one + wrong


def test_a_steering_beyond_its_cliff_warns():
    engine = tiny_engine()
    steering = replace(steering_of(engine), coherent=(-1.0, 2.0))
    for alpha in (1, 2, -1, 0.1, 0):
        engine.generate("Who?", steering=(steering, alpha), max_tokens=1)
    assert (-2 * steering).coherent == (-1, 0.5)
    for alpha, says in ((2.5, "1.25 times beyond"), (-1.5, "1.5 times beyond")):
        with pytest.warns(SteeringWarning, match=says):
            engine.generate("Who?", steering=(steering, alpha), max_tokens=1)
    steered = engine.build_pack("A fact.", compiled_for="system").steer(steering, 4)
    with pytest.warns(SteeringWarning, match="2 times beyond"):
        engine.generate("Who?", packs=[steered], max_tokens=1)
    with pytest.warns(SteeringWarning, match="far beyond"):
        engine.generate("Who?", steering=replace(steering, coherent=(-1.0, 0.0)), max_tokens=1)
    assert (steering + steering).coherent is None


def test_a_strong_steering_that_was_never_calibrated_warns():
    engine = tiny_engine()
    steering = steering_of(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fitting in (steering.at_strength(0.29), replace(steering, scales={}), 0 * steering):
            engine.generate("Who?", steering=fitting, max_tokens=1)
    with pytest.warns(SteeringWarning, match="strength 0.50 was not calibrated.*at_strength.*0.4 of this alpha"):
        engine.generate("Who?", steering=steering.at_strength(-0.5), max_tokens=1)


def test_the_default_strength_is_lower_beside_knowledge_and_what_was_calibrated_where_it_was():
    engine, steering = tiny_engine(), steering_of(tiny_engine())
    pack = engine.build_pack("A fact of the an.", compiled_for="system")
    calibrated = replace(steering, recommended=(2.0, 0.25))
    for asked, alone, beside in ((steering, 1, 0.7), (calibrated, 2, 0.25), (2 * calibrated, 1, 0.125)):
        for packs, alpha in (((), alone), ([pack], beside)):
            found = engine.generate("Who?", packs=packs, steering=(asked, None), max_tokens=4)
            explicit = engine.generate("Who?", packs=packs, steering=(asked, alpha), max_tokens=4)
            assert torch.equal(found.logits, explicit.logits)
            assert found.token_ids == explicit.token_ids
        assert pack.steer(asked).steering == beside * asked
    assert (-calibrated).recommended == (-2, -0.25)
    assert (calibrated + steering).recommended is None
    assert (0 * calibrated).recommended is None
    assert calibrated.restrict([1]).recommended is None
    assert calibrated == steering
    with pytest.raises(OptionError, match="recommended alpha"):
        replace(steering, recommended=(1.0, math.nan))


@pytest.mark.parametrize("method", ["mean", "last_token"])
def test_a_saved_steering_comes_back_the_same(tmp_path, method):
    measured = {"coherent": (-math.inf, 1.5), "recommended": (1.5, 0.3), "provenance": {"name": "förmal"}}
    steering = replace(steering_of(tiny_engine(), method), **measured)
    with pytest.raises(OptionError, match=r"Got str; expected `save_steering\(steering, path\)`"):
        save_steering("formal.steering", steering)
    path = save_steering(steering, tmp_path / "new" / "formal.steering")
    back = load_steering(path)
    assert back == steering
    assert back.id == steering.id
    for field in ("method", "scales", "coherent", "recommended", "provenance", "fingerprint"):
        assert getattr(back, field) == getattr(steering, field), field
    assert back.strength == steering.strength
    assert [entry.name for entry in path.parent.iterdir()] == ["formal.steering"]
    assert save_steering(2 * steering, path) == path
    assert load_steering(path) == 2 * steering


def test_a_damaged_file_is_refused(tmp_path):
    path = save_steering(steering_of(tiny_engine()), tmp_path / "formal")
    data = path.read_bytes()
    for at in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(OptionError, match="no intact steering"):
            load_steering(path)
    assert b'"version":"3"' in data
    for damaged in (
        b"",
        data[:7],
        data[:-1],
        data + b"x",
        b"\x80\x04pickle" * 9,
        data.replace(b'"version":"3"', b'"version":"4"'),
    ):
        path.write_bytes(damaged)
        with pytest.raises(OptionError, match="no intact steering"):
            load_steering(path)
    pack = tiny_engine().build_pack("A fact of the an.")
    path.write_bytes(encode(pack))
    with pytest.raises(OptionError, match="no intact steering"):
        load_steering(path)
    with pytest.raises(FileNotFoundError):
        load_steering(tmp_path / "none")


def test_a_steered_pack_cannot_be_stored(tmp_path):
    pack = tiny_engine().build_pack("A fact of the an.")
    with pytest.raises(PackError, match="save_steering"):
        PackStore(tmp_path).put(pack.steer(steering_of(tiny_engine())))


NAMES = [
    *("analogy", "annotated_deduction", "causal_chain", "concise", "defensive_code", "documented_code"),
    *("formal", "numbered_deduction", "step_by_step", "strategy_execution"),
]


def test_the_presets_are_these():
    assert list(preset_names()) == NAMES
    with pytest.raises(OptionError, match=r"expected one of analogy, .*, strategy_execution"):
        preset("../formal")


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_holds_pairs_that_make_a_steering(name):
    pairs = preset(name)
    assert len(pairs) >= 24
    assert len(set(pairs)) == len(pairs)
    assert all(isinstance(side, str) and side.strip() == side and side for pair in pairs for side in pair)
    assert len({positive for positive, _ in pairs}) == len({negative for _, negative in pairs}) == len(pairs)
    assert not tiny_engine().make_steering(pairs[:3], progress=False).is_zero


@pytest.mark.parametrize("name", ["defensive_code", "documented_code"])
def test_code_presets_hold_code(name):
    for pair in preset(name):
        for side in pair:
            compile(side, name, "exec")


def test_presets_are_json_with_a_description():
    from importlib.resources import files

    for entry in (files("kp_core") / "presets").iterdir():
        if entry.name.endswith(".json"):
            assert set(json.loads(entry.read_text())) == {"about", "pairs"}


def test_labelled_kv_is_found_by_its_label_alone():
    tree, kv = PrefixTree(10**9), tiny_engine().build_pack("A fact of the 42 words.").kv
    ids = (*range(kv.tokens), 1, 2)
    path = tree.match(ids)
    assert path.extend(ids[: kv.tokens], kv, label=-7)
    path.release()
    for stop, label, found in ((kv.tokens, -7, kv.tokens), (kv.tokens, -8, 0), (kv.tokens - 1, -7, 0), (0, 0, 0)):
        path = tree.match(ids, labels={0: (stop, label)} if label else {})
        assert path.tokens == found, (stop, label)
        path.release()


def test_plain_tokens_are_not_found_where_labelled_kv_belongs():
    tree, kv = PrefixTree(10**9), tiny_engine().build_pack("A fact of the 42 words.").kv.slice(0, 6)
    ids = (1, 2, 3, 4, 5, 6, 7)
    path = tree.match(ids)
    assert path.extend(ids[:6], kv)
    path.release()
    for labels, found in (({}, 6), ({4: (6, -7)}, 4), ({0: (6, -7)}, 0)):
        path = tree.match(ids, labels=labels)
        assert path.tokens == found, labels
        path.release()


@pytest.mark.parametrize("room", [0, 4_000, 40_000])
def test_steering_needs_no_room_in_the_prefix_tree(room):
    roomy = tiny_engine()
    cache_bytes = room + TILE * roomy.engine.bytes_per_token
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), chunk_tokens=16, cache_bytes=cache_bytes)
    steering = engine.make_steering(PAIRS, layers=(0.0, 1.0), progress=False).at_strength(2)
    pack = engine.build_pack("A fact of the 42 words. " * 3, compiled_for="system")
    for request in ({}, {"scope": "prompt"}, {"packs": [pack]}):
        cold = engine.prefill(MESSAGES, steering=steering, reuse=False, **request).logits
        for _ in range(3):
            assert torch.equal(engine.prefill(MESSAGES, steering=steering, **request).logits, cold)
            assert engine.cached_bytes <= room, "a buffer of one tile has the rest"
        assert not torch.equal(engine.prefill(MESSAGES, **request).logits, cold)
    assert roomy.fingerprint.weights == engine.fingerprint.weights


def test_threads_that_steer_differently_do_not_disturb_one_another():
    engine = tiny_engine()
    steering = steering_of(engine)
    kinds = [None, steering, -steering, (steering, 0.5)]
    alone = [engine.generate(MESSAGES, steering=kind, max_tokens=6, reuse=False).token_ids for kind in kinds]
    engine.clear_cache()
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(engine.generate, MESSAGES, steering=kind, max_tokens=6) for kind in kinds * 8]
        found = [job.result().token_ids for job in jobs]
    assert found == alone * 8
    assert len(set(alone)) > 1


async def test_steering_reaches_streams_and_coroutines():
    engine = tiny_engine()
    request = {"steering": steering_of(engine), "max_tokens": 6}
    expected = engine.generate(MESSAGES, **request)
    assert engine.stream(MESSAGES, **request).result().token_ids == expected.token_ids
    assert (await engine.agenerate(MESSAGES, **request)).token_ids == expected.token_ids
    stream = engine.astream(MESSAGES, **request)
    assert "".join([piece async for piece in stream]) == expected.text
