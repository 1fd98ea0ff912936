"""Entries behind several packs: budget, age, damage, and writers that are killed."""

import os
import time
from dataclasses import replace

import pytest
import torch

from kp_core.errors import PackError
from kp_core.kv import KVTensors
from kp_core.packs import files as store_files
from kp_core.packs.entry import Entry
from kp_core.packs.store import PackStore
from tests.core.packs.made import FINGERPRINT, Watched, make_pack

TOKENS = 40


def kv_of(seed: int = 0, tokens: int = TOKENS) -> KVTensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, tokens, 4, generator=generator).bfloat16() for _ in range(4)]
    return KVTensors(tuple(tensors[:2]), tuple(tensors[2:]))


def key_of(*owners, at: int = 0, before: str = "0" * 32) -> Entry:
    """An entry whose name covers all tokens, also behind words of the namespace `geo`."""
    return Entry(FINGERPRINT, at, before, tuple(range(TOKENS)), frozenset(map(str, (*owners, "geo"))))


def files(store: PackStore):
    return sorted((store.path / "behind").rglob("*.safetensors"))


def size_of(store: PackStore) -> int:
    return sum(size for _, size in store.kept())


@pytest.fixture
def three(tmp_path):
    """A store of two packs and three entries behind both, the first used longest ago."""
    store = PackStore(tmp_path)
    handles = [store.put(make_pack(text)) for text in ("one", "two")]
    keys = [key_of(*handles, at=at) for at in range(3)]
    for seed, key in enumerate(keys):
        assert store.write(key, kv_of(seed))
        time.sleep(0.01)
    return store, handles, keys


def read(store, key):
    return store.read(key, ("geo",))


def test_what_was_written_is_read_bit_for_bit(three):
    store, _, keys = three
    again = PackStore(store.path)
    assert [read(again, key).equal(kv_of(seed)) for seed, key in enumerate(keys)] == [True] * 3
    assert len(list(again)) == 2, "entries are no packs"
    assert size_of(again) == sum(path.stat().st_size for path in files(store))


def test_verify_names_damaged_entries_and_deletes_them_on_demand(three):
    store, _, keys = three
    path = store.path / keys[1].key
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    [(name, _)] = store.verify()
    assert (name, len(files(store))) == (keys[1].key, 3)
    assert [each for each, _ in store.verify(repair=True)] == [name]
    assert list(store.verify()) == []
    assert [read(store, key) is None for key in keys] == [False, True, False]


def test_what_is_damaged_and_cannot_be_deleted_is_told_and_stays(three, monkeypatch):
    store, _, keys = three
    (store.path / keys[1].key).write_bytes(b"torn")

    def refuse(key):
        raise OSError(f"{key} is on a disk that is only read")

    monkeypatch.setattr(store.blobs, "delete", refuse)
    assert [each for each, _ in store.verify(repair=True)] == [keys[1].key]
    assert len(files(store)) == 3


def test_every_part_of_the_key_counts(three):
    store, _, (key, *_) = three
    others = [
        replace(key, at=7),
        replace(key, before="1" * 32),
        replace(key, token_ids=key.token_ids[1:]),
        replace(key, model=replace(FINGERPRINT, dtype="float16")),
        replace(key, owners=key.owners - {"geo"}),
        replace(key, label="packet"),
        replace(key, begins=8),
    ]
    assert read(store, key) is not None
    assert [read(store, other) for other in others] == [None] * 7
    for owners in (key.owners | {"art"}, key.owners | {f"kp:art/{'a' * 21}"}):
        assert not store.has(replace(key, owners=owners), ("geo",))
    assert store.read(key, ("art",)) is None


def starting(key: Entry, *, same: int, tokens: int = TOKENS) -> Entry:
    """`key` of `tokens` tokens, of which the first `same` are those of `key`."""
    return replace(key, token_ids=(*key.token_ids[:same], *range(1000, 1000 + tokens - same)))


