import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kp_core import KVTensors, PrefixTree
from kp_core.engines.local.tree import common_tokens
from kp_core.packs.pack import common_length


def kv(ids, start=0):
    """KV that tells which token stands at which position; 8 bytes a token."""
    numbers = torch.tensor([[token * 1000 + start + at for at, token in enumerate(ids)]], dtype=torch.float32)
    return KVTensors((numbers[..., None],), (numbers[..., None],))


def insert(tree, ids, *, logits=True, owners=()):
    """Add a prompt as an engine does: what the tree lacks of it, with the logits behind the last token."""
    path = tree.match(ids, owners=owners, logits=logits)
    if path.tokens < len(ids):
        path.extend(ids[path.tokens :], kv(ids[path.tokens :], path.tokens), torch.zeros(1) if logits else None)
    path.release()
    return path


def matched(tree, ids, **how):
    path = tree.match(ids, **how)
    path.release()
    return path.tokens


def held(path):
    return [value for _, kv in path.held for value in kv.keys[0].flatten().tolist()]


def test_any_common_beginning_is_found():
    tree = PrefixTree(10_000)
    insert(tree, (1, 2, 3, 4, 5))
    assert matched(tree, (1, 2, 3, 4, 5)) == 5
    assert matched(tree, (1, 2, 3, 9)) == 3
    assert matched(tree, (1, 2, 3)) == 2, "one token is left, to compute logits with"
    assert matched(tree, (1, 2, 3), logits=False) == 3
    assert matched(tree, (1, 2, 3, 4, 5)) == 5, "still whole after it was split"
    assert matched(tree, (2,), logits=False) == 0
    path = tree.match((1, 2, 3, 4, 6))
    assert held(path) == [1000.0, 2001.0, 3002.0, 4003.0]
    path.release()


def test_a_split_renames_nothing():
    tree = PrefixTree(10_000)
    insert(tree, (1, 2, 3, 4, 5, 6))
    before = tree.match((1, 2, 3, 4, 5, 6))
    whole = [name for name, _ in before.held]
    assert len(whole) == 1
    insert(tree, (1, 2, 3, 7), logits=False)
    after = tree.match((1, 2, 3, 4, 5, 6))
    assert len(after.held) == 2
    assert common_tokens(whole, [name for name, _ in after.held]) == 6
    other = tree.match((1, 2, 3, 7), logits=False)
    assert common_tokens(whole, [name for name, _ in other.held]) == 3
    for path in (before, after, other):
        path.release()


def test_the_memory_of_what_is_evicted_is_given_back_though_the_rest_is_kept():
    tree = PrefixTree(10_000)
    insert(tree, tuple(range(1, 101)), logits=False)
    path = tree.match((1, 2, 3, 0), logits=False)
    tree.clear()
    assert tree.nbytes == 3 * 8
    (node,) = tree._age
    assert node.kv.keys[0].untyped_storage().nbytes() == 3 * 4
    path.release()


def test_kv_of_a_pack_is_met_by_those_who_may_read_it():
    tree = PrefixTree(10_000)
    path = tree.match((1, 2, 3, 4, 5))
    path.extend((1, 2), kv((1, 2)))
    path.extend((3, 4), kv((3, 4), 2), owners={"ours"})
    path.extend((5,), kv((5,), 4), torch.zeros(1))
    path.release()
    assert matched(tree, (1, 2, 3, 4, 5)) == 2
    assert matched(tree, (1, 2, 3, 4, 5), owners={"theirs"}) == 2
    assert matched(tree, (1, 2, 3, 4, 5), owners={"theirs", "ours"}) == 5
    # The same text from somebody else stands beside it, and both find the longer of the two.
    insert(tree, (1, 2, 3, 9), logits=False)
    assert matched(tree, (1, 2, 3, 9), logits=False) == 4
    assert matched(tree, (1, 2, 3, 4, 5)) == 3
    assert matched(tree, (1, 2, 3, 4, 5), owners={"ours"}) == 5
    assert matched(tree, (1, 2, 3, 9), owners={"ours"}, logits=False) == 4


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_pack_is_forgotten_with_all_behind_it(where):
    tree, ids = PrefixTree(10_000, host_bytes=10_000), (1, 2, 3, 4, 5)
    path, whole = tree.match(ids), kv(ids)
    path.extend((1, 2), whole.slice(0, 2))
    path.extend((3, 4), whole.slice(2, 4), owners={"ours"}, packs={("a", 4)})
    path.extend((5,), whole.slice(4, 5))
    for handle, end in (("b", (3, 6)), ("c", (7, 8))):
        other = tree.match((1, 2, *end), owners={"ours"}, logits=False)
        rest = (1, 2, *end)[other.tokens :]
        other.extend(rest, kv(rest, other.tokens), owners={"ours"}, packs={(handle, 4)})
        other.release()
    assert tree.forget({"d"})
    assert not tree.forget({"a"}), "it is in use"
    path.release()
    if where == "host":
        tree.vacate()
    assert tree.packs == {"a", "b", "c"}
    assert tree.forget({"a"})
    assert [matched(tree, (1, 2, *end), owners={"ours"}, logits=False) for end in ((3, 4), (3, 6), (7, 8))] == [3, 4, 4]
    assert tree.forget({"a", "b"})
    assert tree.packs == {"c"}
    assert [matched(tree, (1, 2, *end), owners={"ours"}, logits=False) for end in ((3, 4), (3, 6), (7, 8))] == [2, 2, 4]
    stored = {
        (side := tensor.untyped_storage()).data_ptr(): side.nbytes()
        for node in (*tree._age, *tree._cold)
        for tensor in node.kv.keys
    }
    assert tree.nbytes + tree.host_nbytes == 4 * 8
    # In host memory keys and values lie together.
    assert sum(stored.values()) == 4 * (4 if where == "device" else 8), "no node holds its memory"


