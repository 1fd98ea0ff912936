"""What a damaged pack becomes, and what a failed or crashed writer leaves."""

import json
import logging
import os
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kp_core.errors import PackCorruptError, PackError
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.store import PackStore
from tests.core.packs.made import UNKNOWN, Watched, files_of, flip, make_pack, rebuild, same, snapshot


@pytest.mark.parametrize("damage", ["tensors", "head", "another", "lost"])
def test_damaged_kv_is_deleted_and_text_and_ids_stay(store, caplog, damage):
    pack = make_pack()
    handle, other = store.put(pack), store.put(make_pack("other"))
    path, _ = files_of(store, handle)
    if damage == "tensors":
        flip(path, -1)
    elif damage == "head":
        path.write_bytes(b"junk" * 10)
    elif damage == "another":
        path.write_bytes(files_of(store, other)[0].read_bytes())
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert same(store.get(handle), pack.without_kv())
    assert caplog.text.count(f"KV of {handle} is damaged, deleted, and computed again") == (damage != "lost")
    assert not path.exists()
    assert same(PackStore(store.path).get(handle), pack.without_kv())
    assert same(store.get(other), make_pack("other"))
    store.put(pack)
    assert same(store.get(handle), pack)


def test_a_damaged_line_before_the_text_leaves_the_text(store, caplog):
    handle = store.put(make_pack("Paris.\nA second line."))
    _, beside = files_of(store, handle)
    beside.write_bytes(beside.read_bytes().replace(b"fingerprint", b"fingerprunt"))
    found = store.get(handle)
    assert same(found, KnowledgePack("Paris.\nA second line.", "geo", (), Prefix(), UNKNOWN))
    assert "Only the text of the pack 'Paris." in caplog.text
    pack = make_pack("Paris.\nA second line.")
    assert same(store.get(handle, pack.key), replace(pack, provenance={}))  # Its KV is found by its key.
    assert store.put(pack) == handle
    assert same(store.get(handle), pack)


def test_putting_a_text_anew_reads_no_kv_that_is_damaged_beside_it(store, caplog):
    pack = make_pack()
    path, beside = files_of(store, store.put(pack))
    flip(path, -1)
    beside.write_bytes(beside.read_bytes().replace(b"fingerprint", b"fingerprunt"))
    assert same(store.get(handle := store.put(pack)), pack.without_kv())
    assert f"KV of {handle} is damaged, deleted, and computed again" in caplog.text
    assert same(store.get(store.put(pack)), pack)


def test_a_damaged_text_is_an_error_until_it_is_put_again(store):
    handle = store.put(make_pack())
    _, beside = files_of(store, handle)
    for junk in (b"another text", b"\xff", b""):
        beside.write_bytes(junk)
        for call in (store.get, store.peek):
            with pytest.raises(PackCorruptError, match="Store it anew from its source"):
                call(handle)
    assert beside.exists()
    assert same(store.get(store.put(make_pack())), make_pack())
    beside.write_bytes(b"another text")
    store.remove(handle)
    assert store.peek(handle) is None


def test_a_later_version_is_left_alone(store, caplog):
    handle = store.put(make_pack())
    path, _ = files_of(store, handle)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    content = entries.pop("__metadata__")["entry"]
    path.write_bytes(rebuild(content, version="7", entries=entries, data=data[start:]))
    before = snapshot(store)
    assert same(store.get(handle), make_pack().without_kv())
    assert "cannot be read, and is computed from its text" in caplog.text
    assert "Upgrade" in caplog.text
    with pytest.raises(PackError, match="Upgrade"):
        store.put(make_pack())
    assert snapshot(store) == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found_or_harmless(store, data):
    """Whatever happens to a file, its pack is the one that was stored, perhaps without KV, perhaps its text alone."""
    pack = make_pack()
    handle = store.put(pack)
    which = data.draw(st.sampled_from((0, 1)))
    path = files_of(store, handle)[which]
    intact = path.read_bytes()
    # Damage to the text itself is not harmless, and is found.
    last = len(intact) - 1 if which == 0 else len(intact) - 2 - len(pack.text)
    at = data.draw(st.integers(0, 15) | st.integers(0, last))
    cut = data.draw(st.booleans()) and which == 0
    path.write_bytes(intact[:at] if cut else intact[:at] + bytes([intact[at] ^ 0x21]) + intact[at + 1 :])
    text_alone = KnowledgePack(pack.text, pack.namespace, (), Prefix(), UNKNOWN)
    found = store.get(handle)
    assert any(same(found, expected) for expected in (pack, pack.without_kv(), text_alone))
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
    "damage": lambda store: store.get(store.handle("one", "geo")),
    "remove": lambda store: store.remove(store.handle("one", "geo")),
}


def killed(folder, act: str, step: int) -> bool:
    """Do `act` on a store of two packs, whose process is killed before its step of this number; whether it was."""
    store = PackStore(folder)
    one = store.put(make_pack("one", tokens=50))
    store.put(make_pack("two", tokens=50))
    if act == "damage":
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
def test_a_writer_killed_between_any_two_steps_loses_nothing_acknowledged(tmp_path, act):
    """Each step of a writer is atomic (a rename, a removal): what stands in between is all that a kill can leave."""
    step = 0
    while killed(folder := tmp_path / str(step), act, step):
        store = PackStore(folder)
        assert store.get(store.handle("two", "geo")).text == "two"
        assert act == "remove" or store.get(store.handle("one", "geo")).text == "one"
        lazy = [store.get(handle).is_lazy for handle in store]
        assert lazy.count(True) <= {"make room": 2, "put over": 0}.get(act, 1)
        texts = {path.stem for path in folder.rglob("*.txt")}
        assert {path.name.partition(".")[0] for path in folder.rglob("*.safetensors")} <= texts
        packs = [make_pack("one", tokens=50), make_pack("two", tokens=50), NEW]
        assert all(same(store.get(store.put(pack)), pack) for pack in packs)
        assert list(store.verify()) == []
        step += 1
    assert step > 3
