"""Packs under URLs: secrets that are configured and rotated, the local cache, and what is said where nothing is."""

import importlib
import itertools
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kp_core.errors import MissingDependencyError, PackError, PackNotFoundError
from kp_core.packs.entry import Entry
from kp_core.packs.objects import LocalCopies, ObjectBlobs, open_blobs
from kp_core.packs.store import PackStore
from kp_core.settings import EngineSettings
from tests.conftest import tiny_engine
from tests.core.packs.made import make_pack, same

OLD, NEW = "0a" * 32, "0b" * 32
_NUMBERS = itertools.count()


@pytest.fixture
def url(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("KP_CACHE", str(tmp_path / "cache"))
    return f"memory://packs-{next(_NUMBERS)}"


class Far(ObjectBlobs):
    """The memory of this process, as if it were far away; counts what is asked of it."""

    is_far = True

    def __init__(self, url: str, **options) -> None:
        self.asked: list[str] = []
        super().__init__(url, **options)

    def _call(self, name, path, *args, **options):
        self.asked.append(name)
        return super()._call(name, path, *args, **options)


def cached() -> list[Path]:
    folder = Path(os.environ["KP_CACHE"]) / "objects"
    return sorted(path for path in folder.glob("*") if path.is_file())


def test_packs_under_a_url_are_those_that_were_put(url):
    packs = [make_pack(f"text {number}", tokens=50, seed=number) for number in range(5)]
    handles = [PackStore(url).put(pack) for pack in packs]
    store = PackStore(url)
    assert all(same(store.get(handle), pack) for handle, pack in zip(handles, packs, strict=True))
    assert (list(store.handles()), list(store.verify())) == (sorted(handles), [])
    before = store.changes
    store.remove(handles[0])
    assert (len(PackStore(url)), store.changes != before) == (4, True)


def test_a_bound_of_bytes_drops_kv_least_recently_used_first(url):
    store = PackStore(url)
    handles = [store.put(make_pack(f"text {number}", tokens=50)) for number in range(3)]
    store.get(handles[0])
    store = PackStore(url, max_bytes=store.nbytes + 600)
    store.put(make_pack("new", tokens=20))
    assert [store.peek(handle).stored_bytes > 0 for handle in handles] == [True, False, True]


def test_a_folder_by_its_file_url(tmp_path):
    handle = PackStore(f"file://{tmp_path}/packs").put(make_pack())
    assert same(PackStore(tmp_path / "packs").get(handle), make_pack())


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://", "Got 's3://' as a place for packs; expected a folder, or a URL such as s3://bucket/prefix"),
        ("https://example.org/packs", "expected a folder, or a URL"),
        ("teapot://packs", "Protocol not known: teapot"),
    ],
)
def test_urls_that_lead_nowhere(place, words):
    with pytest.raises(PackError, match=words):
        PackStore(place)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(MissingDependencyError, match=r'pip install "knowledge-packs\[s3\]"'):
        PackStore("s3://bucket/packs", secret=OLD)


# The secret of handles.


def test_a_far_place_never_holds_the_secret(url, monkeypatch):
    monkeypatch.delenv("KP_SECRET", raising=False)
    with pytest.raises(PackError, match="set KP_SECRET, or pass"):
        PackStore(Far(url))
    monkeypatch.setenv("KP_SECRET", OLD)
    store = PackStore(Far(url))
    handle = store.put(make_pack())
    assert store.secrets == (bytes.fromhex(OLD),)
    found = {key: bytes(store.blobs.read(key)) for key, _ in store.blobs.list()}
    assert "secret" not in found
    assert not any(bytes.fromhex(OLD) in data or OLD.encode() in data for data in found.values())
    monkeypatch.setenv("KP_SECRET", OLD.upper())
    assert same(PackStore(Far(url)).get(handle), make_pack())


@pytest.mark.parametrize("secret", ["x", OLD[:-1], OLD + "0", f"{OLD},", "zz" * 32])
def test_what_is_no_secret_is_not_repeated(url, secret):
    with pytest.raises(PackError, match="expected a secret of 64 hexadecimal digits") as caught:
        PackStore(url, secret=secret)
    assert secret not in str(caught.value) or len(secret) == 1


def test_another_secret_is_refused_and_harms_nothing(url):
    handle = PackStore(url, secret=OLD).put(make_pack())
    before = sorted(key for key, _ in open_blobs(url).list())
    with pytest.raises(PackError, match="was made with another secret"):
        PackStore(url, secret=NEW)
    with pytest.raises(PackError, match=r"made with a secret that is not kept there; pass `PackStore\(..., secret"):
        PackStore(url)
    assert sorted(key for key, _ in open_blobs(url).list()) == before
    assert same(PackStore(url, secret=OLD).get(handle), make_pack())