def test_what_was_altered_is_one_node_under_its_label():
    tree = PrefixTree(10_000)
    insert(tree, (1, 2, 3, 4, 5))
    labels = {1: (3, -7)}
    path = tree.match((1, 2, 3, 4, 5), labels=labels)
    assert path.tokens == 1
    path.extend((2, 3), kv((2, 3), 1), label=-7)
    path.extend((4, 5), kv((4, 5), 3), torch.zeros(1))
    path.release()
    assert matched(tree, (1, 2, 3, 4, 5), labels=labels) == 5
    assert matched(tree, (1, 2, 3, 4, 6), labels=labels) == 4
    assert matched(tree, (1, 2, 9, 4, 6), labels=labels) == 1, "it is matched whole"
    assert matched(tree, (1, 2, 3, 4, 5), labels={1: (3, -8)}) == 1
    assert matched(tree, (1, 2, 3, 4, 5), labels={0: (3, -7)}) == 0


def test_states_are_where_a_path_may_end():
    tree = PrefixTree(10_000, has_states=True)
    state = (torch.ones(2),)
    path = tree.match((1, 2, 3, 4))
    first, second = kv((1, 2)), kv((3, 4), 2)
    path.extend((1, 2), KVTensors(first.keys, first.values, state))
    path.extend((3, 4), second)
    path.release()
    assert matched(tree, (1, 2, 3, 4), logits=False) == 2
    assert matched(tree, (1, 9)) == 0
    path = tree.match((1, 2, 3, 4), logits=False)
    path.extend((3, 4), KVTensors(second.keys, second.values, state))
    path.release()
    assert matched(tree, (1, 2, 3, 4), logits=False) == 4, "the states came later"
    assert matched(tree, (1, 2, 3, 9), logits=False) == 2, "a node that is split has its states at its end"
    insert(tree, (1, 2, 3, 9), logits=False)
    assert matched(tree, (1, 2, 3, 7), logits=False) == 2
    assert matched(tree, (1, 2, 3, 4), logits=False) == 4


def test_the_budget_holds_and_the_oldest_leaf_goes_first():
    tree = PrefixTree(8 * 6)
    insert(tree, (1, 2, 3), logits=False)
    insert(tree, (1, 4), logits=False)
    assert matched(tree, (1, 2, 3), logits=False) == 3
    insert(tree, (5, 6), logits=False)
    insert(tree, (7,), logits=False)
    assert tree.nbytes <= tree.budget_bytes
    assert matched(tree, (1, 4), logits=False) == 1, "the oldest leaf is gone"
    assert matched(tree, (1, 2, 3), logits=False) == 3


def test_what_is_in_use_stays():
    tree = PrefixTree(8 * 4)
    using = tree.match((1, 2)), tree.match((3, 4))
    for path, ids in zip(using, ((1, 2), (3, 4)), strict=True):
        path.extend(ids, kv(ids))
    insert(tree, (5, 6), logits=False)
    assert matched(tree, (5, 6), logits=False) == 0, "no room: the path was closed"
    assert matched(tree, (1, 2), logits=False) == matched(tree, (3, 4), logits=False) == 2
    for path in using:
        path.release()
    tree.clear()
    assert tree.nbytes == len(tree) == 0


def test_a_run_larger_than_the_budget_closes_the_path():
    tree = PrefixTree(8)
    path = tree.match((1, 2, 3))
    assert not path.extend((1, 2), kv((1, 2)))
    assert not path.extend((3,), kv((3,), 2))
    path.release()
    assert tree.nbytes == 0


