"""KV that moves to host memory and comes back, and copies beside what layers compute. A CPU stands in for CUDA."""

import itertools
import logging
from functools import partial

import pytest
import torch

from kp_core import PackStore, load_engine
from kp_core.engines.local.buffer import TILE, KVBuffer
from kp_core.engines.local.copies import copy_layer, rows_of, to_host
from kp_core.kv import KVTensors
from tests.composers import Firsts
from tests.kits import ARCHITECTURES, tiny_model, tiny_tokenizer
from tests.parity.families import model_of

TEXT = "Pier 7 has 12 boats, and pier 8 has 3. " * 3
QUAYS = [f"Quay {number} has {number} cranes and {3 * number} boats.\n" for number in range(1, 4)]
ASKED = "How many boats?"
KINDS = [
    "llama",
    "qwen3_next",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3_text", "deepseek_v3")),
]
"""Plain, states of recurrent layers, windows, latents."""


def engine_of(kind="llama", host_cache_bytes=50_000_000):
    model = tiny_model(kind) if kind in ARCHITECTURES else model_of(kind)
    options = {"chunk_tokens": 64, "cache_bytes": 20_000_000, "host_cache_bytes": host_cache_bytes}
    return load_engine(model, tokenizer=tiny_tokenizer(), **options)


def packs_of(engine, compiled_for="system"):
    return [engine.build_pack(text, compiled_for=compiled_for) for text in QUAYS]


def ways_of(engine):
    """Questions whose KV comes from packs, text, composers and steering."""
    packs = packs_of(engine)
    ways = {"pack": {"packs": packs[:1]}, "packs": {"packs": packs}, "text": {"packs": (), "messages": TEXT}}
    if "compose" in engine.engine.supports:
        ways |= {"splice": {"packs": packs, "composer": "splice"}, "firsts": {"packs": packs, "composer": Firsts()}}
    if "steer" in engine.engine.supports:
        steering = engine.make_steering([("I am glad.", "I am sad.")], progress=False)
        ways["steered"] = {"packs": packs[:1], "steering": (steering, 2.0), "scope": "pack"}

    def ask(messages=ASKED, **options):
        return engine.generate(messages, max_tokens=4, **options)

    return {name: lambda options=options: ask(**options) for name, options in ways.items()}


def assert_same(found, expected):
    assert found.token_ids == expected.token_ids
    assert torch.equal(found.logits, expected.logits)
    assert found.usage.computed_tokens == expected.usage.computed_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_what_moved_to_the_host_comes_back_without_compute(kind):
    engine = engine_of(kind)
    tree = engine.engine.tree
    for name, ask in ways_of(engine).items():
        ask()
        expected = ask()
        assert expected.usage.computed_tokens == 0, name
        kept = tree.nbytes
        engine.engine.free_memory()
        assert (tree.nbytes, tree.host_nbytes) == (0, kept), name
        assert_same(ask(), expected)
        assert tree.nbytes > 0, name  # It is back on the device, so the next one needs no copy.
        assert tree.nbytes + tree.host_nbytes == kept, name
        assert_same(ask(), expected)
        engine.clear_cache()
        assert tree.nbytes == tree.host_nbytes == len(tree) == 0


def test_a_budget_that_is_too_small_moves_what_is_oldest_and_the_answers_stay():
    engine, other = engine_of(), engine_of(host_cache_bytes=0)
    tree, asked = engine.engine.tree, [f"Harbour {number}. {TEXT}" for number in range(6)]
    expected = [other.generate(text, max_tokens=4) for text in asked]
    engine.engine.pool.budget_bytes = KVBuffer.bytes_for(engine.engine.model.shape, 3 * TILE)
    for _ in range(2):
        found = [engine.generate(text, max_tokens=4) for text in asked]
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert [answer.usage.computed_tokens for answer in found] == [0] * len(asked)
    assert tree.host_nbytes > 0


def test_a_node_in_host_memory_is_found_by_who_may_read_it_alone(tmp_path):
    engine, store = engine_of(), PackStore(tmp_path)
    handle = store.put(engine.build_pack(TEXT, namespace="theirs"))
    asked, text = f"{handle}\n{ASKED}", f"{TEXT}\n{ASKED}"
    options = {"max_tokens": 2}
    theirs, mine = store.view("theirs"), store.view("mine")
    first = engine.generate(asked, view=theirs, **options)
    engine.engine.free_memory()
    unread = engine.generate(text, view=mine, **options)
    assert unread.usage.computed_tokens > len(engine.tokenizer.encode(TEXT)) / 2
    assert unread.token_ids == first.token_ids
    engine.engine.free_memory()
    assert engine.generate(asked, view=theirs, **options).usage.computed_tokens == 0


