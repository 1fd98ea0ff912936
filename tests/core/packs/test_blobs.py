"""Where bytes lie: one set of rules for every kind of `Blobs`, and a store of packs on one that is no folder."""

import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.objects import blobs_at
from kp_core.errors import PackError
from kp_core.packs.blobs import Blobs, BlobStat, Buffer, FolderBlobs, _discard_left, _stage, replace_file
from kp_core.packs.objects import ObjectBlobs
from kp_core.packs.store import PackStore
from tests.core.packs.made import entry_of, make_pack, same
from tests.kits import check_blobs


class MemoryBlobs:
    """All that a new place for packs has to have."""

    is_far = False

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, BlobStat]] = {}
        self.lock, self.writes = threading.Lock(), 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key not in self.held:
            raise FileNotFoundError(key)
        return self.held[key][0][start:stop]

    def write(self, key: str, chunks: Iterable[Buffer], *, if_absent: bool = False) -> bool:
        data = b"".join(chunks)
        with self.lock:
            if if_absent and key in self.held:
                return False
            self.writes += 1
            self.held[key] = data, BlobStat(len(data), str(self.writes), time.time())
            return True

    def stat(self, key: str, *, recent: bool = False) -> BlobStat | None:
        return self.held[key][1] if key in self.held else None

    def list(self, prefix: str = "") -> Iterator[tuple[str, BlobStat]]:
        return iter([(key, found) for key, (_, found) in self.held.items() if key.startswith(prefix)])

    def delete(self, key: str) -> bool:
        return self.held.pop(key, None) is not None


@pytest.mark.parametrize("kind", ["folder", "memory", "fsspec", pytest.param("s3", marks=pytest.mark.slow)])
def test_every_kind_keeps_the_rules(kind, request, tmp_path, monkeypatch):
    monkeypatch.setenv("KP_CACHE", str(tmp_path / "cache"))
    numbers = itertools.count()
    name = tmp_path.name.replace("[", "-").replace("]", "-")

    def make() -> Blobs:
        number = next(numbers)
        if kind == "s3":
            return blobs_at(request.getfixturevalue("s3_server"), f"s3://packs/{name}-{number}")
        if kind == "fsspec":
            return ObjectBlobs(f"memory://{name}-{number}")
        return FolderBlobs(tmp_path / "deep" / f"blobs{number}") if kind == "folder" else MemoryBlobs()

    check_blobs(make)


class Backwards(MemoryBlobs):
    def write(self, key, chunks, *, if_absent=False):
        return super().write(key, list(chunks)[::-1], if_absent=if_absent)


class Whole(MemoryBlobs):
    def read(self, key, start=0, stop=None):
        return super().read(key)


class Silent(MemoryBlobs):
    def read(self, key, start=0, stop=None):
        return self.held[key][0][start:stop] if key in self.held else b""


class Sized(MemoryBlobs):
    def stat(self, key, *, recent=False):
        found = super().stat(key)
        return found and found._replace(version=str(found.size))


class Stale(MemoryBlobs):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def stat(self, key, *, recent=False):
        found = self.seen.get(key) if recent and key in self.seen else super().stat(key)
        self.seen[key] = found
        return found


class Folders(MemoryBlobs):
    def list(self, prefix=""):
        return (item for item in super().list() if item[0].startswith(prefix.rstrip("/")))


class Racing(MemoryBlobs):
    def write(self, key, chunks, *, if_absent=False):
        if if_absent and key in self.held:
            return False
        time.sleep(0.01)
        return super().write(key, chunks)


