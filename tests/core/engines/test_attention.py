"""Tiled attention: what it computes, and that its bits depend on positions alone."""

import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kp_core.engines.hf import attention
from kp_core.engines.hf.attention import Sees
from kp_core.engines.hf.probe import probed, why_not_bitwise
from kp_core.engines.local.buffer import TILE, KVBuffer
from tests.conftest import tiny_engine
from tests.kits import tiny_model

# With gradients, as training has them, attention is the library's own.
attend = torch.inference_mode()(attention.attend)
WHAT = [Sees(), Sees(100), Sees(TILE + 40), Sees(300, is_chunked=True)]


def states(tokens, dtype=torch.float32, heads=6, kv_heads=2, dim=16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (heads, tokens, dim), (kv_heads, tokens, dim), (kv_heads, tokens, dim)
    return [torch.randn(1, *shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.parametrize("sees", WHAT)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_it_is_attention_over_what_each_token_sees(sees, has_sinks):
    """As by a mask over all keys, which is also how accelerators compute it."""
    query, key, value = states(3 * TILE + 20)
    sinks = torch.randn(6) if has_sinks else None
    for positions in (range(3 * TILE + 20), range(700, 701), range(500, 530), (3, 250, 256, 600, 787)):
        asked = query[:, :, list(positions)]
        found = attend(asked, key, value, positions, None, sees, sinks)
        expected = attention._by_mask(asked, key, value, positions, None, sees, sinks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    cuts=st.sets(st.integers(1, 3 * TILE + 19), max_size=6),
    sees=st.sampled_from(WHAT),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_cut_gives_the_same_bits(cuts, sees, dtype):
    if "bitwise" not in tiny_engine("llama", dtype).engine.supports:
        pytest.skip("on this processor rows depend on one another")
    tokens = 3 * TILE + 20
    query, key, value = states(tokens, dtype)
    whole = attend(query, key, value, range(tokens), None, sees)
    for start, stop in itertools.pairwise([0, *sorted(cuts), tokens]):
        part = attend(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], range(start, stop), None, sees)
        assert torch.equal(part, whole[:, :, start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (9, 9), (4, 2)])
def test_a_token_has_the_same_bits_among_any_number_of_others(dtype, heads, kv_heads):
    """Heads of 64, so that a kernel that computes the last rows differently is seen to round differently."""
    query, key, value = states(1000, dtype, heads, kv_heads, dim=64)
    for new in (2, 3, 4, 5, 7, 50):
        places = range(1000 - new, 1000)
        together = attend(3 * query[:, :, -new:], key, value, places)
        alone = [attend(3 * query[:, :, [at]], key, value, range(at, at + 1)) for at in places]
        assert torch.equal(together, torch.cat(alone, dim=2)), new


def test_many_tiles_are_added_in_one_order_whatever_the_number_of_rows(monkeypatch):
    """More than a group of them; in one call, as for a few rows, and one by one, as for many."""
    tokens = 18 * TILE + 5
    query, key, value = states(tokens, torch.bfloat16, heads=4)
    last = range(tokens - 12, tokens)
    found = attend(query[:, :, -12:], key, value, last)
    monkeypatch.setattr(attention, "_SMALL", 0)
    assert torch.equal(attend(query[:, :, -12:], key, value, last), found)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_tokens_on_both_sides_of_the_edge_of_any_tile_are_what_each_is_alone(has_sinks):
    """A row beside one that sees a tile more: its sum has one more term, which is zero."""
    tiles = 34  # More than twice as many as are added at once, and than a vector of the processor holds.
    query, key, value = states(tiles * TILE + 20, heads=8)
    sinks = torch.randn(8) if has_sinks else None
    for edge in range(TILE, (tiles + 1) * TILE, TILE):
        places = range(edge - 20, edge + 2)
        together = attend(query[:, :, places.start : places.stop], key, value, places, sinks=sinks)
        for at in places:
            alone = attend(query[:, :, at : at + 1], key, value, range(at, at + 1), sinks=sinks)
            assert torch.equal(together[:, :, at - places.start : at - places.start + 1], alone), at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 80, 256])
def test_the_first_keys_of_a_tile_give_the_bits_of_the_whole_tile(dtype, dim):
    if "bitwise" not in tiny_engine("llama", dtype).engine.supports:
        pytest.skip("on this processor rows depend on one another")
    query, key, value = states(TILE, dtype, dim=dim)
    rows, _ = attention.grouped_rows(query[:, :, :1], 2)
    read = set()
    for visible in range(1, TILE + 1):
        mask = torch.zeros(1, 1, rows.shape[2], TILE, dtype=dtype)
        mask[..., visible:] = -torch.inf
        keys = attention.keys_to_read(visible)
        read.add(keys)
        short = attention.tile_of_each(rows, key[:, :, :keys], value[:, :, :keys], mask[..., :keys], None)
        whole = attention.tile_of_each(rows, key, value, mask, None)
        assert all(map(torch.equal, short, whole)), visible
    assert read == {32, 64, 96, 128, TILE}


def test_what_stands_behind_the_end_of_a_buffer_is_never_seen():
    model = probed(tiny_model("llama"))
    ids = torch.randint(256, (2 * TILE,), generator=torch.Generator().manual_seed(0)).tolist()
    clean, dirty = KVBuffer(model.shape, 2 * TILE), KVBuffer(model.shape, 2 * TILE)
    for layer in dirty.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    for start, stop in itertools.pairwise((0, 40, 41, TILE - 1, TILE, TILE + 30)):
        expected, found = (model.forward(ids[start:stop], each) for each in (clean, dirty))
        assert torch.equal(found, expected)
    # What was there is forgotten, and something else is written behind it.
    for buffer in (clean, dirty):
        buffer.truncate(30)
        buffer.append(dirty.read(0, 9))
    for layer in dirty.layers:
        layer.keys[:, :, 60:] = float("nan")
        layer.values[:, :, 60:] = float("inf")
    dirty.truncate(20)
    clean.truncate(20)
    assert torch.equal(model.forward(ids[50:70], dirty), model.forward(ids[50:70], clean))


def test_a_probe_that_finds_a_difference_says_so(monkeypatch):
    model = probed(tiny_model("llama").to(torch.bfloat16))
    assert why_not_bitwise(model, model.packed) == ""
    plain = model.forward

    def rounding(ids, buffer, logits):  # As a library whose sums depend on how many tokens a pass has.
        return plain(ids, buffer, logits) * (1 + (len(ids) == 1) / 64)

    monkeypatch.setattr(model, "forward", rounding)
    assert "cut in other places" in why_not_bitwise(model, model.packed)


def test_masks_of_questions_behind_long_texts_do_not_pile_up():
    """They are not counted in the budget for KV, so only a few may stay."""

    def held_bytes():
        return sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)

    query, key, value = states(32 * TILE, heads=4, kv_heads=1)
    before = held_bytes()
    for start in range(31 * TILE, 31 * TILE + 24):
        attend(query[:, :, start : start + 64], key, value, range(start, start + 64))
    assert held_bytes() - before < 64 << 20