def test_without_the_option_a_cpu_keeps_nothing_twice():
    engine = load_engine(tiny_model("llama"), tokenizer=tiny_tokenizer(), cache_bytes=20_000_000)
    engine.generate(TEXT, max_tokens=2)
    engine.engine.free_memory()
    tree = engine.engine.tree
    assert (tree.host_bytes, tree.host_nbytes, len(tree)) == (0, 0, 0)


def test_a_host_that_pins_no_more_memory_costs_the_cache_alone(monkeypatch, caplog):
    engine = engine_of()
    expected = engine.generate(TEXT, max_tokens=4).token_ids

    def refuses(_):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("kp_core.engines.local.tree.to_host", refuses)
    with caplog.at_level(logging.WARNING, logger="kp_core"):
        engine.engine.free_memory()
    assert "stays within 0 bytes" in caplog.text
    assert len(engine.engine.tree) == 0
    assert engine.generate(TEXT, max_tokens=4).token_ids == expected


def late(events, parts, places):
    """Copies when it is waited for, not sooner. Until then the places hold no numbers."""
    for place in itertools.chain(*places):
        place.fill_(torch.nan)

    def arrive(at):
        events.append(f"copied {at}")
        copy_layer([(part.keys[at], part.values[at]) for part in parts], *places[at])

    return [partial(arrive, at) for at in range(len(places))]


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 8, 4), (3, 16, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("from_host", [(True, True), (False, True), (False, False)], ids=str)
def test_consecutive_parts_of_a_layer_arrive_where_they_belong(shape, from_host):
    heads, *dims = shape
    sides = [[torch.randn(heads, tokens, dim) for dim in dims] for tokens in (7, 5)]
    parts = [KVTensors(*([side] for side in part)) for part in sides]
    moved = [to_host(kv) if moves else kv for kv, moves in zip(parts, from_host, strict=True)]
    assert all(kv.equal(part) for kv, part in zip(moved, parts, strict=True))
    moved = [moved[0].slice(2, 6), moved[0].slice(6, 7), moved[1].slice(0, 4)]
    for kv, is_from_host in zip(moved, (from_host[0], *from_host), strict=True):
        assert (rows_of(kv.keys[0], kv.values[0]) is not None) == (is_from_host and heads > 0)
    room = [torch.full((heads, 20, dim), torch.nan) for dim in dims]
    copy_layer([(kv.keys[0], kv.values[0]) for kv in moved], *(side[:, 3:12] for side in room))
    expected = KVTensors.concat([parts[0].slice(2, 7), parts[1].slice(0, 4)])
    for side, [found] in zip(room, (expected.keys, expected.values), strict=True):
        assert torch.equal(side[:, 3:12], found)
        assert side[:, :3].isnan().all()
        assert side[:, 12:].isnan().all()


def test_a_full_device_has_its_kv_moved_all_the_same(monkeypatch):
    kv = KVTensors([torch.randn(2, 5, 8)], [torch.randn(2, 5, 8)])

    def is_full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", is_full)
    assert to_host(kv).equal(kv)


def watch(engine):
    """Lets KV of packs and from the host arrive late; returns what happens in order."""
    events = []
    engine.engine.pool.copy = partial(late, events)
    for at, layer in enumerate(engine.engine.model.network.base_model.layers):
        layer.register_forward_pre_hook(lambda *_, at=at: events.append(f"began {at}"))
    engine.engine.pool.clear()
    return events


@pytest.mark.parametrize("source", ["pack", "host"])
def test_the_first_layers_compute_while_the_later_ones_are_copied(source):
    engine = engine_of()
    [pack, *_] = packs_of(engine)
    engine.generate(ASKED, packs=[pack], max_tokens=2)
    expected = engine.generate("What else?", packs=[pack], max_tokens=1, reuse=False)
    engine.engine.free_memory() if source == "host" else engine.clear_cache()
    events = watch(engine)
    found = engine.generate("What else?", packs=[pack], max_tokens=1)
    layers = len(engine.engine.model.shape.layers)
    in_order = [event for event, _ in itertools.groupby(events)]  # What is before the pack comes in a part of its own.
    assert in_order[-2 * layers :] == [event for at in range(layers) for event in (f"began {at}", f"copied {at}")]
    assert found.usage.reused_tokens >= len(pack.token_ids)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_reads_what_has_not_arrived(kind):
    """Also where no pass runs before the first token, in composers, in batches and in what is kept in the tree."""
    plain, engine = engine_of(kind), engine_of(kind)
    events = watch(engine)
    for (name, ask), expect in zip(ways_of(engine).items(), ways_of(plain).values(), strict=True):
        assert_same(ask(), expect())
        engine.engine.free_memory()
        plain.engine.free_memory()
        events.clear()
        assert_same(ask(), expect())
        assert any(event.startswith("copied") for event in events), name
        engine.clear_cache()
        plain.clear_cache()
