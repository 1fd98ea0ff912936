"""The store as its users see it: put and get, what displaces what, whose folder it is, what is new."""

import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kp_core import Packs, PackView
from kp_core.errors import HandleError, PackCorruptError, PackCorruptWarning, PackError, PackNotFoundError
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.file import encode_pack
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.packs.store import PackStore
from tests.core.packs.made import (
    FINGERPRINT,
    UNKNOWN,
    Watched,
    earlier,
    files_of,
    flip,
    make_pack,
    older_file,
    same,
    snapshot,
)

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
    assert again.peek(handle, PackKey(replace(FINGERPRINT, weights="c"))).fingerprint == FINGERPRINT
    assert len(list(again.entries(handle))) == 6
    assert list(again) == [handle]
    before = snapshot(store)
    assert set(map(store.put, packs)) == {handle}
    assert snapshot(store) == before, "nothing is written twice"
    store.remove(handle)
    assert not list((store.path / "packs").rglob("*.*")), "and all of it goes with the pack"


# What an earlier release left.


OTHER_MACHINE = replace(FINGERPRINT, passes="on another machine")
OF_OTHER = make_pack(fingerprint=OTHER_MODEL, seed=2)


def store_of_earlier(store: PackStore, first: KnowledgePack, *beside: KnowledgePack) -> Handle:
    """`store` as an earlier release left it, of entries of one text."""
    handle = store.handle(first.text, first.namespace)
    path, text = files_of(store, handle)
    path.parent.mkdir(parents=True)
    path.write_bytes(older_file(first, "2"))
    for number, pack in enumerate(beside):
        path.with_suffix(f".{number:016x}.safetensors").write_bytes(older_file(pack, "2"))
    text.write_text(first.text)
    return handle


def version_of(path) -> str:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["version"]


def test_what_an_earlier_release_stored_is_read_and_stored_in_the_present_version(store):
    handle = store_of_earlier(store, make_pack())
    path, _ = files_of(store, handle)
    found = store.get(handle)
    assert same(found, earlier(make_pack()))
    assert same(store.peek(handle), found.without_kv())
    assert store.peek(handle, make_pack().key).fingerprint.is_earlier, "so that the engine computes it anew"
    assert list(store.verify()) == []
    assert version_of(path) == "2"
    assert store.put(found) == handle
    assert version_of(path) == "5"
    assert same(store.get(handle), found)
    assert store.get(handle).fingerprint.is_earlier
    assert [entry.key for entry in store.entries(handle)] == [found.key]


@pytest.mark.parametrize("new", [make_pack(), make_pack(kv=None), make_pack(prefix=Prefix((1,)))])
def test_compiled_anew_a_pack_displaces_what_an_earlier_release_made(store, new):
    handle = store_of_earlier(store, make_pack(seed=1))
    assert store.put(new) == handle
    assert [entry.key for entry in store.entries(handle)] == [new.key]
    assert version_of(files_of(store, handle)[0]) == "5"
    assert same(store.get(handle, new.key), new)
    assert len(list(files_of(store, handle)[0].parent.iterdir())) == 2


def test_what_another_kind_of_machine_computed_stays_beside_what_is_compiled_anew(store):
    handle = store_of_earlier(store, make_pack(seed=1))
    theirs, mine = make_pack(fingerprint=OTHER_MACHINE, seed=2), make_pack(seed=3)
    store.put(theirs)
    assert [entry.key for entry in store.entries(handle)] == [theirs.key], "the first that is compiled displaces it"
    store.put(mine)
    assert [entry.key for entry in store.entries(handle)] == [theirs.key, mine.key]
    for pack in (theirs, mine):
        assert same(store.get(handle, pack.key), pack)
    before = snapshot(store)
    store.put(theirs)
    store.put(mine)
    assert snapshot(store) == before


def test_a_text_alone_does_not_displace_what_an_earlier_release_made(store):
    handle = store_of_earlier(store, make_pack())
    store.put(make_pack(kv=None, token_ids=(), prefix=Prefix(), fingerprint=UNKNOWN))
    assert same(store.get(handle), earlier(make_pack()))