def test_a_store_with_a_secret_of_its_own_takes_no_other(tmp_path):
    PackStore(tmp_path).put(make_pack())
    with pytest.raises(PackError, match="has a secret of its own"):
        PackStore(tmp_path, secret=OLD)


def test_a_place_of_others_is_left_alone(url):
    ObjectBlobs(url).write("report.txt", [b"theirs"])
    with pytest.raises(PackError, match="is not empty"):
        PackStore(url, secret=OLD)
    assert [key for key, _ in open_blobs(url).list()] == ["report.txt"]


def test_secrets_are_rotated_while_others_read(url):
    running = PackStore(url, secret=OLD)
    packs = [make_pack(f"text {number}", tokens=20, seed=number) for number in range(3)]
    old = [running.put(pack) for pack in packs]
    other = running.put(make_pack("text 0", fingerprint=make_pack().fingerprint.unknown()))
    assert other == old[0]
    both = PackStore(url, secret=f"{NEW},{OLD}")
    fresh = both.put(make_pack("fresh"))
    assert all(same(both.get(handle), pack) for handle, pack in zip(old, packs, strict=True))
    # Who knows nothing of the new secret sees no pack there, and deletes nothing.
    with pytest.raises(PackNotFoundError):
        running.get(fresh)
    assert both.rotate() == 3
    new = PackStore(url, secret=NEW)
    handles = [new.handle(pack.text, pack.namespace) for pack in packs]
    assert set(handles).isdisjoint(old)
    assert set(new) == {*handles, fresh}
    assert all(same(new.get(handle), pack) for handle, pack in zip(handles, packs, strict=True))
    assert all(new.peek(handle) is None for handle in old)
    with pytest.raises(PackError, match="another secret"):
        PackStore(url, secret=OLD)


# The local cache.


@pytest.fixture
def far(url):
    store = PackStore(Far(url), secret=OLD)
    pack = make_pack("far", tokens=200)
    return store, store.put(pack), pack


def test_a_pack_is_fetched_once_and_another_version_again(far):
    store, handle, pack = far
    assert same(store.get(handle), pack)
    store.blobs.asked.clear()
    assert same(store.get(handle), pack)
    assert "cat_file" not in store.blobs.asked
    other = make_pack("far", tokens=200, seed=1)
    PackStore(Far(str(store.blobs)), secret=OLD).put(other)
    assert same(PackStore(Far(str(store.blobs)), secret=OLD).get(handle), other)


def test_damage_of_the_cache_is_no_damage_of_the_store(far):
    store, handle, pack = far
    store.get(handle)
    (copy,) = cached()
    for damaged in (b"", copy.read_bytes()[:-1], b"!" + copy.read_bytes()[1:]):
        copy.write_bytes(damaged)
        assert same(store.get(handle), pack)
        assert list(store.verify()) == []
        assert cached() == [copy]


def test_damage_of_the_store_is_seen_past_the_cache(far):
    store, handle, _ = far
    store.get(handle)
    key = next(key for key, _ in store.blobs.list("packs/") if key.endswith(".safetensors"))
    ObjectBlobs(str(store.blobs)).write(key, [bytes(store.blobs.read(key, 0, 10**9))[:-1] + b"!"])
    assert [found for found, _ in store.verify()] == [handle]


def test_what_never_comes_whole_is_an_error_and_no_damage(far, monkeypatch):
    store, handle, _ = far
    real = store.blobs._fetch
    monkeypatch.setattr(store.blobs, "_fetch", lambda key, *given: real(key, *given)[:-1])
    with pytest.raises(OSError, match="came in another length"):
        store.get(handle)
    monkeypatch.undo()
    assert any(key.endswith(".safetensors") for key, _ in store.blobs.list("packs/"))


def test_a_removed_pack_leaves_the_cache(far):
    store, handle, _ = far
    store.get(handle)
    store.remove(handle)
    assert cached() == []


@pytest.mark.parametrize("deletes", [PackStore.remove, lambda store, handle: store.forget(handle.namespace)])
def test_what_another_machine_deletes_leaves_the_cache_with_what_stood_behind_it(far, deletes):
    store, handle, pack = far
    behind = Entry(pack.fingerprint, 3, "0" * 32, (1, 2), frozenset({str(handle), handle.namespace}))
    assert store.write(behind, pack.kv.slice(0, 2))
    other = PackStore(Far(str(store.blobs)), secret=OLD)
    own = other.put(make_pack("mine"))
    for each in (handle, own):
        store.get(each)
    assert store.read(behind, (handle.namespace,))
    store.removals(handle.namespace)
    assert len(cached()) == 3
    other.blobs._copies = None  # The cache of another machine is elsewhere.
    deletes(other, handle)
    stale = len(cached()) - sum(key.endswith(".safetensors") for key, _ in other.blobs.list())
    store.blobs._stats.clear()  # As a second later.
    store.removals(handle.namespace)
    assert (stale > 0, len(cached())) == (True, 3 - stale)
    assert same(store.get(own), make_pack("mine"))


