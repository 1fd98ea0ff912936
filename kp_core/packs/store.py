"""Packs in a folder or in object storage, shared by threads and processes. `docs/format.md` describes the layout."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from kp_core.errors import PackCorruptError, PackError, PackNotFoundError, QuotaError
from kp_core.packs.blobs import Blobs, FolderBlobs
from kp_core.packs.file import PackFile, Seal, encode_pack, read_pack
from kp_core.packs.files import (
    PackCorruptWarning,
    PackFiles,
    displaces,
    handle_of,
    is_spare,
    is_text_alone,
    pack_key,
    slots,
    text_key,
)
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace
from kp_core.packs.kept import KeptEntries
from kp_core.packs.objects import open_blobs
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.room import LastUse, make_room
from kp_core.packs.secret import forget_secrets, load_secrets
from kp_core.packs.view import Packs

__all__ = ["PackCorruptWarning", "PackStore"]

logger = logging.getLogger(__name__)

_AT_ONCE = 8


class PackStore(Packs):
    """Packs in a folder, under a URL (`s3://bucket/prefix`, `gs://`, `memory://`), or in other `Blobs`.

    Each pack is a text file, and a KV file (an entry) for each model and prefix that it was compiled for.

    Any number of threads and processes may use it: a reader sees a pack whole or not at all. A damaged file goes to
    `quarantine/` with a `PackCorruptWarning`, and its pack becomes lazy. It keeps its token ids if only tensors are
    damaged. Otherwise it is recovered from its text alone, with `token_ids=()`, an empty prefix and
    `ModelFingerprint.unknown()`, and must be built again from its text before use.

    `max_bytes` bounds the files under `packs/`: a `put` that needs space drops the KV of the packs whose last `get` is
    longest ago. Texts and token ids are never dropped. Processes that `put` at the same moment may exceed the bound
    until the next `put`. `keep_bytes` and `keep_seconds` bound `kept`.

    `secret` makes handles: 64 hexadecimal digits, or several with commas, newest first, during a rotation. A folder
    makes its own by default. Object storage never holds it (default: the variable `KP_SECRET`). Raises `PackError` for
    a place that holds other things and no packs, that was made with another secret, or that cannot be reached.

    `seal` is a server's key for MACs of the entries it writes (`is_sealed`). With a `seal`, kept KV without a valid MAC
    is ignored.
    """

    def __init__(  # noqa: PLR0913 - what a store is
        self,
        place: str | os.PathLike[str] | Blobs,
        *,
        secret: str | None = None,
        max_bytes: int | None = None,
        keep_bytes: int = 2**31,
        keep_seconds: float | None = None,
        seal: bytes | None = None,
    ) -> None:
        for name, bound in {"max_bytes": max_bytes, "keep_seconds": keep_seconds}.items():
            if bound is not None and bound <= 0:
                raise QuotaError(f"Got {name}={bound}; expected a positive number, or None for no bound.")
        if keep_bytes < 0:
            raise QuotaError(f"Got keep_bytes={keep_bytes}; expected a number of bytes, or 0 to keep nothing.")
        self.blobs: Blobs = open_blobs(place) if isinstance(place, str | os.PathLike) else place
        self.max_bytes = max_bytes
        try:
            secrets = load_secrets(self.blobs, secret)
        except OSError as error:
            if self.blobs.is_far:
                raise PackError(str(error)) from error
            raise
        self.files = PackFiles(self.blobs, secrets, are_configured=bool(secret) or self.blobs.is_far)
        """The files under `packs/`, for engines that read only headers."""
        self._uses = LastUse(self.blobs)
        self.seal = None if seal is None else Seal(seal)
        self.kept: KeptEntries = KeptEntries(self.files, self._uses, keep_bytes, keep_seconds, self.seal)
        """Kept KV: KV that was computed behind other packs (see the option `keep` of a request)."""
        # Threads free space one at a time, so that together they stay within the bound.
        self._turn: AbstractContextManager[object] = nullcontext() if max_bytes is None else threading.Lock()
        # Nothing that the store holds refers back to it: in a cycle, the garbage collector would flush in any thread.
        weakref.finalize(self, self._uses.flush)

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

    @property
    def nbytes(self) -> int:
        """Bytes of all files under `packs/`, which `max_bytes` bounds."""
        return sum(stat.size for _, stat in self.blobs.list("packs/"))

    def handle(self, text: str, namespace: str) -> Handle:
        """Return the handle of `text`, stored or not; raises `HandleError` for bad names and non-Unicode text."""
        return self.files.handle(text, namespace)

    def put(self, pack: KnowledgePack) -> Handle:
        """Store `pack`; storing it again writes nothing.

        It replaces the entry of the same text, model and prefix, and a first entry that an earlier release made for
        this model. Other entries stay. A lazy pack does not replace usable KV, and a lazy pack of unknown fingerprint
        replaces nothing. Raises `PackError` for what the format cannot hold, `QuotaError` if `max_bytes` leaves no
        room, `PackVersionError` if a later release wrote the file; the store is then unchanged.
        """
        handle, encoded = self.handle(pack.text, pack.namespace), encode_pack(pack)
        slot, done, absent = "", False, False
        while not done:
            slot, stored, absent = self._place(handle, pack)
            key = pack_key(handle, slot)
            if not displaces(pack, encoded, stored):
                break
            with self._turn:
                if self.max_bytes is not None:
                    size = encoded.nbytes + len(pack.text.encode())
                    make_room(self.files, self._uses, self.max_bytes, (key, text_key(handle)), size)
                # `if_absent` keeps KV that another writer stores at this moment.
                done = self.blobs.write(key, encoded.chunks(), if_absent=absent and pack.is_lazy)
            if done and slot and self.blobs.stat(pack_key(handle)) is None:  # Removed meanwhile: this is now the first.
                self.blobs.delete(key)
                done = False
        # Write the text after the pack, because a text without a pack counts as a damaged pack.
        entered = done and absent
        if self.files.write_text(handle, pack.text):
            entered = True
            if self.blobs.stat(pack_key(handle)) is None:  # Another process removed the pack in between.
                self.blobs.delete(text_key(handle))
        if entered:
            self.files.note_change()
        self._uses.note(f"{handle}{slot}")
        if done and not self.blobs.is_far:
            self.files.look(handle, slot)  # Its header is parsed and cached now, not while a question waits.
        return handle

    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:
        """Return the pack without its KV, with `stored_bytes`; `None` if there is none. Raises as `get`.

        Returns the entry that fits `key`, else the first one of that model, else the first one. Repeated calls take
        microseconds. Notices damage to the header and length of a file, not to its tensors.
        """
        _, peeked = self._find(handle, key)
        if peeked is None:
            pack = self.files.read(handle)
            return pack and replace(pack, kv=None, stored_bytes=pack.nbytes)
        return peeked

    def is_sealed(self, handle: Handle, key: PackKey) -> bool:
        """Whether the entry that `peek` returns has a valid MAC; always true without a `seal`."""
        if self.seal is None:
            return True
        with suppress(FileNotFoundError, PackError):
            slot, pack = self._find(handle, key)
            return pack is not None and self.seal.holds(self.files.header(handle, slot))
        return False

    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:
        """Return the entry that `peek` returns, with its KV (on the CPU) if that is stored and intact.

        Raises `PackNotFoundError` if there is none, `PackCorruptError` if file and text are both damaged (both are then
        in quarantine, and the pack is gone), `PackVersionError` if a later release wrote the file.
        """
        slot, peeked = ("", None) if key is None else self._find(handle, key)
        try:
            pack = self.files.read_beside(handle, slot) if slot else None
            if pack is None:
                slot, pack = "", self.files.read(handle)
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

        Raises `PackNotFoundError` if there is none, `PackCorruptError` if its header shows damage.
        """
        slot, _ = self._find(handle, key)
        try:
            opened = self.files.open(handle, slot)
        except FileNotFoundError as error:
            raise PackNotFoundError(f"{self.blobs} has no pack {handle}.") from error
        self._uses.note(f"{handle}{slot}")
        return opened

    def prefetch(self, wanted: Collection[tuple[Handle, PackKey | None]]) -> None:
        """Look up several entries in parallel if the storage is far; their first use reports errors."""

        def look_up(entry: tuple[Handle, PackKey | None]) -> None:
            with suppress(OSError, PackError):
                self._find(*entry)

        if self.blobs.is_far and len(wanted) > 1:
            with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
                list(pool.map(look_up, wanted))

    def rotate(self) -> int:
        """Give every pack with a handle of an earlier secret a handle of the first secret; returns their number.

        Old handles stop working, and KV kept behind these packs is deleted. After an interruption, call it again.
        """
        moved = 0
        for handle in list(self.handles()):
            pack = self.peek(handle)
            new_handle = self.handle(pack.text, pack.namespace) if pack else handle
            if pack and new_handle != handle:
                stem = pack_key(handle).removesuffix(".safetensors")
                for key, _ in list(self.blobs.list(f"{stem}.")):
                    if key != text_key(handle):
                        target = pack_key(new_handle).removesuffix(".safetensors") + key.removeprefix(stem)
                        self.blobs.write(target, [self.blobs.read(key)], if_absent=True)
                self.files.write_text(new_handle, pack.text)
                self.files.note_change()
                self.remove(handle)
                moved += 1
        forget_secrets(self.blobs, self.files.secrets[1:])
        return moved

    def entries(self, handle: Handle) -> Iterator[KnowledgePack]:
        """Yield the pack without KV as compiled for each model and prefix, the first entry first."""
        for slot in ("", *sorted(self.files.beside(handle), key=len)):
            if pack := self.files.look(handle, slot):
                yield pack

    def remove(self, handle: Handle) -> None:
        """Delete the pack, its text, its quarantined files and KV kept behind it; raises `PackNotFoundError`."""
        self.kept.drop(str(handle))
        aside = [key for key, _ in self.blobs.list(f"quarantine/{handle.namespace}.{handle.id}.")]
        # Text first: a text without a pack would count as a damaged pack and be repaired.
        deleted = [self.blobs.delete(text_key(handle))]
        files = [key for key, _ in self.blobs.list(text_key(handle).removesuffix("txt"))]
        deleted += map(self.blobs.delete, (*files, *aside))
        if not any(deleted):
            raise PackNotFoundError(f"{self.blobs} has no pack {handle} to remove.")
        self.kept.drop(str(handle))  # Delete what was kept meanwhile.
        self.files.note_change()

    def forget(self, namespace: str) -> int:
        """Delete all KV kept in `namespace` or behind it, but no packs; returns the number of entries."""
        return self.kept.drop(check_namespace(namespace))

    def handles(self, namespace: str | None = None) -> Iterator[Handle]:
        """Return the handles of all packs, or of one namespace, sorted."""
        prefix = "packs/" if namespace is None else f"packs/{check_namespace(namespace)}/"
        entries = map(handle_of, (key for key, _ in self.blobs.list(prefix)))
        return iter(sorted({entry[0] for entry in entries if entry and not entry[1]}))

    def texts(self, namespaces: Collection[str], known: Collection[Handle] = ()) -> Iterator[tuple[Handle, str]]:
        """Yield the packs of these namespaces that are not in `known`, each with its text; see `changes`."""
        for handle in itertools.chain.from_iterable(map(self.handles, namespaces)):
            if handle not in known and (text := self.files.text(handle)) is not None:
                yield handle, text

    def verify(self) -> Iterator[tuple[Handle, str]]:
        """Yield each damaged pack and its damage; checks every digest and changes nothing."""
        for handle in self:
            listed = dict(self.blobs.list(text_key(handle).removesuffix("txt")))
            for key in sorted({pack_key(handle), *listed} - {text_key(handle)}):
                try:
                    # A ranged read bypasses the local cache.
                    self.files.own(handle, read_pack(self.blobs.read(key, 0, listed[key].size if key in listed else 0)))
                except FileNotFoundError:
                    yield handle, "The file is missing."
                except PackError as error:
                    yield handle, str(error)

    __iter__ = handles

    def __len__(self) -> int:
        return sum(1 for _ in self.handles())

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, Handle) and any(map(self.blobs.stat, (pack_key(handle), text_key(handle))))

    def _find(self, handle: Handle, key: PackKey | None) -> tuple[str, KnowledgePack | None]:
        """Return the slot and the entry that `peek` returns; `None` for a pack that is damaged or absent."""
        slot, pack = "", self.files.look(handle)
        if key is None or (pack and key.fits(pack)):
            return slot, pack
        of_model, behind = slots(key)
        if pack is None or pack.fingerprint != key.model:
            if (pack_of_model := self.files.look(handle, of_model)) is None:
                return self._earlier(handle, pack, key.model)
            slot, pack = of_model, pack_of_model
        pack_behind = None if key.fits(pack) else self.files.look(handle, behind)
        return (slot, pack) if pack_behind is None else (behind, pack_behind)

    def _earlier(
        self, handle: Handle, first: KnowledgePack | None, model: ModelFingerprint
    ) -> tuple[str, KnowledgePack | None]:
        """Return the entry that an earlier release made for `model` beside a first one of another model, else the
        first.

        The existence of the entry says that the text is for this model too. Today's fingerprints do not give its slot
        name.
        """
        fingerprint = ModelFingerprint.unknown() if first is None else first.fingerprint
        if fingerprint != ModelFingerprint.unknown() and not fingerprint.same_model(model):
            for slot in self.files.beside(handle):
                pack = self.files.look(handle, slot)
                if pack is not None and is_spare(pack, model):
                    return slot, pack
        return "", first

    def _place(self, handle: Handle, pack: KnowledgePack) -> tuple[str, PackFile | None, bool]:
        """Return the slot where `pack` belongs, the intact file there, and whether the slot is empty.

        It is the first slot that is the pack's own, is free, or holds an entry that nobody needs.
        """
        is_same_model, (of_model, behind) = False, slots(pack.key)
        for slot in ("", of_model, behind):
            if is_same_model and slot != behind:
                continue
            header, absent = None, False
            try:
                header = self.files.header(handle, slot)
            except FileNotFoundError:
                absent = True
            except PackCorruptError:
                break
            if header is None or pack.key.fits(header.pack) or is_text_alone(pack):
                break
            if is_spare(header.pack, pack.fingerprint):
                break
            is_same_model = header.pack.fingerprint == pack.fingerprint
        return slot, header, absent
