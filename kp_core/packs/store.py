"""A directory of packs, shared by threads and processes. Its layout is specified in `docs/format.md`."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tqdm import tqdm

from kp_core.errors import PackCorruptError, PackError, PackNotFoundError, QuotaError
from kp_core.packs.directory import PACK, TEXT, PackDirectory
from kp_core.packs.durable import stage
from kp_core.packs.file import EncodedPack, PackHeader, encode_pack
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import TRUSTED_ROLES, PackView

__all__ = ["PackCorruptWarning", "PackStore"]

logger = logging.getLogger(__name__)

_CACHED_IDS = 2_000_000  # Token ids that `peek` keeps in memory: about 70 MB.
_FileState: TypeAlias = tuple[int, int, int]


class PackCorruptWarning(RuntimeWarning):
    """A damaged pack file was set aside; the pack lives on without its KV, which is computed anew on use."""


class PackStore:
    """Packs in a directory, one safetensors file each, its text beside it; a `PackSource`.

    Safe for any number of threads and processes of one machine: a reader sees a pack whole or not at all. A damaged
    file is kept in `quarantine/`, with a `PackCorruptWarning`, and its pack comes back lazy: with its token ids when
    only tensors are damaged, else from its text alone, with `token_ids=()`, an empty head and
    `ModelFingerprint.unknown()`; such a pack has to be built again from its text before use.

    `max_bytes` bounds the files under `packs/`: a `put` that needs room drops the KV of packs that nobody has `get` for
    longest. Texts and token ids are never dropped.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise QuotaError(f"Got max_bytes={max_bytes}; expected a positive number of bytes, or None for no bound.")
        self.path, self.max_bytes = Path(path).absolute(), max_bytes
        self._dir = PackDirectory(self.path)
        self._cache = _PeekCache(_CACHED_IDS)

    def __repr__(self) -> str:
        return f"PackStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    def handle(self, text: str, namespace: str) -> Handle:
        """The handle `text` has here, stored or not; raises `HandleError` for bad names and non-Unicode text."""
        return self._dir.handle(text, namespace)

    def view(self, *namespaces: str, trusted_roles: Collection[str] = TRUSTED_ROLES) -> PackView:
        """The store as a conversation may see it: these namespaces, brought in by these roles."""
        return PackView(self, namespaces, trusted_roles)

    def put(self, pack: KnowledgePack) -> Handle:
        """Store `pack` in place of what was stored for its text; storing it again writes nothing.

        A lazy pack does not displace KV that the same model computed behind the same head, and a lazy pack of unknown
        fingerprint displaces nothing. Raises `PackError` for what the format cannot hold, `QuotaError` when `max_bytes`
        leaves no room, `PackVersionError` when a later release wrote the file; the store is then as before.
        """
        handle, encoded = self.handle(pack.text, pack.namespace), encode_pack(pack)
        staged: Path | None = None
        try:
            if _displaces(pack, encoded, self._stored(handle)):
                # Outside the lock, as syncing many megabytes takes long.
                staged = stage(self._dir.staging, encoded.chunks())
            with self._dir.lock:
                if _displaces(pack, encoded, self._stored(handle)):
                    self._make_room(handle, pack, encoded)
                    self._dir.write(handle, encoded, pack.text, staged)
                else:
                    self._dir.write_text(handle, pack.text)
        finally:
            if staged is not None:
                staged.unlink(missing_ok=True)
        self._dir.touch(handle)
        return handle

    def peek(self, handle: Handle) -> KnowledgePack | None:
        """The pack without its KV, or `None` when there is none; microseconds when it was asked before.

        Sees damage to the head of a file and to its length, not to its tensors. Raises as `get`.
        """
        # Strings, as Path objects would cost more than all the rest.
        path = f"{self._dir.packs}/{handle.namespace}/{handle.id[:2]}/{handle.id}{PACK}"
        try:
            status = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            return self._recover(handle, kv=False)
        state = (status.st_ino, status.st_mtime_ns, status.st_size)
        pack = self._cache.get(handle, state)
        if pack is None:
            pack = self._read(handle, kv=False)
            if pack is not None:
                self._cache.set(handle, state, pack)
        return pack

    def get(self, handle: Handle) -> KnowledgePack:
        """The pack, with its KV (on the CPU) where that is stored and intact.

        Raises `PackNotFoundError` when there is none, `PackCorruptError` when neither file nor text can be trusted
        (both are then in quarantine, and the pack is gone), `PackVersionError` when a later release wrote the file.
        """
        pack = self._read(handle, kv=True)
        if pack is None:
            raise PackNotFoundError(f"{self.path} has no pack {handle}. Build it and `put` it, or check the path.")
        self._dir.touch(handle)
        return pack

    def remove(self, handle: Handle) -> None:
        """Remove the pack, its text and its files in quarantine; raises `PackNotFoundError` when there are none."""
        with self._dir.lock:
            found = self._dir.remove(handle)
        self._cache.discard(handle)
        if not found:
            raise PackNotFoundError(f"{self.path} has no pack {handle} to remove.")

    def handles(self, namespace: str | None = None) -> Iterator[Handle]:
        """The handles of all packs, or of one namespace, sorted."""
        return self._dir.handles(namespace)

    def __iter__(self) -> Iterator[Handle]:
        return self.handles()

    def __len__(self) -> int:
        return sum(1 for _ in self.handles())

    def __contains__(self, handle: object) -> bool:
        return isinstance(handle, Handle) and any(self._dir.file(handle, suffix).exists() for suffix in (PACK, TEXT))

    @property
    def nbytes(self) -> int:
        """Bytes of all files under `packs/`, which is what `max_bytes` bounds."""
        return sum(status.st_size for _, status in self._dir.files())

    def _read(self, handle: Handle, *, kv: bool) -> KnowledgePack | None:
        try:
            return self._read_file(handle, kv=kv)
        except (FileNotFoundError, PackCorruptError):
            return self._recover(handle, kv=kv)

    def _read_file(self, handle: Handle, *, kv: bool) -> KnowledgePack:
        if kv:
            return self._dir.read(handle)
        header = self._dir.header(handle)
        if header.damage is not None:
            raise PackCorruptError(header.damage)
        return header.pack

    def _recover(self, handle: Handle, *, kv: bool) -> KnowledgePack | None:
        """Put the best lazy pack in the place of a damaged or missing file; `None` when there is not even a text."""
        if handle not in self:
            return None
        with self._dir.lock:
            try:
                return self._read_file(handle, kv=kv)  # Another process may have repaired it meanwhile.
            except FileNotFoundError:
                damage = "The file is missing."
            except PackCorruptError as error:
                damage = str(error)
            if handle not in self:
                return None
            pack = self._dir.salvage(handle)
            aside = [self._dir.set_aside(handle, suffix) for suffix in ((PACK,) if pack else (PACK, TEXT))]
            if pack is None:
                for suffix in (TEXT, PACK):
                    self._dir.file(handle, suffix).unlink(missing_ok=True)
            else:
                self._dir.write(handle, encode_pack(pack), pack.text)
        where = ", ".join(str(path) for path in aside if path is not None) or "nothing"
        if pack is None:
            raise PackCorruptError(
                f"The pack {handle} is damaged, and so is its text: {damage} Set aside: {where}. "
                "Store it anew from its source; the handle stays the same."
            )
        known = "text and token ids" if pack.fingerprint != ModelFingerprint.unknown() else "text"
        message = f"The pack {handle} is damaged: {damage} Its {known} are intact; its KV is lost. Set aside: {where}."
        logger.warning(message)
        # Last, as a filter may turn the warning into an error.
        warnings.warn(message, PackCorruptWarning, stacklevel=4)
        return pack

    def _stored(self, handle: Handle) -> PackHeader | None:
        """The head of the stored file, when there is an intact one."""
        with suppress(FileNotFoundError, PackCorruptError):
            header = self._dir.header(handle)
            return None if header.damage else header
        return None

    def _make_room(self, handle: Handle, pack: KnowledgePack, encoded: EncodedPack) -> None:
        """Drop the KV of the least recently used packs until the new files fit; nothing is dropped when they cannot."""
        if self.max_bytes is None:
            return
        own = {self._dir.file(handle, suffix) for suffix in (PACK, TEXT)}
        files = [(path, status) for path, status in self._dir.files() if path not in own]
        size = encoded.nbytes + len(pack.text.encode())
        used = size + sum(status.st_size for _, status in files)
        plan: list[tuple[Handle, KnowledgePack, EncodedPack]] = []
        # The order is taken before any header is read: reading may change access times.
        for path, status in sorted(files, key=lambda item: (item[1].st_atime_ns, item[0])):
            if used <= self.max_bytes:
                break
            # What cannot be read is left to the next reader of that pack.
            with suppress(PackError, ValueError, FileNotFoundError):
                other = Handle(path.parent.parent.name, path.stem)
                header = self._dir.header(other) if path.suffix == PACK else None
                if header is not None and header.content.dtype is not None:
                    lazy = encode_pack(header.pack)
                    plan.append((other, header.pack, lazy))
                    used -= status.st_size - lazy.nbytes
        if used > self.max_bytes:
            raise QuotaError(
                f"The pack needs {size} bytes. With it, and without the KV of the others, {self.path} would hold "
                f"{used} bytes; max_bytes is {self.max_bytes}. "
                "Raise max_bytes, remove packs, or put `pack.without_kv()`."
            )
        for other, lazy_pack, lazy in tqdm(plan, desc="dropping KV", unit="pack", delay=1):
            logger.info("Dropping the KV of %s to make room.", other)
            self._dir.write(other, lazy, lazy_pack.text)


