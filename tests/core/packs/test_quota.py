"""The bound on a store, and the order in which packs lose their KV."""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest

from kp_core.errors import PackError
from kp_core.packs.entry import Entry
from kp_core.packs.store import PackStore
from tests.core.packs.made import FINGERPRINT, Watched, entry_of, files_of, make_pack, same, snapshot


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_least_recently_used_kv_goes_first(tmp_path, victim):
    packs = [make_pack(f"text {index}", tokens=50, seed=index) for index in range(4)]
    free = PackStore(tmp_path / "free")
    sizes = [
        (free.path / entry_of(pack, handle).key).stat().st_size + files_of(free, handle)[1].stat().st_size
        for pack in packs
        for handle in [free.put(pack)]
    ]
    store = PackStore(tmp_path / "bound", max_bytes=sum(sizes[:3]) + sizes[3] // 2)  # Room for one more without its KV.
    handles = [store.put(pack) for pack in packs[:3]]
    for used in {0, 1, 2} - {victim}:
        store.get(handles[used])
    handles.append(store.put(packs[3]))
    assert [store.get(handle).is_lazy for handle in handles] == [index == victim for index in range(4)]
    assert same(store.get(handles[victim]), packs[victim].without_kv())
    assert store.nbytes <= store.quota.max_bytes
    assert PackStore(store.path).peek(handles[victim]).token_ids == packs[victim].token_ids


def test_a_put_that_cannot_fit_changes_nothing(tmp_path):
    store = PackStore(tmp_path, max_bytes=9_000)
    store.put(make_pack("a", tokens=20))
    before = snapshot(store)
    with pytest.raises(PackError, match=r"max_bytes is 9000.*without_kv"):
        store.put(make_pack("b", tokens=1_000))
    assert snapshot(store) == before
    store.put(make_pack("b", tokens=500, kv=None))
    lazy = [make_pack(f"lazy {index}", kv=None) for index in range(20)]
    with pytest.raises(PackError):
        list(map(store.put, lazy))
    assert store.nbytes <= 9_000
    assert all(store.get(handle).text for handle in store)


@pytest.mark.parametrize("name", ["max_bytes", "keep_seconds", "tombstone_days"])
@pytest.mark.parametrize("value", [-1, math.nan, "1GB", b"1"])
def test_a_bound_is_a_positive_number(tmp_path, name, value):
    with pytest.raises(PackError, match=f"{name}={value!r}"):
        PackStore(tmp_path, **{name: value})


@pytest.mark.parametrize("given", [{"place": None}, {"place": 5}, {"place": b"x"}, {"secret": 5}, {"secret": " "}])
def test_what_is_no_place_and_no_secret_is_refused(tmp_path, given):
    with pytest.raises(PackError, match="as the "):
        PackStore(**{"place": tmp_path} | given)


# Last use.


def filled(path, **bound) -> tuple[PackStore, list]:
    store = PackStore(path, **bound)
    return store, [store.put(make_pack(f"text {index}", tokens=50)) for index in range(3)]


def dropped(path, handles) -> list[bool]:
    """Which of the packs lose their KV for one more."""
    PackStore(path, max_bytes=PackStore(path).nbytes + 600).put(make_pack("new", tokens=20))
    return [PackStore(path).peek(handle).stored_bytes == 0 for handle in handles]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_order_of_use_outlives_the_process_and_needs_no_access_times(tmp_path, victim):
    store, handles = filled(tmp_path)
    for index in {0, 1, 2} - {victim}:
        store.get(handles[index])
    for file in (tmp_path / "packs").rglob("*.safetensors"):  # As a mount without access times has them, or a copy.
        os.utime(file, ns=(0, file.stat().st_mtime_ns))
    del store
    gc.collect()
    assert dropped(tmp_path, handles) == [index == victim for index in range(3)]


def test_reading_writes_nothing(tmp_path):
    blobs = Watched(tmp_path)
    store, handles = filled(blobs)
    blobs.done.clear()
    for handle in handles * 30:
        store.get(handle)
    assert "write" not in blobs.done


def test_two_processes_tell_each_other(tmp_path):
    (one, handles), other = filled(tmp_path), PackStore(tmp_path)
    one.get(handles[0])
    other.get(handles[1])
    del one, other
    PackStore(tmp_path)
    assert {*PackStore(tmp_path).last_used()} == {str(handle) for handle in handles}
    assert dropped(tmp_path, handles) == [False, False, True]


@pytest.mark.parametrize("junk", [b"", b"[]", b'{"kp:geo/a": "now", "b": true}', b'{"a": 1e400}', b"\xff"])
def test_a_damaged_note_of_last_use_stops_nobody(tmp_path, junk):
    _, handles = filled(tmp_path)
    gc.collect()
    (tmp_path / "used").write_bytes(junk)
    assert dropped(tmp_path, handles).count(True) == 1
    store = PackStore(tmp_path)
    store.get(handles[0])
    del store
    PackStore(tmp_path)
    assert handles[0].id in (tmp_path / "used").read_text()


def test_the_end_of_a_process_writes_when_packs_were_used(tmp_path):
    _, handles = filled(tmp_path)
    (tmp_path / "used").unlink(missing_ok=True)
    use = "import sys; from kp_core import PackStore; from kp_core.packs.handle import Handle; "
    use += "store = PackStore(sys.argv[1]); store.get(Handle.parse(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", use, tmp_path, str(handles[1])], check=True)  # noqa: S603
    [key] = json.loads((tmp_path / "used").read_bytes())
    assert handles[1].id in key


def test_a_store_ends_when_it_is_dropped(tmp_path):
    store, _ = filled(tmp_path)
    gone = weakref.ref(store)
    del store
    assert gone() is None


def test_the_garbage_collector_waits_for_no_blobs(tmp_path):
    """It runs in any thread, also in that of fsspec or of a proxy, which would then wait for itself."""
    _, handles = filled(tmp_path)
    blobs = Watched(tmp_path)
    store = PackStore(blobs)
    store.get(handles[0])
    cycle = [store]
    cycle.append(cycle)
    blobs.done.clear()
    del store, cycle
    gc.collect()
    assert blobs.done == []
    PackStore(tmp_path)
    assert handles[0].id in (tmp_path / "used").read_text()


def test_a_store_that_was_deleted_is_not_made_again(tmp_path):
    store, _ = filled(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    del store
    PackStore(tmp_path / "other")
    assert not (tmp_path / "store").exists()


def test_entries_of_packs_and_entries_behind_them_share_one_bound(tmp_path):
    free = PackStore(tmp_path)
    handles = [free.put(make_pack(f"text {number}", tokens=50)) for number in range(2)]
    entry = Entry(FINGERPRINT, 3, "0" * 32, tuple(range(50)), frozenset(map(str, handles)))
    assert free.write(entry, make_pack(tokens=50).kv)
    store = PackStore(tmp_path, max_bytes=free.nbytes + 100)
    for handle in handles:
        store.get(handle)
    store.put(make_pack("new", tokens=20))
    assert store.read(entry, {"geo"}) is None, "it was used longest ago"
    assert all(not store.get(handle).is_lazy for handle in handles)
    assert store.nbytes <= store.quota.max_bytes
    assert store.write(entry, make_pack(tokens=50).kv)
    assert store.nbytes <= store.quota.max_bytes
    assert [store.get(handle).text for handle in handles] == ["text 0", "text 1"]
    assert not store.write(replace(entry, token_ids=tuple(range(5000))), make_pack(tokens=5000).kv)