class Torn(MemoryBlobs):
    def write(self, key, chunks, *, if_absent=False):
        if not if_absent:
            super().write(key, [])
            for chunk in chunks:
                super().write(key, [*([self.read(key)] if key in self.held else []), chunk])
            return True
        return super().write(key, chunks, if_absent=True)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Backwards, "`read` returns the chunks in order"),
        (Whole, r"`read\(key, 4, None\)` returns these bytes"),
        (Silent, "`read` of an absent key raises FileNotFoundError"),
        (Sized, "The version changes whenever other bytes are written"),
        (Stale, r"`stat\(recent=True\)` never caches absence"),
        (Folders, r"`list\('a/b/'\)` yields exactly the keys that start so"),
        (Racing, "exactly one writes"),
        (Torn, "A `write` that fails leaves the old blob"),
    ],
)
def test_the_broken_rule_is_named(broken, rule):
    with pytest.raises(AssertionError, match=rule):
        check_blobs(broken)


def test_packs_in_a_place_that_is_no_folder():
    blobs = MemoryBlobs()
    store, packs = PackStore(blobs), [make_pack(f"text {index}", tokens=50) for index in range(3)]
    handles = [store.put(pack) for pack in packs]
    assert all(same(PackStore(blobs).get(handle), pack) for handle, pack in zip(handles, packs, strict=True))
    key = entry_of(packs[0], handles[0]).key
    blobs.write(key, [blobs.read(key)[:-1] + b"!"])
    assert same(store.get(handles[0]), packs[0].without_kv())
    assert blobs.stat(key) is None
    PackStore(blobs, max_bytes=store.nbytes + 600).put(make_pack("new", tokens=20))
    assert [store.peek(handle).stored_bytes > 0 for handle in handles].count(True) == 1
    before, count = store.changes, len(store)
    store.remove(handles[1])
    assert (len(store), store.peek(handles[1])) == (count - 1, None)
    assert store.changes != before
    with pytest.raises(PackError, match="in no folder"):
        store.path  # noqa: B018 - a property that raises


def test_a_file_is_no_place_for_packs(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for place in ("notes.txt", "notes.txt/packs"):
        with pytest.raises(PackError, match=r"notes\.txt.* is a file, or lies in one; expected a folder"):
            PackStore(tmp_path / place)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../a", "a/../b", "a//b", "a/", "A", ".a", "a/.b", "a\\b", "a\nb", "a\x00", "staging/a"]
)
def test_no_key_leaves_the_folder(tmp_path, key):
    blobs = FolderBlobs(tmp_path / "blobs")
    (tmp_path / "a").write_text("outside")
    for call in (blobs.read, blobs.stat, blobs.delete, lambda key: blobs.write(key, [b"x"])):
        with pytest.raises(PackError, match="expected lower-case names"):
            call(key)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    if key.strip("a/"):
        with pytest.raises(PackError, match="expected lower-case names"):
            list(blobs.list(key))


@pytest.mark.parametrize(("size", "cut"), [(3000, 1500), (3_000_000, 1_000_500), (3_000_000, 0)])
def test_of_a_file_that_is_cut_while_it_is_read_the_beginning_is_read(tmp_path, monkeypatch, size, cut):
    blobs, data, preadv = FolderBlobs(tmp_path), os.urandom(size), os.preadv
    blobs.write("a", [data])

    def cutting(*where):
        os.truncate(tmp_path / "a", cut)
        return preadv(*where)

    monkeypatch.setattr("kp_core.packs.blobs._PART", 1 << 18)
    assert blobs.read("a") == data
    monkeypatch.setattr(os, "preadv", cutting)
    assert blobs.read("a") == data[:cut]


def test_threads_share_a_file_where_the_system_has_no_reads_at_a_place(tmp_path, monkeypatch):
    blobs, data = FolderBlobs(tmp_path), os.urandom(30_000_000)
    blobs.write("a", [data])
    monkeypatch.setattr("kp_core.packs.blobs._PART", 1 << 16)
    monkeypatch.delattr(os, "preadv")
    assert blobs.read("a") == data
    assert blobs.read("a", 5, 70_009) == data[5:70_009]


def test_files_and_folders_are_their_owners_alone(tmp_path):
    FolderBlobs(tmp_path / "deep" / "blobs").write("a/b", [b"x"])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"deep": 0o700, "blobs": 0o700, "staging": 0o700, "a": 0o700, "b": 0o600}


