"""The files of packs: where they lie, and how they are read, checked and repaired. `docs/format.md` has the rules."""

from __future__ import annotations

import itertools
import logging
import os
import re
import struct
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

from kp_core.errors import HandleError, PackCorruptError
from kp_core.packs.blobs import Blobs, BlobStat, Buffer
from kp_core.packs.envelope import header_stop
from kp_core.packs.file import (
    PackFile,
    encode_pack,
    open_pack,
    read_header,
    read_pack,
)
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, mint
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix

__all__ = [
    "PackCorruptWarning",
    "PackFiles",
    "displaces",
    "handle_of",
    "is_spare",
    "is_text_alone",
    "pack_key",
    "slots",
    "text_key",
]

logger = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 16  # Bytes that the first read of a header fetches.
_PEEKED_PACKS = 1024  # About 50 MB of token ids if the packs are banks of facts.
_FILE = re.compile(r"packs/([^/]+)/[^/]+/([^/.]+)((?:\.[0-9a-f]{16}){0,2})\.(?:safetensors|txt)")


class PackCorruptWarning(RuntimeWarning):
    """A damaged pack file went to quarantine. The pack has lost its KV, which its next use computes again."""


class _OtherSecretError(PackCorruptError):
    """An intact file whose handle was made with none of the configured secrets."""


