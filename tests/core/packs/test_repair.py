"""What a damaged pack becomes, and what a failed or crashed writer leaves."""

import json
import logging
import os
import time
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kp_core.errors import PackCorruptError, PackCorruptWarning, PackError
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackStore
from tests.core.packs.made import UNKNOWN, Watched, files_of, flip, make_pack, rebuild, same, snapshot


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


def test_a_later_version_is_left_alone(store):
    handle = store.put(make_pack())
    path, _ = files_of(store, handle)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    content = entries.pop("__metadata__")["pack"]
    path.write_bytes(rebuild(content, version="6", entries=entries, data=data[start:]))
    before = snapshot(store)
    for call in (store.get, store.peek, lambda _: store.put(make_pack())):
        with pytest.raises(PackError, match="Upgrade"):
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
    store.put(make_pack())
    assert not old.exists()
    assert new.exists()


def test_a_failed_write_leaves_the_old_pack(store, monkeypatch):
    handle = store.put(make_pack())
    before = snapshot(store)

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kp_core.packs.blobs.os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            store.put(make_pack(seed=1))
    assert snapshot(store) == before
    assert same(store.get(handle), make_pack())


class KilledError(BaseException):
    """Stands for a process that ends here."""


NEW = make_pack("new", tokens=20)
ACTS = {
    "put new": lambda store: store.put(NEW),
    "put over": lambda store: store.put(make_pack("one", seed=1, tokens=50)),
    "make room": lambda store: store.put(NEW),
    "repair": lambda store: store.get(store.handle("one", "geo")),
    "remove": lambda store: store.remove(store.handle("one", "geo")),
}


def killed(folder, act: str, step: int) -> bool:
    """Do `act` on a store of two packs, whose process is killed before its step of this number; whether it was."""
    store = PackStore(folder)
    one = store.put(make_pack("one", tokens=50))
    store.put(make_pack("two", tokens=50))
    if act == "repair":
        flip(files_of(store, one)[0], -1)
    blobs = Watched(folder)
    victim = PackStore(blobs, max_bytes=store.nbytes + 1_000 if act == "make room" else None)
    blobs.done.clear()

    def kill(number: int) -> None:
        if number == step:
            raise KilledError

    blobs.before = kill
    try:
        ACTS[act](victim)
    except KilledError:
        return True
    finally:
        blobs.before = lambda _: None
    return False


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.filterwarnings("ignore::kp_core.errors.PackCorruptWarning")
def test_a_writer_killed_between_any_two_steps_loses_nothing_acknowledged(tmp_path, act):
    """Each step of a writer is atomic (a rename, a removal): what stands in between is all that a kill can leave."""
    step = 0
    while killed(folder := tmp_path / str(step), act, step):
        store = PackStore(folder)
        assert store.get(store.handle("two", "geo")).text == "two"
        assert act == "remove" or store.get(store.handle("one", "geo")).text == "one"
        with warnings.catch_warnings(action="error"):
            lazy = [store.get(handle).is_lazy for handle in store]
            assert lazy.count(True) <= (act in {"make room", "repair"})
            packs = [make_pack("one", tokens=50), make_pack("two", tokens=50), NEW]
            assert all(same(store.get(store.put(pack)), pack) for pack in packs)
            assert list(store.verify()) == []
        step += 1
    assert step > 3


def test_a_pack_that_is_put_while_somebody_looks_for_it_is_not_taken_for_damaged(tmp_path):
    pack = make_pack()
    handle = PackStore(tmp_path).put(pack)
    PackStore(tmp_path).remove(handle)

    class PutMeanwhile(FolderBlobs):
        missing = 0

        def read(self, key):
            try:
                return super().read(key)
            except FileNotFoundError:
                self.missing += 1
                if self.missing == 2:  # The file of its KV was not there, nor that of its text.
                    PackStore(tmp_path).put(pack)
                raise

    blobs = PutMeanwhile(tmp_path)
    store = PackStore(blobs)
    blobs.missing = 0
    assert same(store._read(handle), pack)
    assert same(PackStore(tmp_path).get(handle), pack)
    assert not [*(tmp_path / "quarantine").glob("*")]