@pytest.mark.parametrize("same", [8, 9, 25, TOKENS - 1, TOKENS])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS + 30])
def test_an_entry_found_by_its_first_tokens_is_read_up_to_the_last_in_common(tmp_path, same, tokens):
    store = PackStore(tmp_path)
    key = replace(key_of(store.put(make_pack("one"))), begins=8)
    assert store.write(key, kv_of())
    other = starting(key, same=same, tokens=tokens)
    assert store.has(other, ("geo",))
    assert read(store, other).equal(kv_of().slice(0, same))
    assert read(store, key).equal(kv_of())


def test_a_shorter_prompt_reads_the_first_tokens_of_a_longer_entry(tmp_path):
    store = PackStore(tmp_path)
    key = replace(key_of(store.put(make_pack("one"))), begins=8)
    assert store.write(key, kv_of())
    for count in (8, 20):
        assert read(store, replace(key, token_ids=key.token_ids[:count])).equal(kv_of().slice(0, count))
    assert read(store, replace(key, token_ids=key.token_ids[:7])) is None, "it is found by as many as `begins` says"


@pytest.mark.parametrize("same", range(8))
def test_an_entry_is_not_found_when_its_first_tokens_differ(tmp_path, same):
    store = PackStore(tmp_path)
    key = replace(key_of(store.put(make_pack("one"))), begins=8)
    assert store.write(key, kv_of())
    assert not store.has(starting(key, same=same), ("geo",))
    assert read(store, starting(key, same=same)) is None


def test_without_a_number_of_first_tokens_an_entry_is_found_by_all_tokens_only(three):
    store, _, (key, *_) = three
    assert read(store, key).equal(kv_of())
    others = [starting(key, same=same) for same in (0, 8, 25, TOKENS - 1)]
    others += [replace(key, token_ids=key.token_ids[:25]), replace(key, token_ids=(*key.token_ids, 5))]
    others += [replace(each, begins=8) for each in (key, *others)]
    assert [read(store, other) for other in others] == [None] * len(others)


def test_all_else_in_the_key_counts_where_first_tokens_find_it(tmp_path):
    store = PackStore(tmp_path)
    handles = [store.put(make_pack(text)) for text in ("one", "two")]
    key = replace(key_of(*handles), begins=8)
    assert store.write(key, kv_of())
    others = [
        replace(key, at=7),
        replace(key, before="1" * 32),
        replace(key, model=replace(FINGERPRINT, passes="others")),
        replace(key, owners=key.owners - {str(handles[0])}),
        replace(key, owners=key.owners | {"art"}),
        replace(key, begins=9),
    ]
    assert [read(store, other) for other in others] == [None] * 6
    assert store.read(key, ("art",)) is None


def test_states_are_read_with_the_last_token_alone(tmp_path):
    """They hold for the end of an entry: what is read of its first tokens has none."""
    store = PackStore(tmp_path)
    key = replace(key_of(store.put(make_pack("one"))), begins=8)
    kv = replace(kv_of(), states=(torch.ones(2, 3),))
    assert store.write(key, kv)
    assert read(store, key).equal(kv)
    assert read(store, starting(key, same=TOKENS, tokens=TOKENS + 5)).equal(kv)
    assert read(store, starting(key, same=20)).states == ()


def test_the_least_recently_used_goes_first(three):
    store, handles, keys = three
    size = size_of(store)
    read(store, keys[0])
    packs = store.nbytes - size
    bound = PackStore(store.path, max_bytes=packs + size + 10)
    for handle in handles:
        bound.get(handle)
    bound._uses.note(keys[0].key)
    assert bound.write(key_of(*handles, at=3), kv_of(3))
    assert [read(bound, key) is None for key in keys] == [False, True, False]
    assert bound.nbytes <= packs + size + 10


def test_an_entry_beyond_the_bound_is_refused_and_nothing_is_dropped(three):
    store, handles, keys = three
    small = PackStore(store.path, max_bytes=store.nbytes)
    large = replace(key_of(*handles, at=9), token_ids=tuple(range(10 * TOKENS)))
    assert not small.write(large, kv_of(9, tokens=10 * TOKENS))
    assert [read(small, key) is None for key in keys] == [False] * 3
    assert not PackStore(store.path, max_bytes=10).write(key_of(*handles, at=9), kv_of(5))
    assert len(files(store)) == 3


