"""Packs in a folder or in object storage, shared by threads and processes. The layout is in `docs/format.md`."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from kp_core.errors import PackCorruptError, PackError, PackNotFoundError, QuotaError
from kp_core.packs.blobs import Blobs, FolderBlobs
from kp_core.packs.file import PackFile, encode_pack, read_pack
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
from kp_core.packs.objects import ObjectBlobs, open_blobs
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.room import LastUse, make_room
from kp_core.packs.seal import Seal
from kp_core.packs.secret import forget_secrets, load_secrets
from kp_core.packs.view import Packs

__all__ = ["PackCorruptWarning", "PackStore"]

logger = logging.getLogger(__name__)


class PackStore(Packs):
    """Packs in a folder, under a URL (`s3://bucket/prefix`, `gs://`, `memory://`), or in other `Blobs`.

    Each is a text, and a file for each entry of its KV: one for each model and prefix that it was compiled for.

    Safe for any number of threads and processes: a reader sees a pack whole or not at all. A damaged file is kept in
    `quarantine/`, with a `PackCorruptWarning`, and its pack comes back lazy: with its token ids when only tensors are
    damaged, else from its text alone, with `token_ids=()`, an empty prefix and `ModelFingerprint.unknown()`; such a
    pack has to be built again from its text before use.

    `max_bytes` bounds the files under `packs/`: a `put` that needs room drops the KV of packs that nobody has `get` for
    longest. Texts and token ids are never dropped. Processes that put at one moment may pass the bound by what they
    put, until the next `put`. `keep_bytes` and `keep_seconds` bound `kept`.

    `secret` makes handles: 64 hexadecimal digits, or several with commas, newest first, while it is rotated. A folder
    has one of its own by default; object storage never holds it (default: the variable `KP_SECRET`). Raises `PackError`
    for a place that holds other things and no packs, that was made with another secret, or that cannot be reached.

    `seal` is a server's key for the MACs of entries that it wrote (`is_sealed`); what is kept is read only with one.
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
        is_far = isinstance(self.blobs, ObjectBlobs) and self.blobs.is_shared
        try:
            secrets = load_secrets(self.blobs, secret, is_far=is_far)
        except OSError as error:
            if isinstance(self.blobs, ObjectBlobs):
                raise PackError(str(error)) from error
            raise
        self.files = PackFiles(self.blobs, secrets, are_configured=bool(secret) or is_far)
        """What lies under `packs/`, for engines that look at headers alone."""
        self._uses = LastUse(self.blobs)
        self.seal = None if seal is None else Seal(seal)
        self.kept: KeptEntries = KeptEntries(self.files, self._uses, keep_bytes, keep_seconds, self.seal)
        """What was computed behind other packs and is kept (see the option `keep` of a request)."""
        # Threads that make room take turns, so that together they keep to the bound.
        self._turn: AbstractContextManager[object] = nullcontext() if max_bytes is None else threading.Lock()
        # Nothing that it holds refers to it: else it would end, and write, in any thread that collects garbage.
        weakref.finalize(self, self._uses.flush)

    def __repr__(self) -> str:
        return f"PackStore({str(self.blobs)!r}, max_bytes={self.max_bytes})"

    @property
    def path(self) -> Path:
        """The folder of the packs; raises `PackError` when they are in none."""
        if isinstance(self.blobs, FolderBlobs):
            return self.blobs.path
        raise PackError(f"The packs of {self.blobs} are in no folder; `str(store.blobs)` says where they are.")

    @property
    def changes(self) -> str:
        """A token that is another one whenever anybody has added or removed a pack, or an entry; costs one `stat`."""
        found = self.blobs.stat("changes", recent=True)
        return "" if found is None else found.version

    @property
    def nbytes(self) -> int:
        """Bytes of all files under `packs/`, which is what `max_bytes` bounds."""
        return sum(found.size for _, found in self.blobs.list("packs/"))

    def handle(self, text: str, namespace: str) -> Handle:
        """The handle `text` has here, stored or not; raises `HandleError` for bad names and non-Unicode text."""
        return self.files.handle(text, namespace)

    def put(self, pack: KnowledgePack) -> Handle:
        """Store `pack`; storing it again writes nothing.

        It takes the place of the entry of the same text, model and prefix, or of a first one that an earlier release
        made for this model; other entries stay beside it. A lazy pack does not displace KV that can be used, and a lazy
        pack of unknown fingerprint displaces nothing. Raises `PackError` for what the format cannot hold, `QuotaError`
        when `max_bytes` leaves no room, `PackVersionError` when a later release wrote the file; the store is then as
        before.
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
                # So that KV which somebody else stores at this moment stays.
                done = self.blobs.write(key, encoded.chunks(), if_absent=absent and pack.is_lazy)
            if done and slot and self.blobs.stat(pack_key(handle)) is None:  # Removed meanwhile: it is the first now.
                self.blobs.delete(key)
                done = False
        # After the pack, as a text alone is a pack whose file was lost.
        entered = done and absent
        if self.files.write_text(handle, pack.text):
            entered = True
            if self.blobs.stat(pack_key(handle)) is None:  # Somebody removed the pack in between.
                self.blobs.delete(text_key(handle))
        if entered:
            self.files.note_change()
        self._uses.note(f"{handle}{slot}")
        return handle

    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:
        """The pack without its KV, whose size is its `stored_bytes`; `None` when there is none. Raises as `get`.

        Of its entries the one that fits `key`, else the first one of that model, else the first one there is.
        Microseconds when it was asked before. Sees damage to the head of a file and to its length, not to its tensors.
        """
        _, found = self._find(handle, key)
        if found is None:
            pack = self.files.read(handle)
            return pack and replace(pack, kv=None, stored_bytes=pack.nbytes)
        return found

    def is_sealed(self, handle: Handle, key: PackKey) -> bool:
        """Whether the entry that `peek` tells has the MAC of this store's key; without a key each is as good as any."""
        if self.seal is None:
            return True
        with suppress(FileNotFoundError, PackError):
            slot, found = self._find(handle, key)
            return found is not None and self.seal.holds(self.files.header(handle, slot))
        return False

    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:
        """The pack, with its KV (on the CPU) where that is stored and intact; the entry that `peek` tells.

        Raises `PackNotFoundError` when there is none, `PackCorruptError` when neither file nor text can be trusted
        (both are then in quarantine, and the pack is gone), `PackVersionError` when a later release wrote the file.
        """
        slot, known = ("", None) if key is None else self._find(handle, key)
        try:
            pack = self.files.read_beside(handle, slot) if slot else None
            if pack is None:
                slot, pack = "", self.files.read(handle)
        except OSError as error:
            if known is None or isinstance(self.blobs, FolderBlobs):
                raise
            logger.warning("The KV of %s is out of reach, and is computed from its text: %s", handle, error)
            return known
        if pack is None:
            raise PackNotFoundError(f"{self.blobs} has no pack {handle}. Build it and `put` it, or check the path.")
        self._uses.note(f"{handle}{slot}")
        return pack

    def open(self, handle: Handle, key: PackKey) -> PackFile:
        """The entry that `get` gives, to be read tensor by tensor; what turns out to be damaged is mended by `get`.

        Raises `PackNotFoundError` when there is none, `PackCorruptError` when it is damaged, as far as its head shows.
        """
        slot, _ = self._find(handle, key)
        try:
            opened = self.files.open(handle, slot)
        except FileNotFoundError as error:
            raise PackNotFoundError(f"{self.blobs} has no pack {handle}.") from error
        self._uses.note(f"{handle}{slot}")
        return opened

    def prefetch(self, wanted: Collection[tuple[Handle, PackKey | None]], *, kv: bool = False) -> None:
        """Look at several entries at once, and bring their KV near, where each look takes a way; else nothing."""
        if isinstance(self.blobs, ObjectBlobs):
            self.blobs.look_at([pack_key(handle) for handle, _ in wanted])
            if kv:
                slots = {pack_key(handle, self._find(handle, key)[0]) for handle, key in wanted}
                self.blobs.look_at(slots, bytes_too=True)

    def rotate(self) -> int:
        """Give each pack whose handle was made under an earlier secret one under the first; returns how many.

        Old handles mean nothing afterwards, and what was kept behind them is dropped. Interrupted, it is begun again.
        """
        moved = 0
        for handle in list(self.handles()):
            pack = self.peek(handle)
            new = self.handle(pack.text, pack.namespace) if pack else handle
            if pack and new != handle:
                stem = pack_key(handle).removesuffix(".safetensors")
                for key, _ in list(self.blobs.list(f"{stem}.")):
                    if key != text_key(handle):
                        target = pack_key(new).removesuffix(".safetensors") + key.removeprefix(stem)
                        self.blobs.write(target, [self.blobs.read(key)], if_absent=True)
                self.files.write_text(new, pack.text)
                self.files.note_change()
                self.remove(handle)
                moved += 1
        forget_secrets(self.blobs, self.files.secrets[1:])
        return moved

    def entries(self, handle: Handle) -> Iterator[KnowledgePack]:
        """The pack as it was made for each model and prefix, the first one first, without KV."""
        for slot in ("", *sorted(self.files.beside(handle), key=len)):
            if found := self.files.look(handle, slot):
                yield found

    def remove(self, handle: Handle) -> None:
        """Remove the pack, its text, files in quarantine and what was kept behind it, or raise `PackNotFoundError`."""
        self.kept.drop(str(handle))
        aside = [key for key, _ in self.blobs.list(f"quarantine/{handle.namespace}.{handle.id}.")]
        # Text first: a text alone would come back as a pack.
        found = [self.blobs.delete(text_key(handle))]
        files = [key for key, _ in self.blobs.list(text_key(handle).removesuffix("txt"))]
        found += map(self.blobs.delete, (*files, *aside))
        if not any(found):
            raise PackNotFoundError(f"{self.blobs} has no pack {handle} to remove.")
        self.kept.drop(str(handle))  # What was kept since.
        self.files.note_change()

    def forget(self, namespace: str) -> int:
        """Delete all KV that was kept in `namespace` or behind it; returns how many entries. Packs stay."""
        return self.kept.drop(check_namespace(namespace))

    def handles(self, namespace: str | None = None) -> Iterator[Handle]:
        """The handles of all packs, or of one namespace, sorted."""
        prefix = "packs/" if namespace is None else f"packs/{check_namespace(namespace)}/"
        entries = map(handle_of, (key for key, _ in self.blobs.list(prefix)))
        return iter(sorted({entry[0] for entry in entries if entry and not entry[1]}))

    def texts(self, namespaces: Collection[str], known: Collection[Handle] = ()) -> Iterator[tuple[Handle, str]]:
        """The packs of these namespaces that are not `known` yet, each with its text; see `changes`."""
        for handle in itertools.chain.from_iterable(map(self.handles, namespaces)):
            if handle not in known and (text := self.files.text(handle)) is not None:
                yield handle, text

    def verify(self) -> Iterator[tuple[Handle, str]]:
        """Each pack that is damaged, and how; checks every digest and changes nothing."""
        for handle in self:
            found = dict(self.blobs.list(text_key(handle).removesuffix("txt")))
            for key in sorted({pack_key(handle), *found} - {text_key(handle)}):
                try:
                    # As a range, which no local cache has.
                    self.files.own(handle, read_pack(self.blobs.read(key, 0, found[key].size if key in found else 0)))
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
        """Where the entry lies that `peek` gives, and what it is; `None` for a pack to be mended, or absent."""
        slot, found = "", self.files.look(handle)
        if key is None or (found and key.fits(found)):
            return slot, found
        of_model, behind = slots(key)
        if found is None or found.fingerprint != key.model:
            if (own := self.files.look(handle, of_model)) is None:
                return self._earlier(handle, found, key.model)
            slot, found = of_model, own
        other = None if key.fits(found) else self.files.look(handle, behind)
        return (slot, found) if other is None else (behind, other)

    def _earlier(
        self, handle: Handle, first: KnowledgePack | None, model: ModelFingerprint
    ) -> tuple[str, KnowledgePack | None]:
        """The entry that an earlier release made for `model` beside a first one of another model, else the first one.

        It says that the text is for this model too. Its name is made from what no fingerprint has any more.
        """
        made = ModelFingerprint.unknown() if first is None else first.fingerprint
        if made != ModelFingerprint.unknown() and not made.same_model(model):
            for slot in self.files.beside(handle):
                found = self.files.look(handle, slot)
                if found is not None and is_spare(found, model):
                    return slot, found
        return "", first

    def _place(self, handle: Handle, pack: KnowledgePack) -> tuple[str, PackFile | None, bool]:
        """Where `pack` belongs, what is intact there, and whether nothing is.

        It is the first place that is its own, or free, or holds what is of no use to anybody.
        """
        mine, (of_model, behind) = False, slots(pack.key)
        for slot in ("", of_model, behind):
            if mine and slot != behind:
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
            mine = header.pack.fingerprint == pack.fingerprint
        return slot, header, absent
