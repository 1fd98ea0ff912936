"""The store as its users see it: put and get, quota, repair, several processes at once."""

import logging
import multiprocessing
import os
import stat
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kp_core.errors import (
    HandleError,
    PackCorruptError,
    PackError,
    PackNotFoundError,
    PackVersionError,
    QuotaError,
)
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackCorruptWarning, PackStore

FINGERPRINT = ModelFingerprint(**{field.name: field.name for field in fields(ModelFingerprint)})
UNKNOWN = ModelFingerprint.unknown()


def make_pack(
    text: str = "Paris.", namespace: str = "geo", *, seed: int = 0, tokens: int = 3, **changes
) -> KnowledgePack:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, tokens, 4, generator=generator).bfloat16() for _ in range(4)]
    kv = KVTensors(tuple(tensors[:2]), tuple(tensors[2:]))
    pack = KnowledgePack(text, namespace, tuple(range(tokens)), Prefix((9, 8), (2,)), FINGERPRINT, kv, {"title": text})
    return replace(pack, **changes)


def same(one: KnowledgePack, other: KnowledgePack) -> bool:
    if (one.kv is None) != (other.kv is None) or (one.kv and other.kv and not one.kv.equal(other.kv)):
        return False
    names = [field.name for field in fields(KnowledgePack) if field.name != "kv"]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def files_of(store: PackStore, handle: Handle):
    folder = store.path / "packs" / handle.namespace / handle.id[:2]
    return folder / f"{handle.id}.safetensors", folder / f"{handle.id}.txt"


def snapshot(store: PackStore) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in store.path.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.fixture
def store(tmp_path) -> PackStore:
    return PackStore(tmp_path / "deep" / "store")


def test_put_get_peek(store):
    pack = make_pack()
    handle = store.put(pack)
    assert handle == store.handle(pack.text, pack.namespace)
    assert same(store.get(handle), pack)
    assert same(store.peek(handle), pack.without_kv())
    assert same(PackStore(store.path).get(handle), pack)


def test_absent(store):
    handle = store.handle("nothing", "geo")
    assert store.peek(handle) is None
    assert handle not in store
    for call in (store.get, store.remove):
        with pytest.raises(PackNotFoundError, match=str(handle)):
            call(handle)


def test_collection(store):
    handles = sorted(store.put(make_pack(text, space)) for space in ("geo", "art") for text in ("a", "b", "c"))
    assert list(store) == list(store.handles()) == handles
    assert list(store.handles("art")) == handles[:3]
    assert list(store.handles("none")) == []
    assert len(store) == 6
    assert handles[0] in store
    assert str(handles[0]) not in store
    assert store.nbytes == sum(path.stat().st_size for handle in handles for path in files_of(store, handle))
    (store.path / "packs" / "geo" / "notes.md").write_text("not ours")
    (store.path / "packs" / "geo" / "aa").mkdir(exist_ok=True)
    (store.path / "packs" / "geo" / "aa" / "README.txt").write_text("not ours")
    assert list(store) == handles
    store.remove(handles[0])
    assert list(store) == handles[1:]
    assert store.peek(handles[0]) is None


def test_remove_forgets_quarantined_copies_too(store):
    handle = store.put(make_pack("the secret recipe"))
    files_of(store, handle)[0].write_bytes(b"the secret recipe")
    with pytest.warns(PackCorruptWarning):
        store.get(handle)
    store.remove(handle)
    assert not any(b"recipe" in data for data in snapshot(store).values())


def test_view_resolves_only_what_it_may(store):
    handle = store.put(make_pack("Paris."))
    view = store.view("geo", trusted_roles={"tool"})
    assert view.split(f"See {handle}!", "tool")[1].pack.text == "Paris."
    assert view.split(f"See {handle}!", "user") == (f"See {handle}!",)
    assert store.view("art").split(f"See {handle}!", "tool") == (f"See {handle}!",)


def test_text_lies_beside_the_pack_byte_for_byte(store):
    text = "one\r\ntwo\n\x00“three”\ufeff"
    pack, beside = files_of(store, store.put(make_pack(text)))
    assert beside.read_bytes() == text.encode()
    assert stat.S_IMODE(pack.stat().st_mode) == stat.S_IMODE(beside.stat().st_mode) == 0o600


def test_text_that_is_not_unicode(store):
    with pytest.raises(HandleError, match="not Unicode"):
        store.put(make_pack("\ud800"))
    assert len(store) == 0


def test_what_the_format_refuses_leaves_nothing(store):
    before = snapshot(store)
    with pytest.raises(PackError):
        store.put(make_pack(provenance={"title": 3}))
    assert snapshot(store) == before


def test_secret(tmp_path, store):
    secret = store.path / "secret"
    assert len(secret.read_bytes()) == 32
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert PackStore(tmp_path / "other").handle("a", "geo") != store.handle("a", "geo")
    assert PackStore(store.path).handle("a", "geo") == store.handle("a", "geo")
    secret.write_bytes(b"short")
    with pytest.raises(PackError, match="5 bytes; expected 32"):
        PackStore(store.path)