class PackFiles:
    """The files under `packs/`: for each handle a text, a first KV entry, and further KV entries.

    `slot` is `""` for the first entry, else a name from `slots`. Only the first entry carries the pack and is repaired.
    The others may be lost without harm.
    """

    def __init__(self, blobs: Blobs, secrets: Sequence[bytes], *, are_configured: bool = False) -> None:
        self.blobs, self.secrets, self._are_configured = blobs, tuple(secrets), are_configured
        self._peeked = lru_cache(_PEEKED_PACKS)(self._peek)

    def handle(self, text: str, namespace: str) -> Handle:
        """Return the handle of `text` in this store; raises `HandleError` for bad names and non-Unicode text."""
        try:
            return mint(self.secrets[0], namespace, text)
        except UnicodeEncodeError as error:
            raise HandleError(f"Got text that is not Unicode: {error}. Decode it with errors='replace'.") from error

    def look(self, handle: Handle, slot: str = "", root: str = "packs") -> KnowledgePack | None:
        """Return the entry without its KV, cached by version; `None` if it is absent or its header shows damage."""
        with suppress(FileNotFoundError, PackCorruptError):
            if stat := self.blobs.stat(pack_key(handle, slot, root), recent=True):
                return self._peeked(handle, slot, root, stat.version)
        return None

    def header(self, handle: Handle, slot: str = "", root: str = "packs") -> PackFile:
        """Return the header of the stored file; raises `FileNotFoundError`, or `PackCorruptError` for damage."""
        key = pack_key(handle, slot, root)
        while True:
            stat = self.blobs.stat(key)
            if stat is None:
                raise FileNotFoundError(key)
            try:
                data = self.blobs.read(key, 0, _HEAD_BYTES)
                stop = header_stop(data, stat.size)
                header = read_header(data if stop <= len(data) else self.blobs.read(key, 0, stop), stat.size)
                self.own(handle, header.pack, header.damage)
            except PackCorruptError:
                if self.blobs.stat(key) == stat:  # Otherwise another writer replaced it in between.
                    raise
            else:
                return header

    def own(self, handle: Handle, pack: KnowledgePack, damage: str | None = None) -> KnowledgePack:
        """Return `pack` if it belongs to `handle` and has no damage; raise `PackCorruptError` otherwise."""
        if not self._is_of(handle, pack.text, pack.namespace):
            kind = _OtherSecretError if self._are_configured else PackCorruptError
            raise kind(f"The file holds another text than that of {handle}, or comes from another store.")
        if damage is not None:
            raise PackCorruptError(damage)
        return pack

    def text(self, handle: Handle) -> str | None:
        """Return the text stored beside the pack; `None` if it is absent or belongs to another handle."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            text = str(self.blobs.read(text_key(handle)), "utf-8")
            return text if self._is_of(handle, text, handle.namespace) else None
        return None

    def note_change(self) -> None:
        """Change the token that tells all processes that packs were added or removed."""
        self.blobs.write("changes", [os.urandom(8)])

    def _is_of(self, handle: Handle, text: str, namespace: str) -> bool:
        """Whether `handle` is the handle of `text`, under the current secret or an earlier one."""
        return any(mint(secret, namespace, text) == handle for secret in self.secrets)

    def write_text(self, handle: Handle, text: str) -> bool:
        """Write the text if it is absent or damaged; returns whether it was absent."""
        absent = self.blobs.stat(text_key(handle)) is None
        if absent or self.text(handle) is None:
            self.blobs.write(text_key(handle), [text.encode()])
        return absent

    def beside(self, handle: Handle) -> list[str]:
        """Return the slots of all entries except the first."""
        listed = self.blobs.list(pack_key(handle).removesuffix("safetensors"))
        return sorted({entry[1] for key, _ in listed if (entry := handle_of(key)) and entry[1]})

    def read_beside(self, handle: Handle, slot: str) -> KnowledgePack | None:
        """Return an entry other than the first, with its KV; a damaged one goes to quarantine and gives `None`."""
        data: Buffer = b""
        try:
            data = self.blobs.read(pack_key(handle, slot))
            return self.own(handle, read_pack(data))
        except (FileNotFoundError, _OtherSecretError):
            return None
        except PackCorruptError as error:
            try:
                aside = self._set_aside(handle, "safetensors", data)
                self.blobs.delete(pack_key(handle, slot))
            except OSError as denied:
                aside = f"nothing, as nobody can write there ({denied})"
            _warn(f"An entry of the pack {handle} is damaged: {error} Its KV is lost. Set aside: {aside}.")
            return None

    def open(self, handle: Handle, slot: str = "") -> PackFile:
        """Open an entry to read its tensors one by one, without repairing it; `read` and `read_beside` repair damage.

        Raises `FileNotFoundError` if there is no entry of this store's secrets, `PackCorruptError` if it is damaged.
        """
        opened = open_pack(self.blobs.read(pack_key(handle, slot)))
        try:
            self.own(handle, opened.pack)
        except _OtherSecretError as error:
            raise FileNotFoundError(str(error)) from error
        return opened

    def read(self, handle: Handle) -> KnowledgePack | None:
        """Return the pack with its KV, from a single read, so that versions never mix; a damaged pack is repaired."""
        data, stat = None, self.blobs.stat(pack_key(handle))
        try:
            data = self.blobs.read(pack_key(handle))
            return self.own(handle, read_pack(data))
        except _OtherSecretError:
            return None
        except FileNotFoundError:
            damage = "The file is missing."
        except PackCorruptError as error:
            damage = str(error)
        pack = self._salvage(handle, data)
        try:
            return self._mended(handle, pack, data, stat, damage)
        except OSError as error:  # The store is read-only; return what is intact.
            if pack is None:
                raise PackCorruptError(f"The pack {handle} is damaged, and so is its text: {damage}") from error
            _warn(f"The pack {handle} is damaged: {damage} Its KV is lost, and it stays as it is: {error}.")
            return pack

    def _mended(
        self, handle: Handle, pack: KnowledgePack | None, data: Buffer | None, seen: BlobStat | None, damage: str
    ) -> KnowledgePack | None:
        """Quarantine the damaged files, and store `pack`, the intact part of the pack, in their place."""
        aside = [] if data is None else [self._set_aside(handle, "safetensors", data)]
        if pack is None:
            if data is None and self.text(handle) is not None:
                return self.read(handle)  # There was no pack, and now another writer stores it.
            with suppress(FileNotFoundError):
                aside.append(self._set_aside(handle, "txt", self.blobs.read(text_key(handle))))
            if not aside:
                return None
            for slot in self.beside(handle):
                with suppress(FileNotFoundError):
                    aside.append(self._set_aside(handle, "safetensors", self.blobs.read(pack_key(handle, slot))))
            for key in (text_key(handle), pack_key(handle), *(pack_key(handle, slot) for slot in self.beside(handle))):
                self.blobs.delete(key)
            self.note_change()
            raise PackCorruptError(
                f"The pack {handle} is damaged, and so is its text: {damage} Set aside: {', '.join(aside)}. "
                "Store it anew from its source; the handle stays the same."
            )
        self.write_text(handle, pack.text)
        if not self.replace(handle, encode_pack(pack), seen):
            return self.read(handle)  # Another writer was faster.
        intact = "text and token ids" if pack.fingerprint != ModelFingerprint.unknown() else "text"
        message = (
            f"The pack {handle} is damaged: {damage} Its {intact} are intact; its KV is lost. "
            f"Set aside: {', '.join(aside) or 'nothing'}."
        )
        _warn(message)
        return pack

    def _salvage(self, handle: Handle, data: Buffer | None) -> KnowledgePack | None:
        """Return what is intact of a damaged pack: all but its KV, its text alone, or nothing (`None`)."""
        if data is not None:
            with suppress(PackCorruptError):
                return self.own(handle, read_header(data).pack)
        text = self.text(handle)
        if text is None and data is not None:  # If the file is missing too, another process is removing the pack.
            text = next((entry.text for slot in self.beside(handle) if (entry := self.look(handle, slot))), None)
        if text is None:
            return None
        return KnowledgePack(text, handle.namespace, (), Prefix(), ModelFingerprint.unknown())

    def _set_aside(self, handle: Handle, kind: str, data: Buffer) -> str:
        """Copy damaged bytes to quarantine under a new name, and return that name."""
        names = (f"quarantine/{handle.namespace}.{handle.id}.{number}.{kind}" for number in itertools.count(1))
        return f"{self.blobs}/{next(key for key in names if self.blobs.write(key, [data], if_absent=True))}"

    def replace(self, handle: Handle, lazy: PackFile, seen: BlobStat | None) -> bool:
        """Write `lazy` if the file is still the version `seen`; a pack that is removed meanwhile stays removed."""
        if self.blobs.stat(pack_key(handle)) != seen:
            return False
        is_written = self.blobs.write(pack_key(handle), lazy.chunks(), if_absent=seen is None)
        if self.blobs.stat(text_key(handle)) is None:  # `remove` deletes the text first.
            self.blobs.delete(pack_key(handle))
        return is_written

    def _peek(self, handle: Handle, slot: str, root: str, _version: str) -> KnowledgePack:
        file = self.header(handle, slot, root)
        return replace(file.pack, stored_bytes=sum(file.sizes))


def _warn(message: str) -> None:
    logger.warning(message)
    # Last, because a filter may turn the warning into an error.
    warnings.warn(message, PackCorruptWarning, stacklevel=4)


def pack_key(handle: Handle, slot: str = "", root: str = "packs") -> str:
    """Return the key of the pack's first entry, or of the entry in `slot`."""
    return f"{root}/{handle.namespace}/{handle.id[:2]}/{handle.id}{slot}.safetensors"


