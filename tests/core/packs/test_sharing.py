"""Several writers and readers at once: threads, processes, and every way in which two calls can interleave."""

import itertools
import multiprocessing
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kp_core.errors import PackNotFoundError
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.files import text_key
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.store import PackStore
from tests.core.packs.made import Watched, files_of, make_pack, same

# Packs of one text differ in seed, so torn reads would show.


def seeded(text: str, seed: int) -> KnowledgePack:
    return make_pack(text, seed=seed, tokens=400, provenance={"seed": str(seed)})


def write_packs(path: str, rounds: range, max_bytes: int | None) -> None:
    store = PackStore(path, max_bytes=max_bytes)
    for seed in rounds:
        for text in ("one", "two"):
            store.put(seeded(text, seed))


def read_packs(path: str, rounds: int) -> None:
    store, seen = PackStore(path), 0
    store.discard = lambda entry, damage: sys.exit(f"{entry.owners} was torn: {damage}")
    deadline = time.monotonic() + 120
    while seen < rounds and time.monotonic() < deadline:
        for text in ("one", "two"):
            handle = store.handle(text, "geo")
            if files_of(store, handle)[0].exists():
                store.peek(handle)
                pack = store.get(handle)
                # Text and KV are two files, each of which is whole.
                seeds = [
                    int(pack.provenance["seed"]),
                    *(each for start in (0, 100) for each in range(start, start + 15)),
                ]
                if pack.kv and not any(pack.kv.equal(seeded(text, seed).kv) for seed in seeds):
                    sys.exit("half an entry was read")
                seen += 1
    sys.exit(0 if seen >= rounds else "the writers wrote nothing")


def test_a_copy_that_is_made_meanwhile_is_a_store_with_the_same_handles(tmp_path):
    store = PackStore(tmp_path / "s")
    handle, writing, copied = store.put(seeded("one", 0)), threading.Event(), threading.Event()

    def write() -> None:
        for seed in itertools.count():
            store.put(seeded("two", seed))
            writing.set()
            if copied.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    writing.wait(30)
    for number in range(5):
        with suppress(shutil.Error):  # A temporary file had gone.
            shutil.copytree(tmp_path / "s", tmp_path / f"{number}")
    copied.set()
    writer.join()
    for number in range(5):
        copy = PackStore(tmp_path / f"{number}")
        assert not [*copy.verify()]
        assert same(copy.get(handle), store.get(handle))
        assert copy.handle("two", "geo") in copy


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


# Two calls, the second made whole between two steps of the first, at each step in turn.


def test_threads_that_put_two_texts_do_not_wait_for_one_another(tmp_path):
    together = threading.Barrier(2)

    class Slow(FolderBlobs):
        def write(self, key, *args, **options):
            if key.endswith(".safetensors"):
                together.wait(60)  # Breaks unless both writes are under way.
            return super().write(key, *args, **options)

    store = PackStore(Slow(tmp_path))
    packs = [make_pack(f"text {number}", seed=number) for number in range(64)]
    lock_of = {id(store._turn(text_key(store.handle(pack.text, "geo")))): pack for pack in packs}
    with ThreadPoolExecutor() as pool:
        list(pool.map(store.put, [*lock_of.values()][:2]))
    assert len(store) == 2


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
    assert steps > 1


ONE, OTHER = make_pack("one", tokens=50), make_pack("other", tokens=50)
LAZY = ONE.without_kv()


def test_kv_stays_when_a_lazy_pack_comes_beside_it(tmp_path):
    for store in interleaved(tmp_path, lambda _: None, lambda s: s.put(LAZY), lambda s: s.put(ONE)):
        assert same(store.get(store.put(LAZY)), ONE)


@pytest.mark.parametrize("look", ["get", "peek"])
def test_who_reads_what_is_being_put_sees_it_whole_or_not_at_all(tmp_path, look):
    seen = []

    def read(store):
        try:
            found = getattr(store, look)(store.handle("one", "geo"))
        except PackNotFoundError:
            found = None
        seen.append(found)
        assert found is None or same(found, LAZY) or (look == "get" and same(found, ONE))

    for store in interleaved(tmp_path, lambda _: None, lambda s: s.put(ONE), read):
        assert same(store.get(store.handle("one", "geo")), ONE)
    assert None in seen
    assert any(seen)


def test_what_is_removed_stays_removed_while_room_is_made(tmp_path):
    free = PackStore(tmp_path / "free")
    free.put(ONE)
    bound = free.nbytes * 3 // 2

    def remove(store):
        store.remove(store.handle("one", "geo"))

    for store in interleaved(tmp_path, lambda s: s.put(ONE), lambda s: s.put(OTHER), remove, max_bytes=bound):
        assert list(store) == [store.handle("other", "geo")]
        assert same(store.get(store.handle("other", "geo")), OTHER)


def test_a_pack_removed_while_it_is_put_is_there_or_gone(tmp_path):
    def remove(store):
        with suppress(PackNotFoundError):
            store.remove(store.handle("one", "geo"))

    for store in interleaved(tmp_path, lambda _: None, lambda s: s.put(ONE), remove):
        assert list(store) == [] or same(store.get(store.handle("one", "geo")), ONE)


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