def test_few_writes_look_at_all_entries_and_the_bound_holds(three, monkeypatch):
    store, handles, _ = three
    bound = 64 * (size_of(store) // 3)
    monkeypatch.setattr(store_files, "_MOST", bound)
    blobs = Watched(store.path)
    writers, looks = (PackStore(blobs), PackStore(store.path)), []
    for at in range(3, 100):
        assert writers[at % 2].write(key_of(*handles, at=at), kv_of(at))
        assert sum(path.stat().st_size for path in files(store)) <= bound
        looks.append(blobs.done.count("list"))
    assert looks[20] <= 3, "there is much room"
    assert looks[-1] - looks[40] < 24, "there is little, for half of 57 writes"
    assert len(files(store)) > 40


def test_what_was_not_used_for_long_is_gone(three):
    store, handles, keys = three
    for path in files(store):
        os.utime(path, (0, time.time() - 100))
    store._uses._times.clear()
    late = PackStore(store.path, keep_seconds=50)
    late._uses.note(keys[1].key)
    assert [read(late, key) is None for key in keys] == [True, False, True]
    assert late.write(key_of(*handles, at=9), kv_of(9))
    assert len(files(store)) == 2
    with pytest.raises(PackError, match="keep_seconds=0"):
        PackStore(store.path, keep_seconds=0)


def test_damage_is_a_miss(three, caplog):
    store, _, keys = three
    for path in files(store)[:2]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    found = [read(store, key) for key in keys]
    assert found.count(None) == 2
    assert "is damaged, deleted" in caplog.text
    assert len(files(store)) == 1
    files(store)[0].write_bytes(b"junk")
    assert [read(store, key) for key in keys] == [None] * 3


def test_deleting_what_cannot_be_read_errs_towards_deleting(three):
    store, handles, _ = three
    files(store)[0].write_bytes(b"junk")
    store.remove(handles[0])
    assert files(store) == []


class KilledError(BaseException):
    """Stands for a process that ends here."""


@pytest.mark.parametrize("act", ["write", "make room", "remove", "forget"])
def test_a_killed_process_leaves_whole_entries_and_all_texts(tmp_path, act):
    """Each step is atomic: what stands in between is all that a kill can leave."""
    step, killed = 0, True
    while killed:
        free = PackStore(tmp_path / str(step))
        handles = [free.put(make_pack(text)) for text in ("one", "two")]
        keys = [key_of(handles[0], at=0), key_of(*handles, at=1), key_of(handles[1], at=2)]
        for seed, key in enumerate(keys[:2]):
            free.write(key, kv_of(seed))
        blobs = Watched(free.path)
        store = PackStore(blobs, max_bytes=free.nbytes + 10 if act == "make room" else 2**30)
        blobs.done.clear()

        def kill(number, step=step):
            if number == step:
                raise KilledError

        blobs.before = kill
        try:
            if act == "remove":
                store.remove(handles[0])
            elif act == "forget":
                store.forget("geo")
            else:
                store.write(keys[2], kv_of(2))
            killed = False
        except KilledError:
            pass
        blobs.before = lambda _: None
        after = PackStore(tmp_path / str(step))
        for seed, key in enumerate(keys):
            found = read(after, key)
            assert found is None or found.equal(kv_of(seed))
        assert after.get(handles[1]).text == "two"
        assert (handles[0] in after) or all(str(handles[0]) not in entry.owners for entry, _ in after.kept())
        assert list(after.verify()) == []
        step += 1
    assert step > 3


def test_a_pack_removed_while_an_entry_is_written_takes_it_along(tmp_path):
    step, steps = 0, 99
    while step < steps:
        free = PackStore(tmp_path / str(step))
        handle = free.put(make_pack("one"))
        blobs = Watched(free.path)
        store = PackStore(blobs)
        blobs.done.clear()

        def act(number, step=step, blobs=blobs, free=free, handle=handle):
            if number == step:
                blobs.before = lambda _: None
                free.remove(handle)

        blobs.before = act
        store.write(key_of(handle), kv_of())
        if len(blobs.done) <= step:
            break
        assert handle not in free
        assert files(free) == []
        step += 1
    assert step > 2
