import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kp_core import KVTensors, PrefixTree
from kp_core.prompt.prompt import common_length


def kv(ids, start=0):
    """KV that tells which token stands at which position; 8 bytes a token."""
    numbers = torch.tensor([[token * 1000 + start + at for at, token in enumerate(ids)]], dtype=torch.float32)
    return KVTensors((numbers[..., None],), (numbers[..., None],))


def insert(tree, chunks, *, logits=True, pin=False):
    ids = tuple(token for chunk in chunks for token in chunk)
    path = tree.match(ids, cuts(chunks))
    done = 0
    for chunk in chunks:
        if done >= path.tokens and path.is_open:
            last = logits and done + len(chunk) == len(ids)
            path.extend(chunk, kv(chunk, done), torch.zeros(1) if last else None)
        done += len(chunk)
    if pin:
        path.pin()
    path.release()
    return path


def cuts(chunks):
    edges = [0]
    for chunk in chunks:
        edges.append(edges[-1] + len(chunk))
    return list(itertools.pairwise(edges))


def matched(tree, chunks, **how):
    path = tree.match(tuple(token for chunk in chunks for token in chunk), cuts(chunks), **how)
    path.release()
    return path.tokens


def test_a_prompt_is_found_again_chunk_by_chunk():
    tree = PrefixTree(10_000)
    insert(tree, [(1, 2), (3,), (4, 5)])
    assert matched(tree, [(1, 2), (3,), (4, 5)]) == 5
    assert matched(tree, [(1, 2), (3,), (9,)]) == 3
    assert matched(tree, [(1, 2, 3), (4, 5)]) == 0, "other cuts, other shapes"
    assert matched(tree, [(1, 2), (3,)]) == 2, "no logits behind the inner chunk"
    assert matched(tree, [(1, 2), (3,)], logits=False) == 3
    assert matched(tree, [(1, 2)], labels={(0, 2): -7}) == 0, "what was altered has another name"


def test_decoded_tokens_match_in_part_and_split():
    tree = PrefixTree(10_000)
    path = insert(tree, [(1, 2)])
    again = tree.match((1, 2), [(0, 2)])
    again.extend((7, 8, 9), kv((7, 8, 9), 2), is_decoded=True)
    again.release()
    assert path.tokens == 2
    assert matched(tree, [(1, 2), (7, 8, 9, 5, 6)]) == 5
    assert matched(tree, [(1, 2), (7, 8, 4)]) == 4
    assert matched(tree, [(1, 2), (7, 8, 9, 5, 6)]) == 5, "still whole after the split"
    assert matched(tree, [(1, 2), (7, 8, 9, 5)], decoded=False) == 2
    assert matched(tree, [(1, 2), (7, 8)]) == 3, "one token is left, to compute logits with"
    found = tree.match((1, 2, 7, 8, 9, 5), [(0, 2), (2, 6)])
    assert not found.is_canonical
    assert torch.cat([run.kv.keys[0] for run in found.runs], dim=1).flatten().tolist() == [
        1000.0, 2001.0, 7002.0, 8003.0, 9004.0,
    ]  # fmt: skip
    found.release()


def test_the_budget_holds_and_the_oldest_leaf_goes_first():
    tree = PrefixTree(8 * 6)
    insert(tree, [(1,), (2, 3)], logits=False)
    insert(tree, [(1,), (4,)], logits=False)
    assert matched(tree, [(1,), (2, 3)], logits=False) == 3
    insert(tree, [(5, 6)], logits=False)
    insert(tree, [(7,)], logits=False)
    assert tree.nbytes <= tree.budget_bytes
    assert matched(tree, [(1,), (4,)], logits=False) == 1, "the oldest leaf is gone"
    assert matched(tree, [(1,), (2, 3)], logits=False) == 3


def test_what_is_pinned_or_in_use_stays():
    tree = PrefixTree(8 * 4)
    pinned = tree.match((1, 2), [(0, 2)])
    pinned.extend((1, 2), kv((1, 2)))
    node = pinned.pin()
    pinned.release()
    using = tree.match((3, 4), [(0, 2)])
    using.extend((3, 4), kv((3, 4)))
    insert(tree, [(5, 6)], logits=False)
    assert matched(tree, [(5, 6)], logits=False) == 0, "no room: the path was closed"
    assert matched(tree, [(1, 2)], logits=False) == matched(tree, [(3, 4)], logits=False) == 2
    using.release()
    tree.unpin(node)
    tree.clear()
    assert tree.nbytes == len(tree) == 0


def test_a_run_larger_than_the_budget_closes_the_path():
    tree = PrefixTree(8)
    path = tree.match((1, 2, 3), [(0, 2), (2, 3)])
    assert not path.extend((1, 2), kv((1, 2)))
    assert not path.extend((3,), kv((3,)))
    path.release()
    assert tree.nbytes == 0


prompts = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@settings(deadline=None, max_examples=150)
@given(st.lists(prompts, max_size=12), prompts, st.integers(0, 40))
def test_the_tree_agrees_with_a_list_of_all_prompts(known, asked, room):
    tree, small = PrefixTree(10**9), PrefixTree(8 * room)
    for chunks in known:
        insert(tree, chunks, logits=False)
        insert(small, chunks, logits=False)
        assert small.nbytes <= small.budget_bytes
    expected = max((sum(map(len, asked[: common_length(asked, chunks)])) for chunks in known), default=0)
    assert matched(tree, asked, logits=False) == expected
    assert matched(small, asked, logits=False) <= expected
    path = small.match(tuple(t for c in asked for t in c), cuts(asked), logits=False)
    values = [value for run in path.runs for value in run.kv.keys[0].flatten().tolist()]
    ids = [token for chunk in asked for token in chunk]
    assert values == [float(token * 1000 + at) for at, token in enumerate(ids[: path.tokens])]


@pytest.mark.timeout(60)
def test_threads_share_one_tree():
    tree = PrefixTree(8 * 50)
    errors = []

    def work(seed):
        try:
            for at in range(200):
                chunks = [(seed % 3, at % 5), (at % 7,), (seed,)]
                path = insert(tree, chunks)
                assert path.tokens <= 4
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert tree.nbytes <= tree.budget_bytes
    tree.clear()
    assert tree.nbytes == 0