def test_threads_opening_a_new_store_agree_on_its_secret(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        handles = set(pool.map(lambda _: PackStore(tmp_path / "new").handle("a", "geo"), range(16)))
    assert len(handles) == 1


# What displaces what.


def written(store: PackStore, handle: Handle) -> tuple[int, int]:
    status = files_of(store, handle)[0].stat()
    return status.st_ino, status.st_mtime_ns


def test_putting_again_writes_nothing(store):
    handle = store.put(make_pack())
    before = written(store, handle)
    assert store.put(make_pack()) == handle
    assert written(store, handle) == before
    files_of(store, handle)[1].unlink()
    store.put(make_pack())
    assert files_of(store, handle)[1].read_text() == "Paris."


@pytest.mark.parametrize(
    ("stored", "new", "wins"),
    [
        (make_pack(), make_pack(kv=None), "stored"),
        (make_pack(), make_pack(kv=None, prefix=Prefix((1,), (1,))), "new"),
        (make_pack(), make_pack(kv=None, fingerprint=replace(FINGERPRINT, weights="b")), "new"),
        (make_pack(), make_pack(kv=None, token_ids=(), prefix=Prefix(), fingerprint=UNKNOWN), "stored"),
        (make_pack(kv=None), make_pack(kv=None, token_ids=(), prefix=Prefix(), fingerprint=UNKNOWN), "stored"),
        (make_pack(kv=None), make_pack(), "new"),
        (make_pack(kv=None), make_pack(kv=None, provenance={"title": "new"}), "new"),
        (make_pack(), make_pack(seed=1), "new"),
        (make_pack(), make_pack(fingerprint=replace(FINGERPRINT, weights="b")), "new"),
        (make_pack(kv=None, token_ids=(), prefix=Prefix(), fingerprint=UNKNOWN), make_pack(kv=None), "new"),
    ],
)
def test_what_displaces_what(store, stored, new, wins):
    handle = store.put(stored)
    store.peek(handle)
    assert store.put(new) == handle
    expected = stored if wins == "stored" else new
    assert same(store.get(handle), expected)
    assert same(store.peek(handle), expected.without_kv())


def test_peek_reads_a_file_once_and_sees_every_change(store, monkeypatch):
    handle = store.put(make_pack())
    reads = []
    original = store._read
    monkeypatch.setattr(store, "_read", lambda *args, **kwargs: reads.append(1) or original(*args, **kwargs))
    assert store.peek(handle) is store.peek(handle)
    assert len(reads) == 1
    PackStore(store.path).put(make_pack(seed=1, prefix=Prefix((7, 7), (2,))))  # Another process; the size is the same.
    assert store.peek(handle).prefix == Prefix((7, 7), (2,))
    assert len(reads) == 2


# Quota.


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_least_recently_used_kv_goes_first(tmp_path, victim):
    packs = [make_pack(f"text {index}", tokens=50, seed=index) for index in range(4)]
    free = PackStore(tmp_path / "free")
    sizes = [sum(path.stat().st_size for path in files_of(free, free.put(pack))) for pack in packs]
    store = PackStore(tmp_path / "bound", max_bytes=sum(sizes[:3]) + sizes[3] // 2)  # Room for one more without its KV.
    handles = [store.put(pack) for pack in packs[:3]]
    for used in {0, 1, 2} - {victim}:
        store.get(handles[used])
    handles.append(store.put(packs[3]))
    assert [store.get(handle).is_lazy for handle in handles] == [index == victim for index in range(4)]
    assert same(store.get(handles[victim]), packs[victim].without_kv())
    assert store.nbytes <= store.max_bytes
    assert PackStore(store.path).peek(handles[victim]).token_ids == packs[victim].token_ids


def test_a_put_that_cannot_fit_changes_nothing(tmp_path):
    store = PackStore(tmp_path, max_bytes=9_000)
    store.put(make_pack("a", tokens=20))
    before = snapshot(store)
    with pytest.raises(QuotaError, match=r"max_bytes is 9000.*without_kv"):
        store.put(make_pack("b", tokens=1_000))
    assert snapshot(store) == before
    store.put(make_pack("b", tokens=500, kv=None))
    lazy = [make_pack(f"lazy {index}", kv=None) for index in range(20)]
    with pytest.raises(QuotaError):
        list(map(store.put, lazy))
    assert store.nbytes <= 9_000
    assert all(store.get(handle).text for handle in store)


def test_a_bound_must_be_positive(tmp_path):
    with pytest.raises(QuotaError, match="max_bytes=0"):
        PackStore(tmp_path, max_bytes=0)


# Repair.


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damaged_tensors_leave_ids_and_text(store, caplog):
    pack = make_pack()
    handle = store.put(pack)
    path, _ = files_of(store, handle)
    flip(path, -1)
    damaged = path.read_bytes()
    with caplog.at_level(logging.WARNING), pytest.warns(PackCorruptWarning, match=r"layers\.1\.value"):
        assert same(store.get(handle), pack.without_kv())
    assert str(handle) in caplog.text
    (aside,) = (store.path / "quarantine").iterdir()
    assert aside.read_bytes() == damaged
    with warnings.catch_warnings(action="error"):
        assert same(store.get(handle), pack.without_kv())
        assert same(PackStore(store.path).get(handle), pack.without_kv())
        store.put(pack)
        assert same(store.get(handle), pack)


def test_a_damaged_head_leaves_the_text(store):
    handle = store.put(make_pack())
    path, _ = files_of(store, handle)
    for count in (1, 2):
        path.write_bytes(b"junk" * 10)
        with pytest.warns(PackCorruptWarning):
            found = store.peek(handle) if count == 1 else store.get(handle)
        assert same(found, KnowledgePack("Paris.", "geo", (), Prefix(), UNKNOWN))
        assert len(list((store.path / "quarantine").iterdir())) == count


def test_a_lost_pack_file_leaves_the_text(store):
    handle = store.put(make_pack())
    files_of(store, handle)[0].unlink()
    assert handle in store
    with pytest.warns(PackCorruptWarning, match="missing"):
        assert store.peek(handle).text == "Paris."
    assert store.get(handle).fingerprint == UNKNOWN


def test_without_text_a_damaged_pack_is_an_error_once(store):
    handle = store.put(make_pack())
    path, beside = files_of(store, handle)
    path.write_bytes(b"junk")
    beside.write_text("another text")
    with pytest.raises(PackCorruptError, match="quarantine"):
        store.get(handle)
    assert {aside.read_bytes() for aside in (store.path / "quarantine").iterdir()} == {b"junk", b"another text"}
    assert handle not in store
    assert store.peek(handle) is None
    assert same(store.get(store.put(make_pack())), make_pack())


def test_a_file_under_the_name_of_another_is_not_believed(store):
    one, other = store.put(make_pack("one")), store.put(make_pack("other"))
    files_of(store, one)[0].write_bytes(files_of(store, other)[0].read_bytes())
    with pytest.warns(PackCorruptWarning, match="another text"):
        assert store.get(one).text == "one"
    assert store.get(other).text == "other"


def test_a_damaged_text_file_is_mended_from_the_pack(store):
    pack = make_pack()
    handle = store.put(pack)
    path, beside = files_of(store, handle)
    beside.write_text("wrong")
    flip(path, -1)
    with pytest.warns(PackCorruptWarning):
        assert same(store.get(handle), pack.without_kv())
    assert beside.read_text() == "Paris."


def test_a_warning_made_an_error_does_not_stop_the_repair(store):
    handle = store.put(make_pack())
    flip(files_of(store, handle)[0], -1)
    with warnings.catch_warnings(action="error"):
        with pytest.raises(PackCorruptWarning):
            store.get(handle)
        assert same(store.get(handle), make_pack(kv=None))


def test_a_later_version_is_left_alone(store, monkeypatch):
    handle = store.handle("Paris.", "geo")
    with monkeypatch.context() as patch:
        patch.setattr("kp_core.packs.file.VERSION", "2")
        store.put(make_pack())
    before = snapshot(store)
    for call in (store.get, store.peek, lambda _: store.put(make_pack())):
        with pytest.raises(PackVersionError, match="Upgrade"):
            call(handle)
    assert snapshot(store) == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found_or_harmless(store, data):
    """Whatever happens to a file, its pack is the one that was stored, perhaps without KV, perhaps its text alone."""
    pack = make_pack()
    handle = store.put(pack)
    path, _ = files_of(store, handle)
    intact = path.read_bytes()
    at = data.draw(st.integers(0, 15) | st.integers(0, len(intact) - 1))
    cut = data.draw(st.booleans())
    path.write_bytes(intact[:at] if cut else intact[:at] + bytes([intact[at] ^ 0x21]) + intact[at + 1 :])
    text_alone = KnowledgePack(pack.text, pack.namespace, (), Prefix(), UNKNOWN)
    with warnings.catch_warnings(action="ignore", category=PackCorruptWarning):
        peeked, found = store.peek(handle), store.get(handle)
    assert any(same(found, expected) for expected in (pack, pack.without_kv(), text_alone))
    assert peeked.text == pack.text
    assert peeked.token_ids in (pack.token_ids, ())
    assert same(store.get(store.put(pack)), pack)
    store.remove(handle)


def test_leftovers_of_crashed_writers_are_swept(store):
    old, new = store.path / "staging" / "old.tmp", store.path / "staging" / "new.tmp"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    PackStore(store.path)
    assert not old.exists()
    assert new.exists()


def test_a_failed_write_leaves_the_old_pack(store, monkeypatch):
    handle = store.put(make_pack())
    before = snapshot(store)

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kp_core.packs.durable.os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            store.put(make_pack(seed=1))
    assert snapshot(store) == before
    assert same(store.get(handle), make_pack())


# Several processes. Packs of one text differ in seed; the seed stands in the provenance, so torn reads would show.


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
    # Waiting for the writers' lock and reading again would hide a torn file.
    store._recover = lambda handle, **_: sys.exit(f"{handle} was torn")
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
