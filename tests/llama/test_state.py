"""The state of a sequence is read and written as llama.cpp lays it out, or refused."""

import numpy as np
import pytest
import torch

from kp_core.engines.local.buffer import CacheShape
from kp_core.errors import ModelError, PackError
from kp_core.kv import KVTensors
from kp_llama.state import measured_shape, read_state, state_size, write_state

IDS = torch.randint(100, 40_000, (700,), generator=torch.Generator().manual_seed(0)).tolist()
PREFIX, PACK, QUESTION = slice(0, 30), slice(30, 680), slice(680, 700)


@pytest.fixture
def context(llama):
    context = llama.engine.model.context
    llama.clear_cache()
    yield context
    for sequence in range(4):
        context.call(context.remove, sequence)


@pytest.fixture(scope="module")
def shape(llama):
    return llama.engine.model.shape


def compute(context, sequence, part):
    """The logits behind some of the ids."""
    start = part.start
    for at in range(start, part.stop, 512):
        logits = context.call(context.decode, [(sequence, at, IDS[at : min(at + 512, part.stop)])])
    return logits[-1]


def restore(context, shape, sequence, kv, start):
    context.call(
        context.restore, sequence, state_size(shape, kv.tokens), lambda state: write_state(shape, kv, start, state)
    )


def test_a_pack_behind_its_prefix_in_another_sequence_gives_the_same_bits(context, shape):
    compute(context, 0, slice(PREFIX.start, PACK.stop))
    prefix, pack = (read_state(shape, context.call(context.state, 0, part.start, part.stop)) for part in (PREFIX, PACK))
    expected = compute(context, 0, QUESTION)
    restore(context, shape, 1, prefix, 0)
    restore(context, shape, 1, pack, PACK.start)
    assert np.array_equal(compute(context, 1, QUESTION), expected)
    assert read_state(shape, context.call(context.state, 1, PACK.start, PACK.stop)).equal(pack)


def test_what_is_written_is_what_llama_cpp_writes(context, shape):
    compute(context, 0, slice(0, 100))
    state = context.call(context.state, 0, 20, 100)
    again = np.empty_like(state)
    write_state(shape, read_state(shape, state), 20, again)
    state[4:8] = again[4:8] = 0  # The number of the sequence, here and in each cell, counts for nothing.
    cells = [part[16 : 16 + 12 * 80].view("<i4").reshape(80, 3) for part in (state, again)]
    for part in cells:
        part[:, 2] = 0
    assert np.array_equal(state, again)


def test_cells_that_lie_in_another_order_are_read_by_position(context, shape):
    """Where cells of another sequence were freed, llama.cpp fills the gaps first or last, as it finds them."""
    compute(context, 0, slice(0, 40))
    compute(context, 1, slice(0, 40))
    expected = read_state(shape, context.call(context.state, 0, 0, 40))
    context.call(context.remove, 1, 10, 20)
    state = context.call(context.state, 0, 0, 40)
    shuffled = state.copy()
    cells = shuffled[16 : 16 + 12 * 40].view("<i4").reshape(40, 3)
    order = np.arange(40)[::-1]
    cells[:] = cells[order]
    at = 16 + 12 * 40 + 8
    for _ in range(2 * 30):
        rows = shuffled[at + 12 : at + 12 + 40 * 384].reshape(40, 384)
        rows[:] = rows[order].copy()
        at += 12 + 40 * 384
    assert read_state(shape, shuffled).equal(expected)


SMALL = CacheShape(((1, 4, 4), (2, 4, 2)), torch.float16, torch.device("cpu"))


def random_kv(layers, tokens):
    generator = torch.Generator().manual_seed(1)
    keys, values = (
        [torch.randn(layer[0], tokens, layer[side], generator=generator).half() for layer in layers] for side in (1, 2)
    )
    return KVTensors(tuple(keys), tuple(values))


def written(tokens=3, start=5):
    kv, state = random_kv(SMALL.layers, tokens), np.empty(state_size(SMALL, tokens), np.uint8)
    write_state(SMALL, kv, start, state)
    return kv, state


def test_layers_of_different_heads_and_dimensions():
    kv, state = written()
    assert read_state(SMALL, state).equal(kv)


def test_one_token():
    kv, state = written(tokens=1)
    assert read_state(SMALL, state).equal(kv)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"\0\0\0\0", "magic"),
        (8, b"\2\0\0\0", "streams"),
        (12, b"\xff\xff\xff\x0f", "cells"),
        (12, b"\2\0\0\0", "bytes for 2 tokens"),
        (16, b"\7\0\0\0", "gaps"),
        (20, b"\2\0\0\0", "several sequences"),
        (16 + 36, b"\1\0\0\0", "transposed"),
        (16 + 36 + 4, b"\3\0\0\0", "layers"),
        (16 + 36 + 8, b"\x08\0\0\0", "type"),
        (16 + 36 + 12, b"\x09\0\0\0", "bytes of a row"),
    ],
)
def test_another_layout_is_refused_by_what_it_has(at, value, said):
    _, state = written()
    state[at : at + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(ModelError, match=said) as error:
        read_state(SMALL, state)
    assert "0.3.36" in str(error.value)


def test_each_shorter_state_is_refused():
    _, state = written()
    for size in range(len(state)):
        with pytest.raises(ModelError, match="llama-cpp-python"):
            read_state(SMALL, state[:size])


@pytest.mark.parametrize("dims", [(64, 32), (4, 2), (4, 4)])
def test_a_first_state_of_other_heads_is_refused(dims):
    """As multi-head latent attention, without values, or positions of several dimensions would give."""
    _, state = written()
    with pytest.raises(ModelError, match="llama-cpp-python"):
        measured_shape(state[: -10 * dims[0]], torch.float16, *dims)


def test_kv_of_another_shape_is_not_written():
    with pytest.raises(PackError, match="expected that of this model"):
        write_state(SMALL, random_kv(((1, 4, 4),), 3), 0, np.empty(state_size(SMALL, 3), np.uint8))