class _PeekCache:
    """The least recently used packs without KV, as long as their files stay as they were; safe for threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._ids = limit, 0
        self._entries: OrderedDict[Handle, tuple[_FileState, KnowledgePack]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, handle: Handle, state: _FileState) -> KnowledgePack | None:
        with self._lock:
            found = self._entries.get(handle)
            if found is None or found[0] != state:
                return None
            self._entries.move_to_end(handle)
            return found[1]

    def set(self, handle: Handle, state: _FileState, pack: KnowledgePack) -> None:
        with self._lock:
            self._discard(handle)
            self._entries[handle] = state, pack
            self._ids += _ids(pack)
            while self._ids > self._limit:
                self._discard(next(iter(self._entries)))

    def discard(self, handle: Handle) -> None:
        with self._lock:
            self._discard(handle)

    def _discard(self, handle: Handle) -> None:
        if handle in self._entries:
            self._ids -= _ids(self._entries.pop(handle)[1])


def _ids(pack: KnowledgePack) -> int:
    # The constant stands for the objects around the ids, the text for its own bytes.
    return 64 + len(pack.token_ids) + len(pack.prefix.token_ids) + len(pack.prefix.cuts) + len(pack.text) // 32


def _displaces(pack: KnowledgePack, encoded: EncodedPack, stored: PackHeader | None) -> bool:
    """Whether `pack` belongs in the place of what is stored."""
    if stored is None:
        return True
    if stored.metadata == encoded.metadata or (pack.is_lazy and pack.fingerprint == ModelFingerprint.unknown()):
        return False
    if not pack.is_lazy or stored.content.dtype is None:
        return True
    return (pack.fingerprint, pack.prefix) != (stored.pack.fingerprint, stored.pack.prefix)
