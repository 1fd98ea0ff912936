"""Several writers and readers at once: threads, processes, and every way in which two calls can interleave."""

import multiprocessing
import sys
import time
import warnings
from contextlib import suppress

import pytest

from kp_core.errors import PackCorruptWarning, PackNotFoundError
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.store import PackStore
from tests.core.packs.made import Watched, files_of, flip, make_pack, same

# Packs of one text differ in seed; the seed stands in the provenance, so torn reads would show.


def seeded(text: str, seed: int) -> KnowledgePack:
    return make_pack(text, seed=seed, tokens=400, provenance={"seed": str(seed)})


def write_packs(path: str, rounds: range, max_bytes: int | None) -> None:
    store = PackStore(path, max_bytes=max_bytes)
    for seed in rounds:
        for text in ("one", "two"):
            store.put(seeded(text, seed))


def read_packs(path: str, rounds: int) -> None:
    warnings.simplefilter("error")
    store, seen = PackStore(path), 0
    # Reading again would hide a torn file.
    store._salvage = lambda handle, _: sys.exit(f"{handle} was torn")
    deadline = time.monotonic() + 120
    while seen < rounds and time.monotonic() < deadline:
        for text in ("one", "two"):
            handle = store.handle(text, "geo")
            if files_of(store, handle)[0].exists():
                store.peek(handle)
                pack = store.get(handle)
                expected = seeded(text, int(pack.provenance["seed"]))
                if not same(pack, expected.without_kv() if pack.is_lazy else expected):
                    sys.exit("half a pack was read")
                seen += 1
    sys.exit(0 if seen >= rounds else "the writers wrote nothing")


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [None, 40_000])
def test_processes_share_a_store(tmp_path, max_bytes):
    """Two writers and two readers, on a store that does not exist yet; with a quota, KV also goes while it is read."""
    context = multiprocessing.get_context("spawn")
    jobs = [(write_packs, (str(tmp_path / "s"), range(start, start + 15), max_bytes)) for start in (0, 100)]
    jobs += [(read_packs, (str(tmp_path / "s"), 40))] * 2
    processes = [context.Process(target=target, args=args) for target, args in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    store = PackStore(tmp_path / "s")
    assert len(store) == 2
    assert not list((store.path / "staging").iterdir())
    assert not (store.path / "quarantine").exists()


# Two calls, the second made whole between two steps of the first, at each step in turn.


def interleaved(folder, prepare, first, second, **bound):
    """A store after `first` with `second` at each of its steps; `prepare` fills it before."""
    steps, step = 99, 0
    while step <= steps:
        blobs = Watched(folder / str(step))
        other = PackStore(folder / str(step))
        prepare(other)
        store = PackStore(blobs, **bound)

        def act(number, step=step, other=other, blobs=blobs):
            if number == step:
                blobs.before = lambda _: None
                second(other)

        blobs.done.clear()
        blobs.before = act
        first(store)
        if len(blobs.done) <= step:
            steps = step - 1
        else:
            yield store
        step += 1
    assert steps > 2


@pytest.fixture
def strict():
    with warnings.catch_warnings(action="error", category=PackCorruptWarning):
        yield


ONE, OTHER = make_pack("one", tokens=50), make_pack("other", tokens=50)
LAZY = ONE.without_kv()


@pytest.mark.usefixtures("strict")
def test_kv_stays_when_a_lazy_pack_comes_beside_it(tmp_path):
    for store in interleaved(tmp_path, lambda _: None, lambda s: s.put(LAZY), lambda s: s.put(ONE)):
        assert same(store.get(store.put(LAZY)), ONE)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("look", ["get", "peek"])
def test_who_reads_what_is_being_put_sees_it_whole_or_not_at_all(tmp_path, look):
    seen = []

    def read(store):
        try:
            found = getattr(store, look)(store.handle("one", "geo"))
        except PackNotFoundError:
            found = None
        seen.append(found)
        assert found is None or same(found, ONE if look == "get" else LAZY)

    for store in interleaved(tmp_path, lambda _: None, lambda s: s.put(ONE), read):
        assert same(store.get(store.handle("one", "geo")), ONE)
    assert None in seen
    assert any(seen)


@pytest.mark.usefixtures("strict")
def test_what_is_removed_stays_removed_while_room_is_made(tmp_path):
    free = PackStore(tmp_path / "free")
    free.put(ONE)
    bound = free.nbytes * 3 // 2

    def remove(store):
        store.remove(store.handle("one", "geo"))

    for store in interleaved(tmp_path, lambda s: s.put(ONE), lambda s: s.put(OTHER), remove, max_bytes=bound):
        assert list(store) == [store.handle("other", "geo")]
        assert same(store.get(store.handle("other", "geo")), OTHER)


@pytest.mark.usefixtures("strict")
def test_a_pack_removed_while_it_is_put_is_there_or_gone(tmp_path):
    def remove(store):
        with suppress(PackNotFoundError):
            store.remove(store.handle("one", "geo"))

    for store in interleaved(tmp_path, lambda _: None, lambda s: s.put(ONE), remove):
        assert list(store) == [] or same(store.get(store.handle("one", "geo")), ONE)


@pytest.mark.filterwarnings("ignore::kp_core.errors.PackCorruptWarning")
def test_what_is_put_while_its_damage_is_repaired_is_not_lost(tmp_path):
    def damage(store):
        flip(files_of(store, store.put(ONE))[0], -1)

    lost, again = 0, make_pack("one", seed=1, tokens=50)
    for store in interleaved(tmp_path, damage, lambda s: s.get(s.handle("one", "geo")), lambda s: s.put(again)):
        found = store.get(store.handle("one", "geo"))
        assert found.token_ids == ONE.token_ids
        lost += found.is_lazy
    assert lost <= 1  # Between the last look and the write; KV is computed anew.


def test_a_pack_that_is_removed_stays_removed_when_kv_of_it_is_put_again(tmp_path):
    """KV computed in the background: its pack is removed before, at, or after each step of the write."""
    step, steps = 0, 99
    while step <= steps:
        blobs = Watched(tmp_path / str(step))
        store, other = PackStore(blobs), PackStore(tmp_path / str(step))
        handle = store.put(make_pack().without_kv())
        begun = len(blobs.done)

        def before(number, at=begun + step, other=other, handle=handle):
            if number == at:
                other.remove(handle)

        blobs.before = before
        stored = store.put_again(make_pack())
        steps = len(blobs.done) - begun
        assert handle not in PackStore(store.path) or (step >= steps and stored)
        step += 1
    assert steps > 3
