"""Packs in a folder or in object storage, shared by threads and processes. `docs/format.md` describes the layout."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import struct
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from kp_core.errors import HandleError, PackCorruptError, PackCorruptWarning, PackError, PackNotFoundError, QuotaError
from kp_core.events import log_event
from kp_core.kv import KVTensors
from kp_core.packs.blobs import Blobs, BlobStat, Buffer, FolderBlobs
from kp_core.packs.envelope import header_stop
from kp_core.packs.file import PackFile, encode_pack, has_mac, open_pack, read_header, read_pack, with_mac
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace, mint
from kp_core.packs.kept import KeptEntry
from kp_core.packs.objects import open_blobs
from kp_core.packs.pack import KnowledgePack, PackKey, common_length
from kp_core.packs.secret import forget_secrets, load_secrets
from kp_core.packs.uses import last_use_of
from kp_core.packs.view import Packs
from kp_core.progress import bar_of
from kp_core.threads import make_anew

__all__ = ["PackStore", "default_keep_bytes", "entry_of", "open_packs"]

logger = logging.getLogger(__name__)

_AT_ONCE = 8
_TICK_S = 0.01  # Of a kernel with 100 ticks a second.
_HEAD_BYTES = 1 << 16  # Bytes that the first read of a header fetches.
_MOST_KEPT, _KEPT_SHARE = 2**31, 20
_PEEKED_PACKS = 1024  # About 50 MB of token ids if the packs are banks of facts.
_FILE = re.compile(r"(?:packs|kept)/([^/]+)/[^/]+/([^/.]+)((?:\.[0-9a-f]{16}){0,2})\.(?:safetensors|txt)")

Entry: TypeAlias = tuple[Handle, str]
"""An entry of a text: its handle and its slot, which is `""` for the first entry, else a name from `_slots`."""


class PackStore(Packs):
    """Packs in a folder, under a URL (`s3://bucket/prefix`, `gs://`, `memory://`), or in other `Blobs`.

    Each pack is a text file, and a KV file (an entry) for each model and prefix that it was compiled for. Threads and
    processes may share it: a reader sees a pack whole or not at all. A damaged file goes to `quarantine/` with a
    `PackCorruptWarning`, and its pack becomes lazy. If more than tensors are damaged, it is recovered from its text
    alone, with `token_ids=()` and `ModelFingerprint.unknown()`, and must be built again before use.

    `max_bytes` bounds the files under `packs/`: a `put` that needs space drops the KV of the packs whose last `get` is
    longest ago, but no texts and token ids. KV that was computed behind other packs (option `keep` of a request) is
    bounded by `keep_bytes` (default: 2 GiB, but at most a twentieth of the folder's disk): the least recently used goes
    first, and what was unused for `keep_seconds`.

    `secret` makes handles: 64 hexadecimal digits, or several with commas, newest first, during a rotation. A folder
    makes its own by default. Object storage never holds it (default: the variable `KP_SECRET`). `seal` is a server's
    key for MACs of the entries it writes (`sealed`); kept KV without a valid MAC is then ignored.

    Raises `PackError` for a place that holds other things and no packs, that was made with another secret, or that
    cannot be reached.
    """

    def __init__(  # noqa: PLR0913 - what a store is
        self,
        place: str | os.PathLike[str] | Blobs,
        *,
        secret: str | None = None,
        max_bytes: int | None = None,
        keep_bytes: int | None = None,
        keep_seconds: float | None = None,
        seal: bytes | None = None,
    ) -> None:
        for name, bound in {"max_bytes": max_bytes, "keep_seconds": keep_seconds}.items():
            if bound is not None and bound <= 0:
                raise QuotaError(f"Got {name}={bound}; expected a positive number, or None for no bound.")
        if keep_bytes is not None and keep_bytes < 0:
            raise QuotaError(f"Got keep_bytes={keep_bytes}; expected a number of bytes, or 0 to keep nothing.")
        self.blobs: Blobs = open_blobs(place) if isinstance(place, str | os.PathLike) else place
        self.max_bytes, self.keep_seconds, self._seal = max_bytes, keep_seconds, seal
        self._source, self._given_secrets = place, bool(secret or seal)
        self.keep_bytes = default_keep_bytes(self.blobs) if keep_bytes is None else keep_bytes
        try:
            self.secrets = load_secrets(self.blobs, secret)
        except NotADirectoryError as error:
            raise PackError(
                f"{self.blobs} is a file, or lies in one; expected a folder. `kp status FILE` shows a pack file."
            ) from error
        except OSError as error:
            if self.blobs.is_far:
                raise PackError(str(error)) from error
            raise
        self._is_configured = bool(secret) or self.blobs.is_far
        self._uses = last_use_of(self.blobs)
        self._peeked = lru_cache(_PEEKED_PACKS)(partial(_peek, self.blobs, self.secrets))
        # The packs and namespaces of each kept entry and version, so that deleting packs reads no entry twice.
        self._owners: dict[tuple[Handle, str], frozenset[str]] = {}
        self.forked()
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: another thread may have held the lock."""
        # Threads free space one at a time, so that together they stay within the bound.
        self._turn: AbstractContextManager[object] = nullcontext() if self.max_bytes is None else threading.Lock()

    def _opens(self) -> Callable[[], PackStore]:
        if self._given_secrets:
            raise PackError(
                f"The store {self.blobs} was opened with a secret or seal, which is not pickled. Set KP_SECRET for all "
                "processes instead, or open the store in the process that needs it."
            )
        bounds = {name: getattr(self, name) for name in ("max_bytes", "keep_bytes", "keep_seconds")}
        return partial(PackStore, str(self.blobs) if isinstance(self.blobs, FolderBlobs) else self._source, **bounds)

    def __repr__(self) -> str:
        return f"PackStore({str(self.blobs)!r}, max_bytes={self.max_bytes})"

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

    def note_change(self) -> None:
        """Change the token that tells all processes that packs were added or removed."""
        self.blobs.write("changes", [os.urandom(8)])

    @property
    def nbytes(self) -> int:
        """Bytes of all files under `packs/`, which `max_bytes` bounds."""
        return sum(stat.size for _, stat in self.blobs.list("packs/"))

    def handle(self, text: str, namespace: str) -> Handle:
        """Return the handle of `text`, stored or not; raises `HandleError` for bad names and non-Unicode text."""
        try:
            return mint(self.secrets[0], namespace, text)
        except UnicodeEncodeError as error:
            raise HandleError(f"Got text that is not Unicode: {error}. Decode it with errors='replace'.") from error

    # Packs.

    def put(self, pack: KnowledgePack) -> Handle:
        """Store `pack`; storing it again writes nothing.

        It replaces the entry of the same text, model and prefix; a lazy pack does not replace usable KV. Raises
        `QuotaError` if `max_bytes` leaves no room, `PackError` for what the format cannot hold and if a later release
        wrote the file; the store is then unchanged.
        """
        handle = self.handle(pack.text, pack.namespace)
        slot, done, entered = self._write_entry(handle, pack)
        # Write the text after the pack, because a text without a pack counts as a damaged pack.
        if self._write_text(handle, pack.text):
            entered = True
            if self.blobs.stat(_entry_key(handle)) is None:  # Another process removed the pack in between.
                self.blobs.delete(_text_key(handle))
        self._note_entry(handle, slot, done=done, entered=entered)
        return handle

    def put_again(self, pack: KnowledgePack) -> bool:
        """As `put` if the text is stored; `False`, and stores nothing, if it is removed before or meanwhile."""
        handle = self.handle(pack.text, pack.namespace)
        if self.blobs.stat(_text_key(handle)) is None:
            return False
        slot, done, entered = self._write_entry(handle, pack)
        if self.blobs.stat(_text_key(handle)) is None:  # `remove` deletes the text first.
            if done:
                self.blobs.delete(_entry_key(handle, slot))
            return False
        self._note_entry(handle, slot, done=done, entered=entered)
        return True

    def _write_entry(self, handle: Handle, pack: KnowledgePack) -> tuple[str, bool, bool]:
        """Write the entry of `pack`, but no text; returns its slot, whether it was written, and whether it is new."""
        encoded = encode_pack(pack)
        slot, done, absent = "", False, False
        while not done:
            slot, stored, absent = self._place(handle, pack)
            if not _displaces(pack, encoded, stored):
                break
            with self._turn:
                if self.max_bytes is not None:
                    self._make_room((handle, slot), encoded.nbytes + len(pack.text.encode()), self.max_bytes)
                # `if_absent` keeps KV that another writer stores at this moment.
                done = self.blobs.write(_entry_key(handle, slot), encoded.chunks(), if_absent=absent and pack.is_lazy)
            if done and slot and self.blobs.stat(_entry_key(handle)) is None:  # Removed meanwhile: now the first.
                self.blobs.delete(_entry_key(handle, slot))
                done = False
        return slot, done, done and absent

    def _note_entry(self, handle: Handle, slot: str, *, done: bool, entered: bool) -> None:
        if entered:
            self.note_change()
        self._uses.note(f"{handle}{slot}")
        if done and not self.blobs.is_far:
            self.look(handle, slot)  # Its header is parsed and cached now, not while a question waits.

    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:
        """Return the pack without its KV, with `stored_bytes`; `None` if there is none. Raises as `get`.

        Returns the entry that fits `key`, else the first one of that model, else the first one. Notices damage to the
        header and length of a file, not to its tensors.
        """
        _, peeked = self._find(handle, key)
        if peeked is None:
            pack = self._read(handle)
            return pack and replace(pack, kv=None, stored_bytes=pack.nbytes)
        return peeked

    def look(self, handle: Handle, slot: str = "") -> KnowledgePack | None:
        """Return the entry in `slot` without its KV, cached by version; `None` if it is absent or visibly damaged."""
        with suppress(FileNotFoundError, PackCorruptError):
            if stat := self.blobs.stat(_entry_key(handle, slot), recent=True):
                return self._peeked(handle, slot, stat.version)
        return None

    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:
        """Return the entry that `peek` returns, with its KV (on the CPU) if that is stored and intact.

        Raises `PackNotFoundError` if there is none, `PackCorruptError` if file and text are both damaged (both are then
        in quarantine, and the pack is gone), `PackError` if a later release wrote the file.
        """
        slot, peeked = ("", None) if key is None else self._find(handle, key)
        try:
            pack = self._read(handle, slot)
            if pack is None and slot:
                slot, pack = "", self._read(handle)
        except OSError as error:
            if peeked is None or not self.blobs.is_far:
                raise
            logger.warning("The KV of %s is out of reach, and is computed from its text: %s", handle, error)
            return peeked
        if pack is None:
            raise PackNotFoundError(f"{self.blobs} has no pack {handle}. Build it and `put` it, or check the path.")
        self._uses.note(f"{handle}{slot}")
        return pack

    def open(self, handle: Handle, key: PackKey) -> PackFile:
        """Open the entry that `get` returns, to read it tensor by tensor; only `get` repairs damage.

        Raises `PackNotFoundError` if there is none, `PackCorruptError` if its header shows damage, `PackError` if the
        store has a `seal` and the entry no valid MAC.
        """
        slot, _ = self._find(handle, key)
        try:
            file = open_pack(self.blobs.read(_entry_key(handle, slot)))
        except FileNotFoundError as error:
            raise PackNotFoundError(f"{self.blobs} has no pack {handle}.") from error
        _own(self.secrets, handle, file.pack)
        if self._seal is not None and not has_mac(file, self._seal):
            raise PackError(f"The KV of {handle} does not carry the MAC of this server's key.")
        self._uses.note(f"{handle}{slot}")
        return file

    def sealed(self, pack: KnowledgePack) -> KnowledgePack:
        """Return `pack` with a MAC in its provenance; without a `seal`, return it as it is."""
        return pack if self._seal is None else with_mac(pack, self._seal)

    def is_sealed(self, handle: Handle, key: PackKey) -> bool:
        """Whether the entry that `peek` returns has a valid MAC; always true without a `seal`."""
        with suppress(PackError):
            return self._seal is None or self._has_mac(handle, _entry_key(handle, self._find(handle, key)[0]))
        return False

    def prefetch(self, wanted: Collection[tuple[Handle, PackKey | None]]) -> None:
        """Look up several entries in parallel if the storage is far; their first use reports errors."""

        def look_up(entry: tuple[Handle, PackKey | None]) -> None:
            with suppress(OSError, PackError):
                self._find(*entry)

        if self.blobs.is_far and len(wanted) > 1:
            with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
                list(pool.map(look_up, wanted))

    def last_used(self) -> dict[str, float]:
        """Return when each pack was last stored or read, by handle, in seconds since 1970, as far as written."""
        used = dict[str, float]()
        for name, used_at in self._uses.times().items():
            handle = name.partition(".")[0]  # Behind the point stands the slot of another entry.
            used[handle] = max(used_at, used.get(handle, 0.0))
        return used

    def entries(self, handle: Handle) -> Iterator[KnowledgePack]:
        """Yield the pack without KV as compiled for each model and prefix, the first entry first."""
        for slot in ("", *sorted(self._beside(handle), key=len)):
            if pack := self.look(handle, slot):
                yield pack

    def handles(self, namespace: str | None = None) -> Iterator[Handle]:
        """Return the handles of all packs, or of one namespace, sorted."""
        prefix = "packs/" if namespace is None else f"packs/{check_namespace(namespace)}/"
        entries = map(entry_of, (key for key, _ in self.blobs.list(prefix)))
        return iter(sorted({entry[0] for entry in entries if entry and not entry[1]}))

    __iter__ = handles

    def __len__(self) -> int:
        return sum(1 for _ in self.handles())

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, Handle) and any(map(self.blobs.stat, (_entry_key(handle), _text_key(handle))))

    def texts(self, namespaces: Collection[str], known: Collection[Handle] = ()) -> Iterator[tuple[Handle, str]]:
        """Yield the packs of these namespaces that are not in `known`, each with its text; see `changes`."""
        for namespace in namespaces:
            ids = {handle.id for handle in known if handle.namespace == namespace}
            # Names are compared first: making the handles of all known packs takes longer than listing them.
            keys = [key for key, _ in self.blobs.list(f"packs/{check_namespace(namespace)}/")]
            unknown = (key for key in keys if key.rpartition("/")[2].partition(".")[0] not in ids)
            new = sorted({entry[0] for entry in map(entry_of, unknown) if entry and not entry[1]})
            with ThreadPoolExecutor(_AT_ONCE) as pool:  # It starts its threads when it is first used.
                texts = (pool.map if self.blobs.is_far else map)(self._text, new)
                yield from ((handle, text) for handle, text in zip(new, texts, strict=True) if text is not None)

    def remove(self, handle: Handle) -> None:
        """Delete the pack, its text, its quarantined files and KV kept behind it; raises `PackNotFoundError`."""
        self._drop_kept(str(handle))
        aside = [key for key, _ in self.blobs.list(f"quarantine/{handle.namespace}.{handle.id}.")]
        # Text first: a text without a pack would count as a damaged pack and be repaired.
        deleted = [self.blobs.delete(_text_key(handle))]
        deleted += map(self.blobs.delete, (*self._files(handle), *aside))
        if not any(deleted):
            raise PackNotFoundError(f"{self.blobs} has no pack {handle} to remove.")
        self._drop_kept(str(handle))  # Delete what was kept meanwhile.
        self.note_change()

    def rotate(self) -> int:
        """Give every pack with a handle of an earlier secret one of the first secret; returns their number.

        Old handles stop working. After an interruption, call it again.
        """
        moved = 0
        for handle in list(self.handles()):
            pack = self.peek(handle)
            new_handle = self.handle(pack.text, pack.namespace) if pack else handle
            if pack and new_handle != handle:
                for slot in ("", *self._beside(handle)):
                    with suppress(FileNotFoundError):
                        data = self.blobs.read(_entry_key(handle, slot))
                        self.blobs.write(_entry_key(new_handle, slot), [data], if_absent=True)
                self._write_text(new_handle, pack.text)
                self.note_change()
                self.remove(handle)
                moved += 1
        forget_secrets(self.blobs, self.secrets[1:])
        return moved

    def verify(self) -> Iterator[tuple[Handle, str]]:
        """Yield each damaged pack and its damage; checks every digest and changes nothing."""
        for handle in self:
            files = self._files(handle)
            for key in sorted({_entry_key(handle), *files} - {_text_key(handle)}):
                try:
                    # A ranged read bypasses the local cache.
                    data = self.blobs.read(key, 0, files[key].size if key in files else 0)
                    _own(self.secrets, handle, read_pack(data))
                except (FileNotFoundError, PackError) as error:
                    yield handle, str(error) if key in files else "The file is missing."

    # KV that was computed behind other packs.

    def kept(self) -> Iterator[KeptEntry]:
        """Yield every kept entry, with its size."""
        for (handle, _), stat in sorted(self._kept().items()):
            if entry := self._kept_entry(handle):
                yield replace(entry, nbytes=stat.size)

    def has_kept(self, entry: KeptEntry, namespaces: Collection[str]) -> bool:
        """Whether there is KV for `entry` that a view of these `namespaces` may read."""
        handle = self._readable(entry, namespaces)
        return handle is not None and (self._seal is None or self._has_mac(handle, _kept_key(handle)))

    def read_kept(self, entry: KeptEntry, namespaces: Collection[str]) -> KVTensors | None:
        """Return the KV (on the CPU) of the tokens that `entry` and the kept entry have in common, as `has_kept`."""
        handle = self._readable(entry, namespaces)
        if handle is None:
            return None
        try:
            file = open_pack(self.blobs.read(_kept_key(handle)))
            pack = _own(self.secrets, handle, file.read())
        except OSError:  # Absent or unreachable: the model computes it.
            return None
        except PackError as error:
            logger.warning("An entry kept behind %s is dropped: %s", ", ".join(entry.packs), error)
            with suppress(OSError):  # In a read-only store, it is skipped each time.
                self.blobs.delete(_kept_key(handle))
            return None
        if self._seal is not None and not has_mac(file, self._seal):
            return None
        self._uses.note(_kept_name((handle, "")))
        shared = common_length(pack.token_ids, entry.token_ids)
        return pack.kv.slice(0, shared) if pack.kv and shared else None

    def write_kept(self, entry: KeptEntry, kv: KVTensors) -> bool:
        """Store `kv` for `entry`; `False` if `keep_bytes` has no room, or if a pack or namespace of it is gone."""
        pack = KnowledgePack(entry.text, entry.home, entry.token_ids, (), entry.model, kv).compressed("lossless")
        handle, file = self.handle(pack.text, pack.namespace), encode_pack(self.sealed(pack))
        keep = self.keep_bytes
        if file.nbytes > keep or not self._may_keep(entry):
            return False
        listed = self._kept()
        listed.pop((handle, ""), None)
        used, dropped = file.nbytes + sum(stat.size for stat in listed.values()), 0
        for other in self._oldest_first(listed, _kept_name):
            if used <= keep and not self._is_old(other, listed[other]):
                break
            dropped += self.blobs.delete(_kept_key(other[0]))
            used -= listed[other].size
        if dropped:
            logger.info("Deleted %d kept entries of %s for newer ones (keep_bytes=%d).", *(dropped, self.blobs, keep))
        self.blobs.write(_kept_key(handle), file.chunks())
        self._uses.note(_kept_name((handle, "")))
        if not self._may_keep(entry):  # A pack was removed or a namespace forgotten meanwhile.
            self.blobs.delete(_kept_key(handle))
            return False
        return True

    def forget(self, namespace: str) -> int:
        """Delete all KV kept in `namespace` or behind it, but no packs; returns the number of entries."""
        # First the mark: what waits to be written, in any process, sees it before it is written or right behind.
        self.blobs.write(_forgotten_key(check_namespace(namespace)), [os.urandom(8)])
        return self._drop_kept(namespace)

    def _drop_kept(self, owner: str) -> int:
        """Delete unreadable entries, and those that contain or follow the pack or a text of the namespace `owner`."""
        count, known, self._owners = 0, self._owners, {}
        for (handle, _), stat in self._kept().items():
            owners = known.get((handle, stat.version))
            if owners is None and (entry := self._kept_entry(handle)):
                owners = entry.namespaces.union(entry.packs)
            if owners is None or owner in owners:
                count += self.blobs.delete(_kept_key(handle))
            else:
                self._owners[handle, stat.version] = owners
        return count

    def _readable(self, entry: KeptEntry, namespaces: Collection[str]) -> Handle | None:
        """Return where `entry` is kept, if it is, is not too old, and may be read by a view of `namespaces`."""
        if not entry.namespaces <= set(namespaces):
            return None
        handle = self.handle(entry.text, entry.home)
        stat = self.blobs.stat(_kept_key(handle), recent=True)
        return None if stat is None or self._is_old((handle, ""), stat) else handle

    def _kept(self) -> dict[Entry, BlobStat]:
        return _entries(dict(self.blobs.list("kept/")))

    def _kept_entry(self, handle: Handle) -> KeptEntry | None:
        with suppress(FileNotFoundError, PackCorruptError, ValueError, KeyError):
            return KeptEntry.of(_head(self.blobs, self.secrets, handle, _kept_key(handle)).pack)
        return None

    def _is_old(self, entry: Entry, stat: BlobStat) -> bool:
        """Whether a kept entry was unused for longer than `keep_seconds`."""
        if self.keep_seconds is None or time.time() - stat.modified <= self.keep_seconds:
            return False
        return time.time() - max(self._uses.times().get(_kept_name(entry), 0), stat.modified) > self.keep_seconds

    def _may_keep(self, entry: KeptEntry) -> bool:
        """Whether all packs of `entry` are stored, and none of its namespaces was forgotten since it was planned."""
        # The times of files lag behind the clock by a tick of the kernel; object storage rounds to seconds.
        planned = entry.planned - _TICK_S if isinstance(self.blobs, FolderBlobs) else int(entry.planned)
        marks = (self.blobs.stat(_forgotten_key(namespace)) for namespace in entry.namespaces)
        return all(self.blobs.stat(_text_key(Handle.parse(pack))) for pack in entry.packs) and not any(
            mark and mark.modified >= planned for mark in marks
        )

    # Where an entry lies.

    def _find(self, handle: Handle, key: PackKey | None) -> tuple[str, KnowledgePack | None]:
        """Return the slot and the entry that `peek` returns; `None` for a pack that is damaged or absent."""
        slot, pack = "", self.look(handle)
        if key is None or (pack and key.fits(pack)):
            return slot, pack
        of_model, behind = _slots(key)
        if pack is None or pack.fingerprint != key.model:
            if (pack_of_model := self.look(handle, of_model)) is None:
                return self._earlier(handle, pack, key.model)
            slot, pack = of_model, pack_of_model
        pack_behind = None if key.fits(pack) else self.look(handle, behind)
        return (slot, pack) if pack_behind is None else (behind, pack_behind)

    def _earlier(
        self, handle: Handle, first: KnowledgePack | None, model: ModelFingerprint
    ) -> tuple[str, KnowledgePack | None]:
        """Return the entry that an earlier release made for `model` beside `first`, one of another model, else `first`.

        It says that the text is for this model too. Today's fingerprints do not give its slot name.
        """
        fingerprint = ModelFingerprint.unknown() if first is None else first.fingerprint
        if fingerprint != ModelFingerprint.unknown() and not fingerprint.same_model(model):
            for slot in self._beside(handle):
                pack = self.look(handle, slot)
                if pack is not None and _is_spare(pack, model):
                    return slot, pack
        return "", first

    def _place(self, handle: Handle, pack: KnowledgePack) -> tuple[str, PackFile | None, bool]:
        """Return the first slot that is the pack's own, free or not needed, its intact file, and whether it is free."""
        is_same_model, (of_model, behind) = False, _slots(pack.key)
        for slot in ("", of_model, behind):
            if is_same_model and slot != behind:
                continue
            try:
                file = _head(self.blobs, self.secrets, handle, _entry_key(handle, slot))
            except FileNotFoundError:
                return slot, None, True
            except PackCorruptError:
                return slot, None, False
            if pack.key.fits(file.pack) or _is_text_alone(pack) or _is_spare(file.pack, pack.fingerprint):
                break
            is_same_model = file.pack.fingerprint == pack.fingerprint
        return slot, file, False

    def _files(self, handle: Handle) -> dict[str, BlobStat]:
        return dict(self.blobs.list(_text_key(handle).removesuffix("txt")))

    def _beside(self, handle: Handle) -> list[str]:
        """Return the slots of all entries except the first."""
        return sorted({entry[1] for key in self._files(handle) if (entry := entry_of(key)) and entry[1]})

    # What is read, checked and repaired.

    def _has_mac(self, handle: Handle, key: str) -> bool:
        with suppress(FileNotFoundError, PackError):
            return self._seal is None or has_mac(_head(self.blobs, self.secrets, handle, key), self._seal)
        return False

    def _text(self, handle: Handle) -> str | None:
        """Return the text stored beside the pack; `None` if it is absent or belongs to another handle."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            text = str(self.blobs.read(_text_key(handle)), "utf-8")
            return text if _is_of(self.secrets, handle, text, handle.namespace) else None
        return None

    def _write_text(self, handle: Handle, text: str) -> bool:
        """Write the text if it is absent or damaged; returns whether it was absent."""
        absent = self.blobs.stat(_text_key(handle)) is None
        if absent or self._text(handle) is None:
            self.blobs.write(_text_key(handle), [text.encode()])
        return absent

    def _read(self, handle: Handle, slot: str = "") -> KnowledgePack | None:
        """Return an entry with its KV, `None` if there is none; repairs a first entry, and quarantines another one."""
        data, key = None, _entry_key(handle, slot)
        seen = None if slot else self.blobs.stat(key)
        try:
            data = self.blobs.read(key)
            pack = read_pack(data)
            if self._is_configured and not _is_of(self.secrets, handle, pack.text, pack.namespace):
                return None  # Perhaps it is of a secret that was configured elsewhere.
            return _own(self.secrets, handle, pack)
        except FileNotFoundError:
            if slot:
                return None
            damage = "The file is missing."
        except PackCorruptError as error:
            damage = str(error)
        if data is not None and slot:
            try:
                aside = self._set_aside(handle, "safetensors", data)
                self.blobs.delete(key)
            except OSError as denied:
                aside = f"nothing, as nobody can write there ({denied})"
            _warn(f"An entry of the pack {handle} is damaged: {damage} Its KV is lost. Set aside: {aside}.")
            return None
        intact = self._salvage(handle, data)
        try:
            return self._mended(handle, intact, data, seen, damage)
        except OSError as error:  # The store is read-only; return what is intact.
            if intact is None:
                raise PackCorruptError(f"The pack {handle} is damaged, and so is its text: {damage}") from error
            _warn(f"The pack {handle} is damaged: {damage} Its KV is lost, and it stays as it is: {error}.")
            return intact

    def _salvage(self, handle: Handle, data: Buffer | None) -> KnowledgePack | None:
        """Return what is intact of a damaged pack: all but its KV, its text alone, or nothing (`None`)."""
        if data is not None:
            with suppress(PackCorruptError):
                return _own(self.secrets, handle, read_header(data).pack)
        text = self._text(handle)
        if text is None and data is not None:  # If the file is missing too, another process is removing the pack.
            text = next((entry.text for slot in self._beside(handle) if (entry := self.look(handle, slot))), None)
        if text is None:
            return None
        return KnowledgePack(text, handle.namespace, (), (), ModelFingerprint.unknown())

    def _mended(
        self, handle: Handle, pack: KnowledgePack | None, data: Buffer | None, seen: BlobStat | None, damage: str
    ) -> KnowledgePack | None:
        """Quarantine the damaged files, and store `pack`, the intact part of the pack, in their place."""
        aside = [] if data is None else [self._set_aside(handle, "safetensors", data)]
        if pack is None:
            if data is None and self._text(handle) is not None:
                return self._read(handle)  # There was no pack, and now another writer stores it.
            with suppress(FileNotFoundError):
                aside.append(self._set_aside(handle, "txt", self.blobs.read(_text_key(handle))))
            if not aside:
                return None
            first = {_text_key(handle): None, _entry_key(handle): None}
            for key in self._files(handle).keys() - first:
                with suppress(FileNotFoundError):
                    aside.append(self._set_aside(handle, "safetensors", self.blobs.read(key)))
            for key in (*first, *self._files(handle)):
                self.blobs.delete(key)
            self.note_change()
            raise PackCorruptError(
                f"The pack {handle} is damaged, and so is its text: {damage} Set aside: {', '.join(aside)}. "
                "Store it anew from its source; the handle stays the same."
            )
        self._write_text(handle, pack.text)
        if not self._replace(handle, encode_pack(pack), seen):
            return self._read(handle)  # Another writer was faster.
        intact = "text and token ids are" if pack.fingerprint != ModelFingerprint.unknown() else "text is"
        _warn(
            f"The pack {handle} is damaged: {damage} Its {intact} intact; its KV is lost, and is computed at each use "
            f"until the pack is built again. Set aside: {', '.join(aside) or 'nothing'}."
        )
        return pack

    def _set_aside(self, handle: Handle, kind: str, data: Buffer) -> str:
        """Copy damaged bytes to quarantine under a new name, and return that name."""
        names = (f"quarantine/{handle.namespace}.{handle.id}.{number}.{kind}" for number in itertools.count(1))
        return f"{self.blobs}/{next(key for key in names if self.blobs.write(key, [data], if_absent=True))}"

    def _replace(self, handle: Handle, lazy: PackFile, seen: BlobStat | None) -> bool:
        """Write `lazy` if the file is still the version `seen`; a pack that is removed meanwhile stays removed."""
        key = _entry_key(handle)
        if self.blobs.stat(key) != seen:
            return False
        is_written = self.blobs.write(key, lazy.chunks(), if_absent=seen is None)
        if self.blobs.stat(_text_key(handle)) is None:  # `remove` deletes the text first.
            self.blobs.delete(key)
        return is_written

    # Room.

    def _oldest_first(self, entries: Mapping[Entry, BlobStat], name: Callable[[Entry], str]) -> list[Entry]:
        """Return the entries in the order of their last use; `name` gives the name under which it is noted."""
        times = self._uses.times() if entries else {}
        return sorted(entries, key=lambda entry: (max(times.get(name(entry), 0), entries[entry].modified), entry))

    def _make_room(self, own: Entry, size: int, max_bytes: int) -> None:
        """Drop the least recently used KV until `size` bytes of the entry `own` and its text fit under `packs/`.

        The first entry of a pack loses its KV; other entries are deleted. One that another writer is storing or
        removing now counts as dropped, but stays. Raises `QuotaError`, and drops nothing, if the bytes cannot fit.
        """
        own_keys = {_entry_key(*own), _text_key(own[0])}
        while True:
            listed = dict(self.blobs.list("packs/"))
            excess = size + sum(stat.size for key, stat in listed.items() if key not in own_keys) - max_bytes
            dropped, excess = self._droppable(listed, own, excess)
            if excess <= 0:
                break
            if dict(self.blobs.list("packs/")) == listed:  # Otherwise another writer stored or dropped something.
                raise QuotaError(
                    f"The pack needs {size} bytes. With it, and without the KV of the others, {self.blobs} would hold "
                    f"{max_bytes + excess} bytes; max_bytes is {max_bytes}. "
                    "Raise max_bytes, remove packs, or put `pack.without_kv()`."
                )
        logger.info(
            "Dropping the KV of %d packs of %s for newer ones (max_bytes=%d).", len(dropped), self.blobs, max_bytes
        )
        log_event(logger, "KV dropped from the store", packs=len(dropped), max_bytes=max_bytes)
        for (handle, slot), lazy in bar_of("Dropping KV", None, "pack", dropped.items()):
            key = _entry_key(handle, slot)
            if not slot:
                self._replace(handle, lazy, listed[key])
            elif self.blobs.stat(key) == listed[key]:
                self.blobs.delete(key)

    def _droppable(self, listed: Mapping[str, BlobStat], own: Entry, excess: int) -> tuple[dict[Entry, PackFile], int]:
        """Return the entries to drop for `excess` bytes, each with its file without KV, and what excess remains."""
        entries = _entries(listed) if excess > 0 else {}
        entries.pop(own, None)
        dropped = dict[Entry, PackFile]()
        for entry in self._oldest_first(entries, _use_name):
            if excess <= 0:
                break
            with suppress(PackError, FileNotFoundError):  # Leave files of a later release alone.
                pack = self.look(*entry)
                if pack is None:
                    excess -= entries[entry].size
                elif pack.stored_bytes:
                    lazy = encode_pack(pack)
                    excess -= entries[entry].size - (0 if entry[1] else lazy.nbytes)
                    if _text_key(entry[0]) in listed:
                        dropped[entry] = lazy
        return dropped, excess


def default_keep_bytes(blobs: Blobs) -> int:
    """Return the bytes of kept KV that a store has room for by default: a twentieth of its disk, at most 2 GiB."""
    if not isinstance(blobs, FolderBlobs):
        return _MOST_KEPT
    folders = (blobs.path, *blobs.path.parents)  # The first of them need not exist yet.
    disk = next((shutil.disk_usage(folder).total for folder in folders if folder.is_dir()), _MOST_KEPT * _KEPT_SHARE)
    return min(_MOST_KEPT, disk // _KEPT_SHARE)


def _head(blobs: Blobs, secrets: Sequence[bytes], handle: Handle, key: str) -> PackFile:
    """Read the header of a pack file; raises `FileNotFoundError`, or `PackCorruptError` for damage that it shows."""
    while True:
        stat = blobs.stat(key)
        if stat is None:
            raise FileNotFoundError(key)
        try:
            data = blobs.read(key, 0, _HEAD_BYTES)
            stop = header_stop(data, stat.size)
            file = read_header(data if stop <= len(data) else blobs.read(key, 0, stop), stat.size)
            _own(secrets, handle, file.pack)
            return file.undamaged()
        except PackCorruptError:
            if blobs.stat(key) == stat:  # Otherwise another writer replaced it in between.
                raise


def _peek(blobs: Blobs, secrets: Sequence[bytes], handle: Handle, slot: str, _version: str) -> KnowledgePack:
    file = _head(blobs, secrets, handle, _entry_key(handle, slot))
    return replace(file.pack, stored_bytes=sum(file.sizes))


def _own(secrets: Sequence[bytes], handle: Handle, pack: KnowledgePack) -> KnowledgePack:
    """Return `pack` if `handle` is its handle under one of the secrets; raise `PackCorruptError` otherwise."""
    if not _is_of(secrets, handle, pack.text, pack.namespace):
        raise PackCorruptError(f"The file holds another text than that of {handle}, or comes from another store.")
    return pack


def _is_of(secrets: Sequence[bytes], handle: Handle, text: str, namespace: str) -> bool:
    """Whether `handle` is the handle of `text` in `namespace`, under one of the secrets."""
    return any(mint(secret, namespace, text) == handle for secret in secrets)


def _warn(message: str) -> None:
    logger.warning(message)
    # Last, because a filter may turn the warning into an error.
    warnings.warn(message, PackCorruptWarning, stacklevel=4)


def _entry_key(handle: Handle, slot: str = "", root: str = "packs") -> str:
    return f"{root}/{handle.namespace}/{handle.id[:2]}/{handle.id}{slot}.safetensors"


def _text_key(handle: Handle) -> str:
    return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.txt"


def _kept_key(handle: Handle) -> str:
    return _entry_key(handle, root="kept")


def _forgotten_key(namespace: str) -> str:
    return f"kept/{namespace}/forgotten"


def _use_name(entry: Entry) -> str:
    return f"{entry[0]}{entry[1]}"


def _kept_name(entry: Entry) -> str:
    return f"kept:{entry[0].namespace}/{entry[0].id}"


def _slots(key: PackKey) -> tuple[str, str]:
    """Return the slots of further entries of a text: that of the model alone, and that of the model and prefix."""
    of_model = f".{blake2b(key.model.id.encode(), digest_size=8).hexdigest()}"
    prefix = key.prefix or ()
    numbers = (len(prefix), *prefix)
    behind = blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8)
    return of_model, f"{of_model}.{behind.hexdigest()}"


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


def entry_of(key: str) -> Entry | None:
    """Return handle and slot of the pack or text at `key`; `None` if `key` is not ours."""
    match = _FILE.fullmatch(key)
    with suppress(HandleError):
        return (Handle(match[1], match[2]), match[3]) if match else None
    return None


def _entries(listed: Mapping[str, BlobStat]) -> dict[Entry, BlobStat]:
    return {entry: stat for key, stat in listed.items() if key.endswith(".safetensors") and (entry := entry_of(key))}


def _displaces(pack: KnowledgePack, encoded: PackFile, stored: PackFile | None) -> bool:
    if stored is None:
        return True
    if stored.head == encoded.head or _is_text_alone(pack):
        return False
    return not pack.is_lazy or stored.dtype is None or _is_spare(stored.pack, pack.fingerprint)


def _is_spare(stored: KnowledgePack, model: ModelFingerprint) -> bool:
    """Whether `model` can do without `stored`: recovered from text alone, or made by an earlier release of `model`."""
    fingerprint = stored.fingerprint
    return fingerprint == ModelFingerprint.unknown() or (fingerprint.is_earlier and fingerprint.same_model(model))


def _is_text_alone(pack: KnowledgePack) -> bool:
    """Whether the pack has neither KV nor a model to compute it."""
    return pack.is_lazy and pack.fingerprint == ModelFingerprint.unknown()