prompts = st.lists(st.integers(1, 3), min_size=1, max_size=9).map(tuple)


@settings(deadline=None, max_examples=200)
@given(st.lists(prompts, max_size=12), prompts, st.integers(0, 40))
def test_the_tree_agrees_with_a_list_of_all_prompts(known, asked, room):
    tree, small = PrefixTree(10**9), PrefixTree(8 * room)
    for ids in known:
        insert(tree, ids, logits=False)
        insert(small, ids, logits=False)
        assert small.nbytes <= small.budget_bytes
        assert small.nbytes == sum(node.nbytes for node in small._age)
    expected = max((common_length(asked, ids) for ids in known), default=0)
    assert matched(tree, asked, logits=False) == expected
    assert matched(small, asked, logits=False) <= expected
    for each in (tree, small):
        path = each.match(asked, logits=False)
        assert held(path) == [float(token * 1000 + at) for at, token in enumerate(asked[: path.tokens])]
        path.release()


@pytest.mark.timeout(60)
def test_threads_share_one_tree():
    tree = PrefixTree(8 * 50)
    errors = []

    def work(seed):
        try:
            for at in range(200):
                path = insert(tree, (seed % 3, at % 5, at % 7, seed))
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


@settings(deadline=None, max_examples=200)
@given(st.lists(prompts, max_size=12), st.integers(0, 12), st.sampled_from([0, 3, 8, 20, 10**6]))
@example([(2, *[1] * 6), (2, 1, 2), (1,) * 4, (2, 2, *[1] * 5)], 6, 3)  # The first of three parts comes back.
@example([(2, 1, 2, 2, 2, 1, 1, 1), (2, 1, 2, 2, 1, 1), (1,), (2, 1, 2, *[1] * 4)], 6, 20)  # The second does.
def test_what_the_device_evicts_is_in_host_memory(known, room, host):
    """It is found and comes back, within both budgets, and no node holds memory that another one gave up."""
    tree, inserted = PrefixTree(8 * room, host_bytes=8 * host), {}
    for ids in [*known, *known]:
        path = tree.match(ids, logits=False)
        assert held(path) == [float(token * 1000 + at) for at, token in enumerate(ids[: path.tokens])]
        assert path.tokens >= inserted.get(ids, 0) or host < 10**6
        if path.tokens < len(ids):
            path.extend(ids[path.tokens :], kv(ids[path.tokens :], path.tokens))
        path.bring_back(lambda start, stop, ids=ids: kv(ids[start:stop], start).clone(), torch.device("cpu"))
        inserted[ids] = path.tokens
        path.release()
        assert tree.nbytes == sum(node.nbytes for node in tree._age) <= tree.budget_bytes
        assert tree.host_nbytes == sum(node.nbytes for node in tree._cold) <= tree.host_bytes
        stored = {
            (side := tensor.untyped_storage()).data_ptr(): side.nbytes()
            for node in tree._cold
            for tensor in (*node.kv.keys, *node.kv.values, *node.kv.states)
        }
        assert sum(stored.values()) == tree.host_nbytes
    tree.clear()
    assert tree.nbytes == tree.host_nbytes == len(tree) == 0


def test_what_is_in_use_does_not_move_to_the_host():
    tree = PrefixTree(8 * 4, host_bytes=8 * 100)
    using = tree.match((1, 2))
    using.extend((1, 2), kv((1, 2)))
    tree.vacate()
    assert (tree.nbytes, tree.host_nbytes) == (8 * 2, 0)
    using.release()
    tree.vacate()
    assert (tree.nbytes, tree.host_nbytes) == (0, 8 * 2)
    path = tree.match((1, 2), logits=False)
    tree.clear()
    assert len(tree) == 1, "it is in use"
    path.release()


def test_a_path_that_does_not_fit_whole_comes_back_in_part():
    tree, ids = PrefixTree(8 * 4, host_bytes=8 * 100), (1, 2, 3, 4, 5)
    insert(tree, ids[:3], logits=False)
    tree.vacate()
    insert(tree, ids, logits=False)
    path = tree.match(ids, logits=False)
    path.bring_back(lambda start, stop: kv(ids[start:stop], start), torch.device("cpu"))
    tree.vacate()
    path.bring_back(lambda start, stop: kv(ids[start:stop], start), torch.device("cpu"))
    assert (tree.nbytes, tree.host_nbytes) == (8 * 2, 8 * 3), "the last node is in use and stays"
    path.release()
    tree.vacate()
    path = tree.match(ids, logits=False)
    path.bring_back(lambda start, stop: kv(ids[start:stop], start), torch.device("cpu"))
    assert (tree.nbytes, tree.host_nbytes) == (8 * 3, 8 * 2), "the first one is not moved out for the last"
    path.release()
