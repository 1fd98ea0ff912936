"""Packs in a folder or in object storage, shared by threads and processes. `docs/format.md` describes the layout."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from kp_core.errors import (
    OptionError,
    PackCorruptError,
    PackError,
    PackNotFoundError,
    PromptError,
    gone,
)
from kp_core.events import warn_once
from kp_core.kv import KVTensors
from kp_core.packs.blobs import Blobs, BlobStat, Buffer, FolderBlobs, is_key
from kp_core.packs.codec import Compression
from kp_core.packs.entry import Entry, EntryFile, encode_entry, open_entry, read_header
from kp_core.packs.envelope import header_stop
from kp_core.packs.files import BEHIND, Quota, buried_key, earlier_of, entries_of, handle_of, own_files, text_key
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace, mint
from kp_core.packs.objects import ObjectBlobs, open_blobs
from kp_core.packs.pack import KnowledgePack, PackKey, common_length, decode_text, encode_text
from kp_core.packs.secret import load_secrets, name_of
from kp_core.packs.uses import last_use_of
from kp_core.packs.view import Packs
from kp_core.threads import make_anew

logger = logging.getLogger(__name__)

_AT_ONCE = 8
_LOCKS = 64
_TICK_S = 0.01  # Of a kernel with 100 ticks a second.
_HEAD_BYTES = 1 << 16  # Bytes that the first read of a header fetches.
_CACHED = 1024  # Texts and headers, about 50 KB each if the packs are banks of facts.


class PackStore(Packs):
    """Packs in a folder, under a URL (`s3://bucket/prefix`, `gs://`, `memory://`), or in other `Blobs`.

    Each pack is a text file, with any number of entries of KV (`Entry`): one for each model and prefix that it was
    compiled for, and those that requests computed behind other packs (option `keep` of a request). Threads and
    processes may share it: a reader sees a file whole or not at all. A damaged entry is deleted, with a warning in the
    log, and computed again from the text.

    `max_bytes` bounds all files: a `put` that needs space deletes the entries whose last use is longest ago, but no
    text. By default, what is put has no bound, and what requests kept beside it has 2 GiB, but at most a twentieth of
    the folder's disk. Such an entry also goes when it was unused for `keep_seconds`. Marks of deleted packs last
    `tombstone_days`; 0 leaves none.

    `secret` makes handles: 64 hexadecimal digits, or several with commas, newest first, during a rotation. A folder
    makes its own by default. Object storage never holds it (default: the variable `KP_SECRET`). `seal` is a server's
    key for MACs: it writes entries with a MAC, and reads no others.

    Raises `PackError` for a place that holds other things and no packs, that was made with another secret, or that
    cannot be reached.
    """

    keeps = True

    def __init__(  # noqa: PLR0913 - every setting has a default that works
        self,
        place: str | os.PathLike[str] | Blobs,
        *,
        secret: str | None = None,
        max_bytes: int | None = None,
        keep_seconds: float | None = None,
        tombstone_days: float = 90,
        seal: bytes | None = None,
        **unknown: object,
    ) -> None:
        for name in unknown:
            raise OptionError(f"A store has no option {name!r}.{gone(name)}")
        if not (isinstance(tombstone_days, int | float) and 0 <= tombstone_days < math.inf):
            raise PackError(f"Got tombstone_days={tombstone_days!r}; expected a number of days from 0 on.")
        for name, bound in {"max_bytes": max_bytes, "keep_seconds": keep_seconds}.items():
            if bound is not None and not (isinstance(bound, int | float) and bound > 0):
                raise PackError(f"Got {name}={bound!r}; expected a positive number, or None for no bound.")
        if not isinstance(place, str | os.PathLike | Blobs):
            raise PackError(f"Got {place!r} as the place of packs; expected a folder, a URL or an object of blobs.")
        self.blobs: Blobs = place if isinstance(place, Blobs) else open_blobs(place)
        self._seal = seal
        self.tombstone_days = tombstone_days
        self._source, self._given_secrets = place, bool(secret or seal)
        try:
            self.secrets = load_secrets(self.blobs, secret)
        except NotADirectoryError as error:
            raise PackError(
                f"{self.blobs} is a file, or lies in one; expected a folder. `kp status FILE` shows an entry."
            ) from error
        except OSError as error:
            if self.blobs.is_far:
                raise PackError(str(error)) from error
            raise
        self._is_configured = bool(secret) or self.blobs.is_far
        self._uses = last_use_of(self.blobs)
        self.quota = Quota(self.blobs, self._uses, max_bytes, keep_seconds)
        self._texts = lru_cache(_CACHED)(partial(_read_text, self.blobs, self.secrets))
        self._heads = lru_cache(_CACHED)(partial(_read_head, self.blobs))
        self._removed = lru_cache(_CACHED)(partial(_last_removal, self.blobs))
        self._seen = dict[str, str | None]()  # The last removal in each namespace.
        self._owners: dict[tuple[str, str], frozenset[str]] = {}  # By key and version, so that no head is read twice.
        self.forked()
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: another thread may have held a lock."""
        self._turns = [threading.Lock() for _ in range(_LOCKS)]

    def _turn(self, key: str) -> threading.Lock:
        """The lock for writing `key`: one of the key, or of all keys where one bound holds for them together."""
        is_bounded = self.quota.max_bytes or key.startswith(BEHIND)
        return self._turns[0 if is_bounded else hash(key) % _LOCKS]

    def _opens(self) -> Callable[[], PackStore]:
        if self._given_secrets:
            raise PackError(
                f"The store {self.blobs} was opened with a secret or seal, which is not pickled. Set KP_SECRET for all "
                "processes instead, or open the store in the process that needs it."
            )
        source = str(self.blobs) if isinstance(self.blobs, FolderBlobs) else self._source
        quota, days = self.quota, self.tombstone_days
        return partial(
            PackStore, source, max_bytes=quota.max_bytes, keep_seconds=quota.keep_seconds, tombstone_days=days
        )

    def __repr__(self) -> str:
        return f"PackStore({str(self.blobs)!r}, max_bytes={self.quota.max_bytes})"

    @property
    def path(self) -> Path:
        """The folder of the packs; raises `PackError` if they are not in a folder."""
        if isinstance(self.blobs, FolderBlobs):
            return self.blobs.path
        raise PackError(f"The packs of {self.blobs} are in no folder; `str(store.blobs)` says where they are.")

    @property
    def changes(self) -> str:
        """A token that changes whenever any process adds or removes a pack or an entry; costs one `stat`."""
        stat = self.blobs.stat("changes", recent=True)
        return "" if stat is None else stat.version

    def removals(self, namespace: str) -> object:
        """As `Packs.removals`."""
        version = self._removed(namespace, self.changes)
        if version != self._seen.get(namespace) and isinstance(self.blobs, ObjectBlobs):
            self.blobs.drop_gone()
        self._seen[namespace] = version
        return version

    def _mark(self, key: str) -> None:
        """Change a token that tells all processes what happened."""
        self.blobs.write(key, [os.urandom(8)])

    @property
    def nbytes(self) -> int:
        """Bytes of all texts and entries, which `max_bytes` bounds."""
        return sum(stat.size for stat in own_files(self.blobs).values())

    def handle(self, text: str, namespace: str) -> Handle:
        """Return the handle of `text`, stored or not; raises `PromptError` for bad names and non-Unicode text."""
        try:
            return mint(self.secrets[0], namespace, text)
        except UnicodeEncodeError as error:
            raise PromptError(f"Got text that is not Unicode: {error}. Decode it with errors='replace'.") from error

    # Packs.

    def put(self, pack: KnowledgePack) -> Handle:
        """Store `pack`; storing it again writes nothing.

        It replaces the entry of the same text, model and prefix; a lazy pack does not replace KV. Raises `PackError`
        if `max_bytes` leaves no room, `PackError` for what the format cannot hold and if a later release wrote the
        entry; the store is then unchanged.
        """
        handle = self.handle(pack.text, pack.namespace)
        if pack.steering is not None:
            raise PackError(
                f"The pack {pack.text[:40]!r} is steered, and a store holds plain packs only. Store the pack it was "
                "made from, keep the steering with `save_steering`, and steer again after loading."
            )
        entry, text_at = self._entry(handle, pack), text_key(handle)
        file = None if pack.kv is None else encode_entry(entry, pack.kv, pack.compression, self._seal)
        with self._turn(text_at):
            stored = b""
            with suppress(FileNotFoundError):
                stored = bytes(self.blobs.read(text_at))
            text, file = self._merged(handle, stored, pack), file if file and self._is_news(file) else None
            size = len(text) + (file.nbytes if file else 0)
            is_bounded = self.quota.max_bytes and (file or text != stored)
            if is_bounded and not self.quota.make_room({text_at, entry.key}, size):
                raise PackError(
                    f"The pack needs {size} bytes, and {self.blobs} has no room for them even without the KV of all "
                    f"others; max_bytes is {self.quota.max_bytes}. Raise it, remove packs, or put `pack.without_kv()`."
                )
            # The text first: an entry without it would be nobody's.
            if text != stored:
                self.blobs.write(text_at, [text])
            if file:
                self._publish(file)
        self._uses.note(entry.key if pack.kv else text_at)
        if not stored:
            self.blobs.delete(buried_key(handle))
        if text != stored:
            self._mark("changes")
        return handle

    def bury(self, handle: Handle, successor: Handle | None = None) -> None:
        """As `Packs.bury`; deletes marks that have lapsed."""
        if self.tombstone_days:
            key = buried_key(handle)
            for other, stat in list(self.blobs.list(key.rpartition("/")[0] + "/")):
                if is_key(other) and self._has_lapsed(stat):
                    self.blobs.delete(other)
            content = [successor.id.encode()] if successor and successor.namespace == handle.namespace else []
            self.blobs.write(key, content, if_absent=not content)

    def buried(self, handle: Handle) -> Handle | bool:
        """As `Packs.buried`."""
        key = buried_key(handle)
        with suppress(FileNotFoundError):
            if (stat := self.blobs.stat(key)) and not self._has_lapsed(stat):
                successor = bytes(self.blobs.read(key)).decode()
                return Handle(handle.namespace, successor) if successor else True
        return False

    def _has_lapsed(self, mark: BlobStat) -> bool:
        return mark.modified < time.time() - self.tombstone_days * 24 * 3600

    def put_again(self, pack: KnowledgePack) -> bool:
        """Store the KV of `pack` if its text is stored; `False` if the text is removed before or meanwhile."""
        if pack.kv is None:
            return self.handle(pack.text, pack.namespace) in self
        entry = self._entry(self.handle(pack.text, pack.namespace), pack)
        return self.write(entry, pack.kv, pack.compression)

    def _entry(self, handle: Handle, pack: KnowledgePack) -> Entry:
        return Entry.of_pack(handle, pack.fingerprint, pack.prefix, pack.token_ids)

    def _merged(self, handle: Handle, stored: bytes, pack: KnowledgePack) -> bytes:
        """The text file with what `pack` says of the text, in place of what was said for the same model and prefix."""
        earlier: tuple[KnowledgePack, ...] = ()
        with suppress(PackCorruptError):  # It is replaced.
            earlier = decode_text(stored, handle.namespace, _texts_of(self.secrets, handle)) if stored else ()
        if earlier and pack.fingerprint == ModelFingerprint.unknown() and pack.kv is None:
            return stored
        known = [each for each in earlier if each.fingerprint != ModelFingerprint.unknown()]
        at = next((at for at, each in enumerate(known) if pack.key.fits(each)), len(known))
        known[at : at + 1] = [pack]
        return encode_text([replace(each, provenance=pack.provenance, kv=None) for each in known])

    def peek(self, handle: Handle | str, key: PackKey | None = None) -> KnowledgePack | None:
        """Return the pack without its KV, with `stored_bytes`; `None` if there is none. Raises as `get`.

        Returns the pack as compiled for `key`, else for its model, else as it was compiled first.
        """
        handle = Handle.parse(handle)
        packs = self.compiled(handle)
        if not packs:
            return None
        pack = next((each for each in packs if key is None or key.fits(each)), None)
        if pack is None and key:
            of_model = next((each for each in packs if each.fingerprint == key.model), None)
            # KV that a request computed behind this prefix, or where another model was put.
            prefixes = [] if key.prefix is None else [key.prefix]
            prefixes += [each.prefix for each in packs if of_model is None]
            for prefix in dict.fromkeys(prefixes):
                if file := self.head(Entry.of_pack(handle, key.model, prefix)):
                    ids = file.entry.token_ids
                    pack = replace(packs[0], fingerprint=key.model, prefix=prefix, token_ids=ids)
                    break
            else:
                pack = of_model
        pack = pack or packs[0]
        if pack.fingerprint == ModelFingerprint.unknown():
            return pack
        stat = self._stat(self._entry(handle, pack))
        return pack if stat is None else replace(pack, stored_bytes=stat.size)

    def get(self, handle: Handle | str, key: PackKey | None = None) -> KnowledgePack:
        """Return the pack that `peek` returns, with its KV (on the CPU) if that is stored and intact.

        Raises `PackNotFoundError` if there is none, `PackCorruptError` if its text is damaged.
        """
        handle = Handle.parse(handle)
        pack = self.peek(handle, key)
        if pack is None:
            raise PackNotFoundError(f"{self.blobs} has no pack {handle}. Build it and `put` it, or check the path.")
        if not pack.stored_bytes:
            self._uses.note(text_key(handle))
            return pack
        entry = self._entry(handle, pack)
        pack, file = replace(pack, stored_bytes=0), self.open(entry, {handle.namespace})
        kv = None if file is None or file.entry.token_ids != entry.token_ids else self._read(file)
        return pack if file is None or kv is None else replace(pack, kv=kv, compression=file.compression)

    def prefetch(self, wanted: Collection[tuple[Handle, PackKey | None]]) -> None:
        """Look up several packs in parallel if the storage is far; their first use reports errors."""

        def look_up(entry: tuple[Handle, PackKey | None]) -> None:
            with suppress(OSError, PackError):
                self.peek(*entry)

        if self.blobs.is_far and len(wanted) > 1:
            with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
                list(pool.map(look_up, wanted))

    def last_used(self) -> dict[str, float]:
        """Return when each pack was last stored or read, by handle, in seconds since 1970, as far as written."""
        used = dict[str, float]()
        for key, used_at in self._uses.times().items():
            if handle := handle_of(key):
                used[str(handle)] = max(used_at, used.get(str(handle), 0.0))
        return used

    def entries(self, handle: Handle) -> Iterator[KnowledgePack]:
        """Yield the pack without KV for each model and prefix that it was put with, the first one first."""
        for pack in self.compiled(handle):
            entry = self._entry(handle, pack)
            stat, file = self._stat(entry), self.head(entry)
            yield replace(pack, stored_bytes=stat.size, compression=file.compression) if stat and file else pack

    def handles(self, namespace: str | None = None) -> Iterator[Handle]:
        """Return the handles of all packs, or of one namespace, sorted."""
        prefix = "packs/" if namespace is None else f"packs/{check_namespace(namespace)}/"
        keys = (key for key, _ in self.blobs.list(prefix) if key.endswith(".txt"))
        return iter(sorted({handle for key in keys if (handle := handle_of(key))}))

    __iter__ = handles

    def __len__(self) -> int:
        return sum(1 for _ in self.handles())

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, Handle) and self.blobs.stat(text_key(handle)) is not None

    def versions(self, namespace: str) -> dict[Handle, str]:
        """Return the version of each text of a namespace, which changes with what it was compiled for."""
        listed = own_files(self.blobs, f"packs/{check_namespace(namespace)}/").items()
        return {handle: stat.version for key, stat in listed if key.endswith(".txt") and (handle := handle_of(key))}

    def remove(self, handle: Handle | str) -> None:
        """Delete the pack, its text and every entry that it owns; raises `PackNotFoundError` if there is none."""
        handle = Handle.parse(handle)
        # The text in between: who is killed leaves no entry without it, and who writes one meanwhile looks for it.
        self._drop(str(handle))
        deleted = [self.blobs.delete(key) for key in entries_of(self.blobs, handle)]
        if handle in self:  # A disk too full for the mark fails here, where the removal can be tried again.
            self._mark(f"removed/{handle.namespace}")
        if not (self.blobs.delete(text_key(handle)) or any(deleted)):
            raise PackNotFoundError(f"{self.blobs} has no pack {handle} to remove.")
        self._mark(f"removed/{handle.namespace}")
        self._mark("changes")
        self._drop(str(handle))
        for key in (*entries_of(self.blobs, handle), *earlier_of(self.blobs, handle)):
            self.blobs.delete(key)

    def rotate(self) -> int:
        """Give every pack with a handle of an earlier secret one of the first secret; returns their number.

        Old handles stop working, and KV behind other packs is deleted. After an interruption, call it again.
        """
        moved = 0
        for handle in list(self.handles()):
            packs = self.compiled(handle)
            if not packs or self.handle(packs[0].text, handle.namespace) == handle:
                continue
            for pack in packs:
                self.put(self.get(handle, pack.key))
            self.remove(handle)
            moved += 1
        for secret in self.secrets[1:]:  # No handle uses them any more.
            self.blobs.delete(name_of(secret))
        return moved

    def verify(self, *, repair: bool = False) -> Iterator[tuple[Handle | str, str]]:
        """Yield what is damaged, and how: packs by handle, entries with several owners by key. Checks every digest.

        `repair` deletes damaged entries, so that they are computed again; a damaged text stays. By default nothing
        changes.
        """
        for handle in self:
            try:
                _read_text(self.blobs, self.secrets, handle)
            except FileNotFoundError:  # It was removed meanwhile.
                continue
            except PackError as error:
                yield handle, str(error)
            for key in filter(handle_of, entries_of(self.blobs, handle)):
                if damage := self._damage(key, repair=repair):
                    yield handle, damage
        for key in own_files(self.blobs, BEHIND):
            if damage := self._damage(key, repair=repair):
                yield key, damage

    def _damage(self, key: str, *, repair: bool) -> str:
        """Say what is wrong with an entry; empty if nothing is, or if it was removed or replaced meanwhile."""
        stat = self.blobs.stat(key)
        try:
            # A ranged read bypasses the local cache.
            _own(open_entry(self.blobs.read(key, 0, stat.size if stat else None)), key).read()
        except FileNotFoundError:
            return ""
        except PackError as error:
            if self.blobs.stat(key) != stat:
                return ""
            if repair and isinstance(error, PackCorruptError):
                with suppress(OSError):  # In a store that can only be read, it stays.
                    self.blobs.delete(key)
            return str(error)
        return ""

    # Entries.

    def has(self, entry: Entry, namespaces: Collection[str]) -> int:
        """Return of how many first tokens of `entry` there is KV that a reader of these `namespaces` may read."""
        if not self._may_open(entry, namespaces):
            return 0
        file = self.head(entry)  # Who reads a damaged one deletes it.
        return common_length(file.entry.token_ids, entry.token_ids) if file else len(entry.token_ids)

    def _may_open(self, entry: Entry, namespaces: Collection[str]) -> bool:
        return entry.namespaces <= set(namespaces) and self._stat(entry) is not None

    def open(self, entry: Entry, namespaces: Collection[str], room: KVTensors | None = None) -> EntryFile | None:
        """Open the file of `entry`, to read it tensor by tensor; `None` as `has`, and for a damaged one.

        With `room`, its tensors are read there; `None` where they cannot be.
        """
        if not self._may_open(entry, namespaces):
            return None
        try:
            if room:
                file = _read_into(room, self.blobs, entry)
            else:
                file = _own(open_entry(self.blobs.read(entry.key)), entry.key)
        except FileNotFoundError:
            return None
        except OSError as error:
            if not self.blobs.is_far:
                raise
            names = ", ".join(sorted(entry.owners))
            logger.warning("KV of %s is out of reach, and is computed from its text: %s", names, error)
            return None
        except PackError as error:
            self.discard(entry, error)
            return None
        if file is None or (self._seal is not None and not file.has_mac(self._seal)):
            return None
        self._uses.note(entry.key)
        return file

    def read(self, entry: Entry, namespaces: Collection[str]) -> KVTensors | None:
        """Return the KV (on the CPU) of the tokens that `entry` and the stored one have in common, as `open`."""
        file = self.open(entry, namespaces)
        shared = common_length(file.entry.token_ids, entry.token_ids) if file else 0
        kv = self._read(file) if file and shared else None
        return kv and kv.slice(0, shared)

    def read_into(self, room: KVTensors, entry: Entry, namespaces: Collection[str]) -> bool:
        """As `Packs.read_into`: from the file of a folder."""
        return self.open(entry, namespaces, room) is not None

    def _read(self, file: EntryFile) -> KVTensors | None:
        try:
            return file.read()
        except PackCorruptError as error:
            self.discard(file.entry, error)
            return None

    def discard(self, entry: Entry, damage: Exception) -> None:
        """Delete a damaged entry; one of a later release, or in a store that is only read, stays and is not used."""
        what = "is damaged, deleted, and computed again from its text"
        if not isinstance(damage, PackCorruptError):
            what = "cannot be read, and is computed from its text"
        else:
            try:
                self.blobs.delete(entry.key)
            except OSError:
                what = "is damaged, stays as it is, and is computed from its text"
        logger.warning("KV of %s %s: %s", ", ".join(sorted(entry.owners)), what, damage)

    def write(self, entry: Entry, kv: KVTensors, compression: Compression = "lossless") -> bool:
        """Store `kv` for `entry`; `False` if there is no room, or if one of its owners is gone.

        Raises `PackError` for what the format cannot hold, and if a later release wrote the entry.
        """
        file = encode_entry(entry, kv, compression, self._seal)
        with self._turn(entry.key):
            is_news = self._is_news(file)
            if not self._may_write(entry) or (is_news and not self.quota.make_room({entry.key}, file.nbytes)):
                return False
            if is_news and not self._publish(file):
                return False
        self._uses.note(entry.key)
        if is_news and entry.key.startswith("packs/"):
            self._mark("changes")
        return True

    def _publish(self, file: EntryFile) -> bool:
        """Write a file; `False` if a pack was removed or a namespace forgotten meanwhile, and it was deleted again."""
        self.blobs.write(file.entry.key, file.chunks())
        may_stay = self._may_write(file.entry)
        if not may_stay:
            self.blobs.delete(file.entry.key)
        return may_stay

    def head(self, entry: Entry) -> EntryFile | None:
        """Return what the header of the file of `entry` says, cached by version; `None` if there is none to be read."""
        with suppress(FileNotFoundError, PackError):
            if stat := self.blobs.stat(entry.key, recent=True):
                file = self._heads(entry.key, stat.version)
                return file if self._seal is None or file.has_mac(self._seal) else None
        return None

    def kept(self) -> Iterator[tuple[Entry, int]]:
        """Yield every entry with several owners, and the size of its file."""
        for key, stat in sorted(own_files(self.blobs, BEHIND).items()):
            with suppress(FileNotFoundError, PackError):
                yield self._heads(key, stat.version).entry, stat.size

    def forget(self, namespace: str, *, packs: bool = False) -> int:
        """Delete all KV with words of `namespace` in or before it, and all behind its packs; returns how many entries.

        The packs stay, unless `packs` is true: then their texts and handles go, too, each with a mark. Engines keep
        what they have in memory until `clear_cache`.
        """
        # First the mark: what waits to be written, in any process, sees it before it is written or right behind.
        self._mark(f"forgotten/{check_namespace(namespace)}")
        count = self._drop(namespace)
        self._mark(f"removed/{namespace}")  # Other machines drop their copies.
        self._mark("changes")
        for handle in self.handles(namespace) if packs else ():
            with suppress(PackNotFoundError):  # Another process was sooner.
                self.remove(handle)
                self.bury(handle)
        return count

    def _drop(self, owner: str) -> int:
        """Delete unreadable entries, and those that contain or follow the pack or a text of the namespace `owner`."""
        count, known, self._owners = 0, self._owners, {}
        for key, stat in own_files(self.blobs, BEHIND).items():
            owners = known.get((key, stat.version))
            with suppress(FileNotFoundError, PackCorruptError):
                if owners is None:
                    entry = self._heads(key, stat.version).entry
                    owners = entry.namespaces | entry.owners
            if owners is None or owner in owners:
                count += self.blobs.delete(key)
            else:
                self._owners[key, stat.version] = owners
        return count

    def _stat(self, entry: Entry) -> BlobStat | None:
        """The file of `entry`, unless it is too old or has no MAC where it needs one."""
        stat = self.blobs.stat(entry.key, recent=True)
        if stat is None or self.quota.is_old(entry.key, stat) or (self._seal and self.head(entry) is None):
            return None
        return stat

    def _is_news(self, file: EntryFile) -> bool:
        """Whether a file is not stored as it is; raises `PackError` if a later release wrote the stored one."""
        with suppress(FileNotFoundError, PackCorruptError):
            if stat := self.blobs.stat(file.entry.key):
                return self._heads(file.entry.key, stat.version).head != file.head
        return True

    def _may_write(self, entry: Entry) -> bool:
        """Whether all packs of `entry` are stored, and none of its namespaces was forgotten since it was planned."""
        # The times of files lag behind the clock by a tick of the kernel; object storage rounds to seconds.
        planned = entry.planned - _TICK_S if isinstance(self.blobs, FolderBlobs) else int(entry.planned)
        spaces = entry.namespaces if entry.key.startswith(BEHIND) else ()
        marks = (self.blobs.stat(f"forgotten/{namespace}") for namespace in spaces)
        return all(handle in self for handle in entry.handles) and not any(
            mark and mark.modified >= planned for mark in marks
        )

    # Files.

    def compiled(self, handle: Handle) -> tuple[KnowledgePack, ...]:
        """Return the pack as compiled for each model and prefix, without KV, cached by version; empty if there is none.

        Raises `PackCorruptError` for another text than that of `handle`.
        """
        with suppress(FileNotFoundError):
            if stat := self.blobs.stat(text_key(handle), recent=True):
                try:
                    return self._texts(handle, stat)
                except PackCorruptError as error:
                    if not self._is_configured:
                        raise PackCorruptError(
                            f"The text of the pack {handle} is damaged: {error} Store it anew from its source, or "
                            "remove it; the handle stays the same."
                        ) from error
                    # Perhaps it is of a secret that was configured elsewhere.
        return ()