def test_the_cache_keeps_to_its_budget_and_keeps_what_was_read_last(tmp_path, monkeypatch):
    monkeypatch.setenv("KP_CACHE", str(tmp_path))
    near = LocalCopies("far", 3500)
    for number in range(3):
        near.write(f"k{number}", "1", bytes(1000))
        os.utime(next(path for path in cached() if path.stat().st_mtime > 10**9), (number + 1, number + 1))
    assert bytes(near.read("k0", "1")) == bytes(1000)
    near.write("k3", "1", bytes(1000))
    assert [near.read(f"k{number}", "1") is not None for number in range(4)] == [True, False, True, True]
    near.write("large", "1", bytes(5000))
    assert near.read("large", "1") is None
    assert near.read("k0", "2") is None
    near.write("k0", "2", b"two")
    assert (near.read("k0", "1"), bytes(near.read("k0", "2"))) == (None, b"two")


def test_a_disk_that_refuses_is_no_error(far, monkeypatch):
    store, handle, pack = far
    store.blobs._copies = LocalCopies("far", 10**9)
    store.blobs._copies._blobs.path = Path("/proc/none")
    store.blobs._copies._blobs._root = "/proc/none"
    assert same(store.get(handle), pack)


def test_packs_of_a_prompt_are_looked_up_at_once(url):
    engine = tiny_engine()
    store = PackStore(Far(url), secret=OLD)
    texts = [f"The mill of Aldburgh has {number} sails, and each of them is white." for number in range(4)]
    handles = [store.put(pack) for pack in engine.build_packs(texts, progress=False)]
    again = PackStore(Far(url), secret=OLD)
    again.prefetch([(handle, None) for handle in handles])
    asked = len(again.blobs.asked)
    assert all(again.peek(handle) for handle in handles)
    assert asked == len(again.blobs.asked)
    assert all(again.get(handle).kv is not None for handle in handles)
    assert len(cached()) == 4
    # Whole: an answer from far packs is that from their text.
    message = "\n".join(map(str, handles)) + "\n\nHow many sails?"
    engine.clear_cache()
    view = PackStore(Far(url), secret=OLD).view("default")
    said = engine.generate(message, view=view, max_tokens=8)
    text = engine.generate("\n".join(texts) + "\n\nHow many sails?", max_tokens=8, reuse=False)
    assert (said.token_ids, said.usage.pack_tokens > 0) == (text.token_ids, True)


def test_kv_out_of_reach_is_computed_from_the_text(url):
    engine, store = tiny_engine(), PackStore(Far(url, cache_bytes=0), secret=OLD)
    text = "The mill of Aldburgh has four sails, and a heron stands beside it."
    handle = store.put(engine.build_pack(text))
    expected = engine.generate(f"{text}\n\nWhat stands there?", max_tokens=8, reuse=False).token_ids
    read = store.blobs.read
    store.blobs.read = lambda key, *range_: _refuse() if key.endswith(".safetensors") else read(key, *range_)
    engine.clear_cache()
    said = engine.generate(f"{handle}\n\nWhat stands there?", view=store.view("default"), max_tokens=8)
    assert said.token_ids == expected
    assert any(key.endswith(".safetensors") for key, _ in store.blobs.list("packs/"))


def _refuse():
    raise OSError("the server is away")


def test_settings_of_models_take_a_url(url):
    assert str(EngineSettings(store=url).store.blobs) == url


def test_no_key_leaves_the_prefix(url):
    for key in ("../other", "/etc/passwd", "a//b"):
        with pytest.raises(PackError, match="expected lower-case names"):
            ObjectBlobs(url).read(key)


@pytest.mark.parametrize("step", range(0, 60, 3))
def test_an_interrupted_rotation_is_begun_again(url, step):
    pack = make_pack(tokens=20)
    old = PackStore(url, secret=OLD).put(pack)
    store = PackStore(Far(url, cache_bytes=0), secret=f"{NEW},{OLD}")
    real, store.blobs.asked = store.blobs._call, []

    def until(name, path, *args, **options):
        if len(store.blobs.asked) == step:
            raise KeyboardInterrupt
        return real(name, path, *args, **options)

    store.blobs._call = until
    with suppress(KeyboardInterrupt):
        store.rotate()
    PackStore(url, secret=f"{NEW},{OLD}").rotate()
    new = PackStore(url, secret=NEW)
    (handle,) = new
    assert same(new.get(handle), pack)
    assert (handle != old, new.peek(old)) == (True, None)