def test_a_folder_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    blobs = FolderBlobs(tmp_path)
    assert blobs.write("a", [b"one"], if_absent=True)
    assert not blobs.write("a", [b"two"], if_absent=True)
    assert bytes(blobs.read("a")) == b"one"
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path):
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    blobs = FolderBlobs(tmp_path)
    blobs.write("a", [b"old"])
    with pytest.raises(OSError, match="No space"):
        blobs.write("a", chunks())
    assert bytes(blobs.read("a")) == b"old"
    assert list((tmp_path / "staging").iterdir()) == []


def test_files_in_a_folder_that_was_there_are_their_owners_alone(tmp_path):
    tmp_path.chmod(0o755)
    old = os.umask(0)
    try:
        PackStore(tmp_path / "store").put(make_pack())
        (tmp_path / "open").mkdir(mode=0o777)
        PackStore(tmp_path / "open").put(make_pack())
    finally:
        os.umask(old)
    for path in (tmp_path / "open").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


_KILLED = """
import os, sys
from pathlib import Path
from kp_core.packs.blobs import FolderBlobs
from kp_core.packs.blobs import replace_file

def chunks():
    yield b"half"
    print("written", flush=True)
    sys.stdin.read()

where = Path(sys.argv[1])
FolderBlobs(where).write("a", chunks()) if sys.argv[2] == "blob" else replace_file(where / "a", chunks())
"""


@pytest.mark.parametrize("kind", ["blob", "file"])
def test_what_a_killed_writer_left_goes_at_the_next_open_and_what_is_written_stays(kind, tmp_path):
    command = [sys.executable, "-c", _KILLED, str(tmp_path), kind]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]  # noqa: S603 - our own words
    folder = tmp_path / "staging" if kind == "blob" else tmp_path
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"written\n"
        assert len(list(folder.glob("*.tmp"))) == 2
        writers[0].kill()
        writers[0].wait()
        FolderBlobs(tmp_path) if kind == "blob" else replace_file(tmp_path / "b", [b"x"])
        assert len(list(folder.glob("*.tmp"))) == 1
        # Whoever is still at it comes to an end.
        writers[1].communicate(timeout=60)
        assert writers[1].returncode == 0
        assert (tmp_path / "a").read_bytes() == b"half"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert list(folder.glob("*.tmp")) == []


def test_a_staging_that_leads_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "staging").symlink_to(tmp_path / "theirs")
    for name in ("old.tmp", ".kp-old.tmp"):
        (tmp_path / "theirs" / name).write_bytes(b"theirs")
        os.utime(tmp_path / "theirs" / name, (0, 0))
    blobs = FolderBlobs(tmp_path / "store")
    with pytest.raises(PackError, match="leads elsewhere"):
        blobs.write("a", [b"x"])
    with pytest.raises(PackError, match="leads elsewhere"):
        PackStore(tmp_path / "store")
    assert len(list((tmp_path / "theirs").iterdir())) == 2


def test_a_place_of_somebody_else_is_not_swept(tmp_path):
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "mine.tmp").write_bytes(b"theirs")
    os.utime(tmp_path / "staging" / "mine.tmp", (0, 0))
    (tmp_path / "photo.jpg").write_bytes(b"theirs")
    with pytest.raises(PackError, match="no store"):
        PackStore(tmp_path)
    assert (tmp_path / "staging" / "mine.tmp").exists()


@pytest.mark.slow
def test_what_is_being_written_is_never_taken_for_a_leftover(tmp_path):
    lost, done = [], threading.Event()

    def sweep():
        while not done.is_set():
            _discard_left(tmp_path)

    def write(_):
        with _stage(tmp_path, [b"x"]) as staged:
            if not staged.exists():
                lost.append(staged)

    with ThreadPoolExecutor(6) as pool:
        sweeping = [pool.submit(sweep) for _ in range(3)]
        list(ThreadPoolExecutor(3).map(write, range(1500)))
        done.set()
    assert all(each.result() is None for each in sweeping)
    assert not lost
    assert not list(tmp_path.iterdir())