@pytest.mark.parametrize("first", [make_pack(), OF_OTHER])
def test_each_model_finds_that_an_earlier_release_compiled_the_text_for_it(store, first):
    """Whichever of two models compiles it anew first, the other one must not take the pack for a stranger's."""
    beside = OF_OTHER if first.fingerprint == FINGERPRINT else make_pack()
    handle = store_of_earlier(store, first, beside)
    packs = [first, beside]
    for compiled in ([], [first], [beside]):
        fresh = PackStore(store.path)
        for pack in compiled:
            fresh.put(pack)
        for pack in packs:
            found = fresh.peek(handle, PackKey(pack.fingerprint))
            assert found.fingerprint.same_model(pack.fingerprint)
            assert same(fresh.get(handle, PackKey(pack.fingerprint)).without_kv(), replace(found, stored_bytes=0))
    for pack in packs:
        assert same(store.get(handle, pack.key), pack)
    stranger = replace(FINGERPRINT, weights="c")
    assert store.peek(handle, PackKey(stranger)).fingerprint == first.fingerprint


def test_what_is_first_stays_where_another_model_compiles_the_text(store):
    handle = store_of_earlier(store, make_pack())
    store.put(OF_OTHER)
    assert [entry.key for entry in store.entries(handle)] == [earlier(make_pack()).key, OF_OTHER.key]
    store.put(make_pack())
    assert [entry.key for entry in store.entries(handle)] == [make_pack().key, OF_OTHER.key]


def test_a_damaged_file_of_an_earlier_release_is_mended_in_the_present_version(store):
    handle = store_of_earlier(store, make_pack())
    path, _ = files_of(store, handle)
    flip(path, -1)
    with pytest.warns(PackCorruptWarning, match="text and token ids are intact"):
        assert same(store.get(handle), earlier(make_pack(kv=None)))
    assert version_of(path) == "5"
    assert store.get(handle).fingerprint.is_earlier


def test_a_damaged_entry_is_set_aside_and_the_pack_stays(store):
    first, second = make_pack(), make_pack(fingerprint=OTHER_MODEL, seed=1)
    handle = store.put(first)
    store.put(second)
    (beside,) = set(files_of(store, handle)[0].parent.glob("*.safetensors")) - {files_of(store, handle)[0]}
    flip(beside, -1)
    assert [which for which, _ in store.verify()] == [handle]
    with pytest.warns(PackCorruptWarning, match="An entry of the pack"):
        assert same(store.get(handle, second.key), first)
    assert list(store.verify()) == []
    assert same(store.get(store.put(second), second.key), second)


def test_the_text_is_taken_from_an_entry_beside_when_all_else_is_damaged(store):
    first, second = make_pack(), make_pack(fingerprint=OTHER_MODEL, seed=1)
    handle = store.put(first)
    store.put(second)
    path, text = files_of(store, handle)
    path.write_bytes(b"junk")
    text.unlink()
    with pytest.warns(PackCorruptWarning, match="text is intact"):
        assert store.get(handle).text == first.text
    assert text.read_text() == first.text
    assert same(store.get(handle, second.key), second)


def test_with_a_pack_that_is_gone_go_its_other_entries(store):
    handle = store.put(make_pack())
    store.put(make_pack(fingerprint=OTHER_MODEL, seed=1))
    path, text = files_of(store, handle)
    (beside,) = set(path.parent.glob("*.safetensors")) - {path}
    for file in (path, beside, text):
        file.write_bytes(b"junk")
    with pytest.raises(PackCorruptError, match=r"Set aside: .*, .*, "):
        store.get(handle)
    assert not list(path.parent.iterdir())
    store.remove(handle)
    assert not list((store.path / "quarantine").iterdir())


def test_a_lost_first_entry_is_mended_beside_the_others(store):
    first, second = make_pack(), make_pack(fingerprint=OTHER_MODEL, seed=1)
    handle = store.put(first)
    store.put(second)
    files_of(store, handle)[0].unlink()
    assert same(store.get(handle, second.key), second)
    with pytest.warns(PackCorruptWarning, match="missing"):
        assert store.get(handle).fingerprint == UNKNOWN
    store.put(first)
    assert same(store.get(handle), first)
    assert same(store.get(handle, second.key), second)


def test_entries_of_one_text_lose_their_kv_alone(tmp_path):
    first, second = make_pack(tokens=50), make_pack(tokens=50, fingerprint=OTHER_MODEL, seed=1)
    store = PackStore(tmp_path)
    handle = store.put(first)
    store.put(second)
    bound = PackStore(tmp_path, max_bytes=store.nbytes + 600)
    bound.get(handle)  # So the other one was not used for longest.
    bound.put(make_pack("new", tokens=20))
    assert same(bound.get(handle, first.key), first)
    assert bound.peek(handle, second.key).fingerprint == FINGERPRINT, "what is left is the first entry"
    assert bound.nbytes <= bound.max_bytes