def slots(key: PackKey) -> tuple[str, str]:
    """Return the slots of further entries of a text: that of the model alone, and that of the model and prefix."""
    of_model = f".{blake2b(key.model.id.encode(), digest_size=8).hexdigest()}"
    prefix = key.prefix or Prefix()
    numbers = (len(prefix), *prefix.token_ids)
    behind = blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8)
    return of_model, f"{of_model}.{behind.hexdigest()}"


def text_key(handle: Handle) -> str:
    """Return the key of the handle's text."""
    return f"packs/{handle.namespace}/{handle.id[:2]}/{handle.id}.txt"


def handle_of(key: str) -> tuple[Handle, str] | None:
    """Return the handle and slot of the pack or text at `key`; `None` if `key` is not ours."""
    match = _FILE.fullmatch(key)
    with suppress(HandleError):
        return (Handle(match[1], match[2]), match[3]) if match else None
    return None


def displaces(pack: KnowledgePack, encoded: PackFile, stored: PackFile | None) -> bool:
    """Whether `pack` should replace the stored entry."""
    if stored is None:
        return True
    if stored.metadata == encoded.metadata or is_text_alone(pack):
        return False
    return not pack.is_lazy or stored.dtype is None or is_spare(stored.pack, pack.fingerprint)


def is_spare(stored: KnowledgePack, model: ModelFingerprint) -> bool:
    """Whether `model` can do without `stored`: recovered from text alone, or made by an earlier release of `model`.

    An entry that an earlier release made for another model stays, because it records that the text is for that model
    too.
    """
    fingerprint = stored.fingerprint
    return fingerprint == ModelFingerprint.unknown() or (fingerprint.is_earlier and fingerprint.same_model(model))


def is_text_alone(pack: KnowledgePack) -> bool:
    """Whether the pack has neither KV nor a model to compute it."""
    return pack.is_lazy and pack.fingerprint == ModelFingerprint.unknown()