def _texts_of(secrets: Sequence[bytes], handle: Handle) -> Callable[[str], bool]:
    """Whether a text has this `handle` under one of the secrets."""
    return lambda text: any(mint(secret, handle.namespace, text) == handle for secret in secrets)


def _read_text(
    blobs: Blobs, secrets: Sequence[bytes], handle: Handle, stat: BlobStat | None = None
) -> tuple[KnowledgePack, ...]:
    key = text_key(handle)
    data = blobs.read(key)
    if stat is not None and len(data) != stat.size and blobs.stat(key) == stat:
        raise OSError(f"{blobs}/{key} came in another length than its {stat.size} bytes.")
    packs = decode_text(data, handle.namespace, _texts_of(secrets, handle))
    if len(data) == len(packs[0].text.encode()):  # Nothing stands before the text.
        warn_once(logger, "%s holds KV of release 0.2, which is computed again from its texts.", str(blobs))
    return packs


def _last_removal(blobs: Blobs, namespace: str, _changes: str) -> str | None:
    stat = blobs.stat(f"removed/{namespace}")
    return None if stat is None else stat.version


def _read_head(blobs: Blobs, key: str, _version: str) -> EntryFile:
    """Read the header of a file; raises `FileNotFoundError`, and as `read_header`."""
    while stat := blobs.stat(key):
        try:
            return _header(partial(blobs.read, key, 0), key, stat.size)
        except PackCorruptError:
            if blobs.stat(key) == stat:  # Otherwise another writer replaced it in between.
                raise
    raise FileNotFoundError(key)