def test_peek_reads_a_file_once_and_sees_every_change(tmp_path):
    blobs = Watched(tmp_path)
    store = PackStore(blobs)
    handle = store.put(make_pack())
    assert store.peek(handle) is store.peek(handle)
    blobs.done.clear()
    store.peek(handle)
    assert blobs.done == ["stat"]
    PackStore(store.path).put(make_pack(seed=1, provenance={"title": "Pisa.!"}))  # Another process; the same size.
    blobs.done.clear()
    assert store.peek(handle).provenance == {"title": "Pisa.!"}
    assert blobs.done.count("read") == 1


def test_peek_tells_how_much_kv_is_stored(store):
    pack = make_pack()
    handle = store.put(pack)
    assert store.peek(handle).stored_bytes == pack.nbytes > 0
    assert store.get(handle).stored_bytes == store.peek(store.put(make_pack("lazy", kv=None))).stored_bytes == 0
    flip(files_of(store, handle)[0], -1)
    with pytest.warns(PackCorruptWarning):
        store.get(handle)
    assert store.peek(handle).stored_bytes == 0


def test_a_head_longer_than_one_look(store):
    pack = make_pack("word " * 40_000)
    assert same(store.peek(store.put(pack)), pack.without_kv())


def test_verify_names_what_is_damaged_and_changes_nothing(store):
    handles = sorted(store.put(make_pack(text)) for text in ("whole", "bent", "torn", "lost", "text"))
    flip(files_of(store, handles[0])[0], -1)
    files_of(store, handles[1])[0].write_bytes(b"torn")
    files_of(store, handles[2])[0].unlink()
    before = snapshot(store)
    found = dict(store.verify())
    assert sorted(found) == handles[:3]
    assert "digest" in found[handles[0]]
    assert "header" in found[handles[1]]
    assert "missing" in found[handles[2]]
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


def test_a_store_of_the_release_before(tmp_path):
    """Its layout had a lock and no `used`; handles are those that `docs/format.md` gives."""
    text, name = "The Eiffel Tower", "tmn7tkvyuryf6lsptrqky"
    pack = make_pack(text, "paris-1889")
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "lock").touch()
    folder = tmp_path / "packs" / "paris-1889" / name[:2]
    folder.mkdir(parents=True)
    (folder / f"{name}.safetensors").write_bytes(b"".join(encode_pack(pack).chunks()))
    (folder / f"{name}.txt").write_text(text)
    store = PackStore(tmp_path)
    before = snapshot(store)
    handle = Handle.parse(f"kp:paris-1889/{name}")
    assert store.put(pack) == handle == store.handle(text, "paris-1889")
    assert list(store) == [handle]
    assert list(store.verify()) == []
    assert same(store.get(handle), pack)
    assert snapshot(store) == before


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


def test_texts_that_are_not_known_yet(store):
    handles = {text: store.put(make_pack(text, space)) for space in ("geo", "art") for text in (f"{space} a", "b")}
    assert dict(store.texts(["geo"])) == {handles["geo a"]: "geo a", store.handle("b", "geo"): "b"}
    assert dict(store.texts(["art", "geo", "none"], set(handles.values()))) == {store.handle("b", "geo"): "b"}
    files_of(store, handles["geo a"])[1].write_text("not the text of this handle")
    assert dict(store.texts(["geo"])) == {store.handle("b", "geo"): "b"}


def test_of_known_packs_nothing_is_read(tmp_path):
    blobs = Watched(tmp_path)
    store = PackStore(blobs)
    known = {store.put(make_pack(f"text {number}")) for number in range(3)}
    new = store.put(make_pack("new"))
    (tmp_path / "packs" / "geo" / new.id[:2] / "notes.txt").write_text("not ours")
    blobs.done.clear()
    assert dict(store.texts(["geo"], known)) == {new: "new"}
    assert blobs.done == ["list", "read"]


def test_texts_that_are_far_are_read_at_once(tmp_path):
    together = threading.Barrier(4)

    class Far(FolderBlobs):
        is_far = True

        def read(self, key, *args):
            if key.endswith(".txt"):
                together.wait(20)  # Breaks unless four reads are under way.
            return super().read(key, *args)

    near = PackStore(tmp_path, secret="5e" * 32)
    handles = {near.put(make_pack(f"text {number}")): f"text {number}" for number in range(4)}
    assert dict(PackStore(Far(tmp_path), secret="5e" * 32).texts(["geo"])) == handles
