"""Packs in a folder or in object storage, shared by threads and processes. The layout is in `docs/format.md`."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tqdm import tqdm

from kp_core.errors import HandleError, PackCorruptError, PackError, PackNotFoundError, QuotaError
from kp_core.packs.blobs import Blobs, BlobStat, FolderBlobs
from kp_core.packs.file import Buffer, EncodedPack, PackHeader, encode_pack, header_stop, read_header, read_pack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace, mint
from kp_core.packs.layout import displaces, handle_of, load_secret, pack_key, text_key
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.uses import LastUse
from kp_core.packs.view import TRUSTED_ROLES, PackView

__all__ = ["PackCorruptWarning", "PackStore"]

logger = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 16  # What is read of a file at first to see its head.
_PEEKED_PACKS = 1024  # Some 50 MB of token ids when they are banks of facts.


class PackCorruptWarning(RuntimeWarning):
    """A damaged pack file was set aside; the pack lives on without its KV, which is computed anew on use."""


class PackStore:
    """Packs in a folder, or in other `Blobs`: one safetensors file each, its text beside it. Keeps `Packs`.

    Safe for any number of threads and processes: a reader sees a pack whole or not at all. A damaged file is kept in
    `quarantine/`, with a `PackCorruptWarning`, and its pack comes back lazy: with its token ids when only tensors are
    damaged, else from its text alone, with `token_ids=()`, an empty prefix and `ModelFingerprint.unknown()`; such a
    pack has to be built again from its text before use.

    `max_bytes` bounds the files under `packs/`: a `put` that needs room drops the KV of packs that nobody has `get` for
    longest. Texts and token ids are never dropped. Processes that put at one moment may pass the bound by what they
    put, until the next `put`. Raises `PackError` for a place that holds other things and no packs.
    """

    def __init__(self, place: str | os.PathLike[str] | Blobs, *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise QuotaError(f"Got max_bytes={max_bytes}; expected a positive number of bytes, or None for no bound.")
        self.blobs: Blobs = FolderBlobs(place) if isinstance(place, str | os.PathLike) else place
        self.max_bytes = max_bytes
        self._secret = load_secret(self.blobs)
        self._uses, self._peeked = LastUse(self.blobs), lru_cache(_PEEKED_PACKS)(self._peek)
        # Threads that make room take turns, so that together they keep to the bound.
        self._turn: AbstractContextManager[object] = nullcontext() if max_bytes is None else threading.Lock()
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
        """A token that is another one whenever anybody has added or removed a pack; costs one `stat`."""
        found = self.blobs.stat("changes")
        return "" if found is None else found.version

    @property
    def nbytes(self) -> int:
        """Bytes of all files under `packs/`, which is what `max_bytes` bounds."""
        return sum(found.size for _, found in self.blobs.list("packs/"))

    def handle(self, text: str, namespace: str) -> Handle:
        """The handle `text` has here, stored or not; raises `HandleError` for bad names and non-Unicode text."""
        try:
            return mint(self._secret, namespace, text)
        except UnicodeEncodeError as error:
            raise HandleError(f"Got text that is not Unicode: {error}. Decode it with errors='replace'.") from error

    def view(self, *namespaces: str, trusted_roles: Collection[str] = TRUSTED_ROLES) -> PackView:
        """The store as a conversation may see it: these namespaces, brought in by these roles."""
        return PackView(self, namespaces, trusted_roles)

    def put(self, pack: KnowledgePack) -> Handle:
        """Store `pack` in place of what was stored for its text; storing it again writes nothing.

        A lazy pack does not displace KV that the same model computed behind the same prefix, and a lazy pack of unknown
        fingerprint displaces nothing. Raises `PackError` for what the format cannot hold, `QuotaError` when `max_bytes`
        leaves no room, `PackVersionError` when a later release wrote the file; the store is then as before.
        """
        handle, encoded = self.handle(pack.text, pack.namespace), encode_pack(pack)
        key, done = pack_key(handle), False
        while not done:
            absent, stored = self.blobs.stat(key) is None, None
            with suppress(FileNotFoundError, PackCorruptError):
                stored = self._header(handle)
            if not displaces(pack, encoded, stored):
                break
            with self._turn:
                self._make_room(handle, encoded.nbytes + len(pack.text.encode()))
                # So that KV which somebody else stores at this moment stays.
                done = self.blobs.write(key, encoded.chunks(), if_absent=absent and pack.is_lazy)
        # After the pack, as a text alone is a pack whose file was lost.
        if self._write_text(handle, pack.text):
            if self.blobs.stat(key) is None:  # Somebody removed the pack in between.
                self.blobs.delete(text_key(handle))
            self.blobs.write("changes", [])
        self._uses.note(str(handle))
        return handle

    def peek(self, handle: Handle) -> KnowledgePack | None:
        """The pack without its KV, whose size is its `stored_bytes`; `None` when there is none. Raises as `get`.

        Microseconds when it was asked before. Sees damage to the head of a file and to its length, not to its tensors.
        """
        with suppress(FileNotFoundError, PackCorruptError):
            if found := self.blobs.stat(pack_key(handle)):
                return self._peeked(handle, found.version)
        pack = self._read(handle)
        return pack and replace(pack, kv=None, stored_bytes=pack.nbytes)

    def get(self, handle: Handle) -> KnowledgePack:
        """The pack, with its KV (on the CPU) where that is stored and intact.

        Raises `PackNotFoundError` when there is none, `PackCorruptError` when neither file nor text can be trusted
        (both are then in quarantine, and the pack is gone), `PackVersionError` when a later release wrote the file.
        """
        pack = self._read(handle)
        if pack is None:
            raise PackNotFoundError(f"{self.blobs} has no pack {handle}. Build it and `put` it, or check the path.")
        self._uses.note(str(handle))
        return pack

    def remove(self, handle: Handle) -> None:
        """Remove the pack, its text and its files in quarantine; raises `PackNotFoundError` when there are none."""
        aside = [key for key, _ in self.blobs.list(f"quarantine/{handle.namespace}.{handle.id}.")]
        # Text first: a text alone would come back as a pack.
        found = list(map(self.blobs.delete, (text_key(handle), pack_key(handle), *aside)))
        if not any(found):
            raise PackNotFoundError(f"{self.blobs} has no pack {handle} to remove.")
        self.blobs.write("changes", [])

    def handles(self, namespace: str | None = None) -> Iterator[Handle]:
        """The handles of all packs, or of one namespace, sorted."""
        prefix = "packs/" if namespace is None else f"packs/{check_namespace(namespace)}/"
        return iter(sorted(filter(None, {handle_of(key) for key, _ in self.blobs.list(prefix)})))

    def texts(self, namespaces: Collection[str], known: Collection[Handle] = ()) -> Iterator[tuple[Handle, str]]:
        """The packs of these namespaces that are not `known` yet, each with its text; see `changes`."""
        for handle in itertools.chain.from_iterable(map(self.handles, namespaces)):
            if handle not in known and (text := self._text(handle)) is not None:
                yield handle, text

    def verify(self) -> Iterator[tuple[Handle, str]]:
        """Each pack that is damaged, and how; checks every digest and changes nothing."""
        for handle in self:
            try:
                self._own(handle, read_pack(self.blobs.read(pack_key(handle))))
            except FileNotFoundError:
                yield handle, "The file is missing."
            except PackError as error:
                yield handle, str(error)

    __iter__ = handles

    def __len__(self) -> int:
        return sum(1 for _ in self.handles())

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, Handle) and any(map(self.blobs.stat, (pack_key(handle), text_key(handle))))

    def _peek(self, handle: Handle, _version: str) -> KnowledgePack:
        header = self._header(handle)
        return replace(header.pack, stored_bytes=header.nbytes - header.start)

    def _header(self, handle: Handle) -> PackHeader:
        """The head of the stored file; raises `FileNotFoundError`, and `PackCorruptError` for any damage it shows."""
        key = pack_key(handle)
        while True:
            found = self.blobs.stat(key)
            if found is None:
                raise FileNotFoundError(key)
            try:
                data = self.blobs.read(key, 0, _HEAD_BYTES)
                stop = header_stop(data, found.size)
                header = read_header(data if stop <= len(data) else self.blobs.read(key, 0, stop), found.size)
                self._own(handle, header.pack, header.damage)
            except PackCorruptError:
                if self.blobs.stat(key) == found:  # Else it was replaced between two looks.
                    raise
            else:
                return header

    def _own(self, handle: Handle, pack: KnowledgePack, damage: str | None = None) -> KnowledgePack:
        """`pack`, when it is that of the handle and has no damage."""
        if self.handle(pack.text, pack.namespace) != handle:
            raise PackCorruptError(f"The file holds another text than that of {handle}, or comes from another store.")
        if damage is not None:
            raise PackCorruptError(damage)
        return pack

    def _text(self, handle: Handle) -> str | None:
        """The text beside the pack, when there is one and it is that of the handle."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            text = str(self.blobs.read(text_key(handle)), "utf-8")
            return text if self.handle(text, handle.namespace) == handle else None
        return None

    def _write_text(self, handle: Handle, text: str) -> bool:
        """Write the text unless it is there; returns whether there was none."""
        absent = self.blobs.stat(text_key(handle)) is None
        if absent or self._text(handle) is None:
            self.blobs.write(text_key(handle), [text.encode()])
        return absent

    def _read(self, handle: Handle) -> KnowledgePack | None:
        """The pack with its KV, from one read, so that versions never mix; mended when it is damaged."""
        data, seen = None, self.blobs.stat(pack_key(handle))
        try:
            data = self.blobs.read(pack_key(handle))
            return self._own(handle, read_pack(data))
        except FileNotFoundError:
            damage = "The file is missing."
        except PackCorruptError as error:
            damage = str(error)
        pack = self._salvage(handle, data)
        aside = [] if data is None else [self._set_aside(handle, "safetensors", data)]
        if pack is None:
            with suppress(FileNotFoundError):
                aside.append(self._set_aside(handle, "txt", self.blobs.read(text_key(handle))))
            if not aside:
                return None
            for key in (text_key(handle), pack_key(handle)):
                self.blobs.delete(key)
            self.blobs.write("changes", [])
            raise PackCorruptError(
                f"The pack {handle} is damaged, and so is its text: {damage} Set aside: {', '.join(aside)}. "
                "Store it anew from its source; the handle stays the same."
            )
        self._write_text(handle, pack.text)
        if not self._replace(handle, encode_pack(pack), seen):
            return self._read(handle)  # Somebody else was faster.
        known = "text and token ids" if pack.fingerprint != ModelFingerprint.unknown() else "text"
        message = (
            f"The pack {handle} is damaged: {damage} Its {known} are intact; its KV is lost. "
            f"Set aside: {', '.join(aside) or 'nothing'}."
        )
        logger.warning(message)
        # Last, as a filter may turn the warning into an error.
        warnings.warn(message, PackCorruptWarning, stacklevel=3)
        return pack

    def _salvage(self, handle: Handle, data: Buffer | None) -> KnowledgePack | None:
        """What can be trusted of a damaged pack: all but the KV, or the text alone, or nothing (`None`)."""
        if data is not None:
            with suppress(PackCorruptError):
                return self._own(handle, read_header(data).pack)
        text = self._text(handle)
        if text is None:
            return None
        return KnowledgePack(text, handle.namespace, (), Prefix(), ModelFingerprint.unknown())

    def _set_aside(self, handle: Handle, kind: str, data: Buffer) -> str:
        """Keep damaged bytes in quarantine under a new name; returns that."""
        names = (f"quarantine/{handle.namespace}.{handle.id}.{number}.{kind}" for number in itertools.count(1))
        return f"{self.blobs}/{next(key for key in names if self.blobs.write(key, [data], if_absent=True))}"

    def _replace(self, handle: Handle, lazy: EncodedPack, seen: BlobStat | None) -> bool:
        """Write `lazy` where the file is still as it was `seen`; what is removed meanwhile stays removed."""
        if self.blobs.stat(pack_key(handle)) != seen:
            return False
        done = self.blobs.write(pack_key(handle), lazy.chunks(), if_absent=seen is None)
        if self.blobs.stat(text_key(handle)) is None:  # `remove` takes the text first.
            self.blobs.delete(pack_key(handle))
        return done

    def _make_room(self, handle: Handle, size: int) -> None:
        """Drop the KV of the least recently used packs until `size` bytes fit; nothing is dropped when they cannot."""
        if self.max_bytes is None:
            return
        listed, own = dict(self.blobs.list("packs/")), (pack_key(handle), text_key(handle))
        files = {key: found for key, found in listed.items() if key not in own}
        used = size + sum(found.size for found in files.values())
        times = self._uses.times() if used > self.max_bytes else {}
        packs = {other: found for key, found in files.items() if (other := handle_of(key)) and key == pack_key(other)}
        plan: list[tuple[Handle, EncodedPack, BlobStat]] = []
        for other in sorted(packs, key=lambda each: (max(times.get(str(each), 0), packs[each].modified), each)):
            if used <= self.max_bytes:
                break
            # What cannot be read is left to the next reader of that pack; without its text it is coming or going.
            with suppress(PackError, FileNotFoundError):
                pack = self._peeked(other, packs[other].version)
                if pack.stored_bytes and text_key(other) in files:
                    plan.append((other, encode_pack(pack), packs[other]))
                    used -= packs[other].size - plan[-1][1].nbytes
        if used > self.max_bytes:
            if listed != dict(self.blobs.list("packs/")):  # Somebody else makes room, too.
                self._make_room(handle, size)
                return
            raise QuotaError(
                f"The pack needs {size} bytes. With it, and without the KV of the others, {self.blobs} would hold "
                f"{used} bytes; max_bytes is {self.max_bytes}. "
                "Raise max_bytes, remove packs, or put `pack.without_kv()`."
            )
        for other, lazy, seen in tqdm(plan, desc="dropping KV", unit="pack", delay=1):
            logger.info("Dropping the KV of %s to make room.", other)
            self._replace(other, lazy, seen)
