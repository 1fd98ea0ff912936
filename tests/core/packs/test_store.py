"""The store as its users see it: put and get, what displaces what, whose folder it is, what is new."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kp_core import Packs, PackView
from kp_core.errors import OptionError, PackError, PackNotFoundError, PromptError
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.packs.store import PackStore
from tests.core.packs.made import FINGERPRINT, UNKNOWN, Watched, entry_of, files_of, flip, make_pack, same, snapshot

OTHER_MODEL = replace(FINGERPRINT, weights="b")


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


def test_view_resolves_only_what_it_may(store):
    handle = store.put(make_pack("Paris."))
    view = store.view("geo", trusted_roles={"tool"})
    assert view.split(f"See {handle}!", "tool")[1].pack.text == "Paris."
    assert view.split(f"See {handle}!", "user") == (f"See {handle}!",)
    assert store.view("art").split(f"See {handle}!", "tool") == (f"See {handle}!",)


def test_the_text_ends_its_file_byte_for_byte(store):
    text = "one\r\ntwo\n\x00“three”\ufeff"
    pack, beside = files_of(store, store.put(make_pack(text)))
    line, _, rest = beside.read_bytes().partition(b"\n")
    assert rest == text.encode()
    assert json.loads(line[33:])["provenance"] == {"title": text}
    assert stat.S_IMODE(pack.stat().st_mode) == stat.S_IMODE(beside.stat().st_mode) == 0o600


def test_text_that_is_not_unicode(store):
    with pytest.raises(PromptError, match="not Unicode"):
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
    assert handle not in store
    store.put(make_pack())
    assert same(store.get(handle), make_pack())


@pytest.mark.parametrize(
    ("stored", "new", "wins"),
    [
        (make_pack(), make_pack(kv=None), "stored"),
        (make_pack(), make_pack(kv=None, prefix=Prefix((1,))), "both"),
        (make_pack(), make_pack(kv=None, fingerprint=OTHER_MODEL), "both"),
        (make_pack(), make_pack(kv=None, token_ids=(), prefix=Prefix(), fingerprint=UNKNOWN), "stored"),
        (make_pack(kv=None), make_pack(kv=None, token_ids=(), prefix=Prefix(), fingerprint=UNKNOWN), "stored"),
        (make_pack(kv=None), make_pack(), "new"),
        (make_pack(kv=None), make_pack(kv=None, provenance={"title": "new"}), "new"),
        (make_pack(), make_pack(seed=1), "new"),
        (make_pack(), make_pack(fingerprint=OTHER_MODEL), "both"),
        (make_pack(fingerprint=OTHER_MODEL), make_pack(kv=None), "both"),
        (make_pack(fingerprint=OTHER_MODEL), make_pack(prefix=Prefix((1,)), seed=1), "both"),
        (make_pack(kv=None, token_ids=(), prefix=Prefix(), fingerprint=UNKNOWN), make_pack(kv=None), "new"),
    ],
)
def test_what_displaces_what(store, stored, new, wins):
    handle = store.put(stored)
    store.peek(handle)
    assert store.put(new) == handle
    expected = new if wins == "new" else stored
    assert same(store.get(handle), expected)
    assert same(store.peek(handle), expected.without_kv())
    assert same(store.get(handle, new.key), stored if wins == "stored" else new)
    both = [stored.key, new.key] if wins == "both" else [expected.key]
    assert [entry.key for entry in store.entries(handle)] == both


def test_options_that_are_gone_are_refused_with_what_to_use(tmp_path):
    with pytest.raises(OptionError, match=r"no option 'keep_bytes'\. It is gone in 0\.3; `max_bytes` bounds all KV"):
        PackStore(tmp_path, keep_bytes=1)
    with pytest.raises(OptionError, match="no option 'size'"):
        PackStore(tmp_path, size=1)


# Several entries of one text.


def test_models_and_prefixes_do_not_displace_one_another(store):
    models = [FINGERPRINT, OTHER_MODEL]
    prefixes = [Prefix((9, 8)), Prefix((9,)), Prefix((9, 8, 7))]
    packs = [make_pack(fingerprint=model, prefix=prefix, seed=len(model.weights) + len(prefix))
             for model in models for prefix in prefixes]  # fmt: skip
    (handle,) = set(map(store.put, packs))
    again = PackStore(store.path)
    for pack in packs:
        assert same(again.get(handle, pack.key), pack)
        assert same(again.peek(handle, pack.key), pack.without_kv())
    assert [again.peek(handle, PackKey(model)).prefix for model in models] == [prefixes[0]] * 2, "the first one"
    assert again.peek(handle, PackKey(FINGERPRINT, Prefix((7,)))).prefix == prefixes[0]
    store.blobs.delete(entry_of(packs[1], handle).key)
    assert same(again.get(handle, packs[1].key), packs[1].without_kv()), "its text and tokens stay"
    store.put(packs[1])
    assert again.peek(handle, PackKey(replace(FINGERPRINT, weights="c"))).fingerprint == FINGERPRINT
    assert len(list(again.entries(handle))) == 6
    assert list(again) == [handle]
    before = snapshot(store)
    assert set(map(store.put, packs)) == {handle}
    assert snapshot(store) == before, "nothing is written twice"
    store.remove(handle)
    assert not list((store.path / "packs").rglob("*.*")), "and all of it goes with the pack"


def test_kv_that_is_put_again_is_found_behind_its_own_prefix_alone(store):
    """What a request computed for its own position is never read at another one."""
    handle, other = store.put(make_pack()), make_pack(fingerprint=OTHER_MODEL, prefix=Prefix((1, 2, 3)), seed=1)
    assert store.put_again(other)
    assert same(store.get(handle, other.key), other)
    for key in (None, PackKey(OTHER_MODEL), PackKey(OTHER_MODEL, Prefix((1, 2)))):
        assert same(store.get(handle, key), make_pack())
    assert [entry.key for entry in store.entries(handle)] == [make_pack().key]
    store.remove(handle)
    assert not store.put_again(other)
    assert not list((store.path / "packs").rglob("*.*"))


# What release 0.2 left.


def test_a_store_of_release_02_keeps_its_texts_and_says_once_that_kv_is_computed_again(tmp_path, caplog):
    """Handles are those that `docs/format.md` gives."""
    text, name = "The Eiffel Tower", "tmn7tkvyuryf6lsptrqky"
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    folder = tmp_path / "packs" / "paris-1889" / name[:2]
    folder.mkdir(parents=True)
    old = [folder / f"{name}.safetensors", folder / f"{name}.{'0' * 16}.safetensors"]
    old += [tmp_path / "kept" / "paris-1889" / "ab" / f"ab{'c' * 19}.safetensors"]
    old += [tmp_path / "quarantine" / f"paris-1889.{name}.1.safetensors"]
    for file in old:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"of release 0.2")
    (folder / f"{name}.txt").write_text(text)
    store, handle = PackStore(tmp_path), Handle.parse(f"kp:paris-1889/{name}")
    before = snapshot(store)
    assert store.handle(text, "paris-1889") == handle
    for _ in range(2):
        assert same(store.get(handle), KnowledgePack(text, "paris-1889", (), Prefix(), UNKNOWN))
    assert list(store) == [handle]
    assert list(store.verify()) == []
    assert snapshot(store) == before, "nothing is deleted"
    assert caplog.text.count("holds KV of release 0.2, which is computed again from its texts") == 1
    pack = make_pack(text, "paris-1889")
    assert store.put(pack) == handle
    assert same(PackStore(tmp_path).get(handle), pack)
    store.remove(handle)
    assert not [file for file in old if file.exists()], "with its pack goes what nobody reads any more"


def test_a_damaged_entry_is_deleted_and_the_pack_stays(store, caplog):
    first, second = make_pack(), make_pack(fingerprint=OTHER_MODEL, seed=1)
    handle = store.put(first)
    store.put(second)
    beside = store.path / entry_of(second, handle).key
    flip(beside, -1)
    assert [which for which, _ in store.verify()] == [handle]
    assert same(store.get(handle, second.key), second.without_kv())
    assert "is damaged, deleted, and computed again from its text" in caplog.text
    assert not beside.exists()
    assert list(store.verify()) == []
    assert same(store.get(handle), first)
    assert same(store.get(store.put(second), second.key), second)


def test_entries_of_one_text_lose_their_kv_alone(tmp_path):
    first, second = make_pack(tokens=50), make_pack(tokens=50, fingerprint=OTHER_MODEL, seed=1)
    store = PackStore(tmp_path)
    handle = store.put(first)
    store.put(second)
    bound = PackStore(tmp_path, max_bytes=store.nbytes + 600)
    bound.get(handle)  # So the other one was not used for longest.
    bound.put(make_pack("new", tokens=20))
    assert same(bound.get(handle, first.key), first)
    assert same(bound.get(handle, second.key), second.without_kv())
    assert bound.nbytes <= bound.quota.max_bytes


def test_peek_reads_a_file_once_and_sees_every_change(tmp_path):
    blobs = Watched(tmp_path)
    store = PackStore(blobs)
    handle = store.put(make_pack())
    store.peek(handle)
    blobs.done.clear()
    store.peek(handle)
    assert blobs.done == ["stat", "stat"], "of the text and of the entry"
    PackStore(store.path).put(make_pack(seed=1, provenance={"title": "Pisa.!"}))  # Another process; the same size.
    blobs.done.clear()
    assert store.peek(handle).provenance == {"title": "Pisa.!"}
    assert blobs.done.count("read") == 1


def test_peek_tells_how_much_kv_is_stored(store):
    pack = make_pack()
    handle = store.put(pack)
    assert store.peek(handle).stored_bytes > pack.nbytes > 0
    assert store.get(handle).stored_bytes == store.peek(store.put(make_pack("lazy", kv=None))).stored_bytes == 0
    flip(files_of(store, handle)[0], -1)
    store.get(handle)
    assert store.peek(handle).stored_bytes == 0


def test_a_head_longer_than_one_look(store):
    pack = make_pack("word " * 40_000)
    assert same(store.peek(store.put(pack)), pack.without_kv())


def test_verify_names_what_is_damaged_and_changes_nothing(store):
    handles = sorted(store.put(make_pack(text)) for text in ("whole", "bent", "torn", "lost", "text"))
    flip(files_of(store, handles[0])[0], -1)
    files_of(store, handles[1])[0].write_bytes(b"torn")
    files_of(store, handles[2])[1].write_text("another text")
    files_of(store, handles[3])[0].unlink()  # Its KV is computed again.
    before = snapshot(store)
    found = dict(store.verify())
    assert sorted(found) == handles[:3]
    assert "digest" in found[handles[0]]
    assert "header" in found[handles[1]]
    assert "another text" in found[handles[2]]
    assert snapshot(store) == before


def test_a_view_is_of_a_store(store):
    assert isinstance(store, Packs)
    with pytest.raises(PackError, match="Got a dict as store of packs; expected a `PackStore`"):
        PackView({}, ["geo"])


def test_a_store_that_is_only_read_says_so():
    class Shelf(Packs):
        def peek(self, handle, key=None):
            return make_pack()

        get = peek

    with pytest.raises(PackError, match="The store of packs Shelf is only read"):
        Shelf().put(make_pack())


# Whose folder it is.


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "photos" / "packs").mkdir(parents=True)
    (tmp_path / "photos" / "packs" / "Paris 1.jpg").write_bytes(b"jpg")
    (tmp_path / "photos" / "staging").mkdir()
    with pytest.raises(PackError, match=r"photos is not empty \(it holds packs/Paris 1.jpg\).*Name a new folder"):
        PackStore(tmp_path / "photos")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["Paris 1.jpg", "packs", "photos", "staging"]


@pytest.mark.parametrize("stray", [".DS_Store", "thumbs.db", "ab/._0", "ab/.nfs000000000001"])
@pytest.mark.parametrize("folder", ["behind", "packs", "packs/default", "deleted/default"])
def test_files_of_other_programs_hinder_nothing_and_stay(tmp_path, folder, stray):
    store = PackStore(tmp_path, max_bytes=1_000_000)
    left = tmp_path / folder / stray
    left.parent.mkdir(parents=True)
    left.write_bytes(b"theirs")
    os.utime(left, (0, 0))
    handle = store.put(make_pack())
    store.forget("default")
    store.remove(handle)
    store.bury(handle)
    assert (list(store), list(store.kept()), list(store.verify())) == ([], [], [])
    assert left.read_bytes() == b"theirs"


def test_a_removal_that_fails_can_be_tried_again(store, monkeypatch):
    """Whoever has the KV in memory drops it when the mark changes."""
    handle, real = store.put(make_pack()), store.blobs.write

    def full(key, *given, **options):
        if key.startswith("removed/"):
            raise OSError(28, "No space left on device")
        return real(key, *given, **options)

    before = store.removals(handle.namespace)
    monkeypatch.setattr(store.blobs, "write", full)
    with pytest.raises(OSError, match="No space"):
        store.remove(handle)
    monkeypatch.undo()
    store.remove(handle)
    assert handle not in store
    assert store.removals(handle.namespace) != before


def test_a_store_that_lost_its_secret_is_refused(store):
    store.put(make_pack())
    (store.path / "secret").unlink()
    with pytest.raises(PackError, match="restore its secret"):
        PackStore(store.path)
    assert not (store.path / "secret").exists()


def test_what_a_crash_leaves_of_a_new_store_is_no_hindrance(tmp_path):
    for name in ("packs", "staging"):
        (tmp_path / name).mkdir()
    (tmp_path / "lock").touch()
    (tmp_path / "staging" / "secret.tmp").write_bytes(b"half")
    store = PackStore(tmp_path)
    assert same(store.get(store.put(make_pack())), make_pack())


# What is new.


def test_the_token_of_changes(tmp_path):
    blobs = Watched(tmp_path)
    store, other = PackStore(blobs), PackStore(tmp_path)
    tokens = [store.changes]
    handle = other.put(make_pack())
    tokens.append(store.changes)
    for quiet in (lambda: other.put(make_pack()), lambda: other.put(make_pack(seed=1)), lambda: other.get(handle)):
        quiet()
        assert store.changes == tokens[-1]
    for loud in (lambda: other.put(make_pack("b")), lambda: store.put(make_pack("c")), lambda: other.remove(handle)):
        loud()
        tokens.append(store.changes)
    assert len(set(tokens)) == len(tokens)
    blobs.done.clear()
    assert store.changes == tokens[-1]
    assert blobs.done == ["stat"]


def test_a_pack_is_printed_without_its_tensors(store):
    pack = store.get(store.put(make_pack()))
    assert f"KVTensors({pack.kv.layers} layers, {pack.kv.tokens} tokens, {pack.kv.dtype})" in repr(pack)
    assert len(repr(pack)) < 2000