def _header(read: Callable[[int], Buffer], key: str, size: int) -> EntryFile:
    """Return what the header of a file of `size` bytes says; `read` returns that many of its first bytes."""
    data = read(_HEAD_BYTES)
    stop = header_stop(data, size)
    return _own(read_header(data if stop <= len(data) else read(stop), size), key)


def _read_into(room: KVTensors, blobs: Blobs, entry: Entry) -> EntryFile | None:
    """Read the file of `entry` into `room`; `None` unless it has the first tokens of `entry`, in the form of `room`."""
    if not isinstance(blobs, FolderBlobs):
        return None
    with blobs.open(entry.key) as opened:

        def head(count: int) -> bytes:
            opened.seek(0)
            return opened.read(count)

        file = _header(head, entry.key, os.fstat(opened.fileno()).st_size)
        has_its_tokens = file.entry.token_ids == entry.token_ids[: len(file.entry.token_ids)]
        return file if has_its_tokens and file.read_into(room, opened) else None


def _own(file: EntryFile, key: str) -> EntryFile:
    """Return `file` if `key` is the key of its entry; raise `PackCorruptError` otherwise."""
    if file.entry.key != key:
        raise PackCorruptError(f"The file holds the entry {file.entry.key}.")
    return file


def open_packs(store: object) -> Packs:
    """Return `store`, or the `PackStore` in a folder or under a URL; raises `PackError` for anything else."""
    if isinstance(store, str | os.PathLike):
        return PackStore(store)
    if not isinstance(store, Packs):
        raise PackError(
            f"Got a {type(store).__name__} as store; expected a `kp_core.PackStore`, its path, or an object of "
            "a class that subclasses `kp_core.Packs`."
        )
    return store
