"""What was computed behind other packs, kept at rest: the prefix tree of a store. Specified in `docs/format.md`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b

from kp_core.errors import PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import BlobStat
from kp_core.packs.envelope import to_json
from kp_core.packs.file import encode_pack, read_pack
from kp_core.packs.files import PackFiles
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace
from kp_core.packs.layout import handle_of, pack_key, text_key
from kp_core.packs.pack import KnowledgePack, Prefix, common_length
from kp_core.packs.seal import Seal
from kp_core.packs.uses import LastUse

__all__ = ["EntryKey", "KeptEntries", "KeptEntry"]

logger = logging.getLogger(__name__)

_ROOT = "kept"
_SEEN = 1 << 16  # Entries whose packs are remembered, so that deleting a pack reads no file twice.


@dataclass(frozen=True)
class EntryKey:
    """What the KV of `token_ids` was computed from: a model, at position `at`, behind what `before` digests.

    `before` covers all tokens that stand before, and how they were altered or composed. `packs` are the handles of all
    packs in it and before it, `words` the namespace of the conversation whose words stand there; `None` where packs and
    the template are all there is. With `begins`, an entry is found by so many of its first tokens, and what it has in
    common with a prompt that goes on otherwise is read; else it is found by all of them.
    """

    model: ModelFingerprint
    at: int
    before: str
    token_ids: tuple[int, ...]
    packs: tuple[str, ...]
    words: str | None = None
    begins: int | None = None

    @classmethod
    def wrapped(
        cls, model: ModelFingerprint, composer: str, prefix: Prefix, token_ids: tuple[int, ...], handle: str
    ) -> EntryKey:
        """Of a pack that `composer` wrapped in tokens of its own, by its key; `token_ids` are those of the whole."""
        before = blake2b(f"{composer}\0{prefix}".encode(), digest_size=16).hexdigest()
        return cls(model, len(prefix), before, token_ids, (handle,))

    @cached_property
    def namespaces(self) -> frozenset[str]:
        """All that a view must be allowed to read it."""
        found = {Handle.parse(handle).namespace for handle in self.packs}
        return frozenset(found if self.words is None else {*found, self.words})

    @cached_property
    def home(self) -> str:
        """The namespace that it lies in: that of the conversation, else of its last pack."""
        return check_namespace(self.words or Handle.parse(self.packs[-1]).namespace)

    @cached_property
    def text(self) -> str:
        """The key as canonical JSON; the id of an entry is the keyed digest of it, as a handle is of a text."""
        model, packs = self.model.id, sorted(set(self.packs))
        about = {"at": self.at, "before": self.before, "model": model, "packs": packs, "words": self.words}
        return to_json({**about, "token_ids": self.token_ids[: self.begins]}, sort_keys=True)


@dataclass(frozen=True)
class KeptEntry:
    """One entry as `PackStore.kept` lists it; `last_use` in seconds since 1970."""

    id: str
    namespaces: frozenset[str]
    packs: tuple[str, ...]
    tokens: int
    model: str
    nbytes: int = 0
    last_use: float = 0.0


class KeptEntries:
    """Entries within `max_bytes`: the least recently used go first, and those unused for `max_age` seconds.

    Nothing here is needed: what is lost or damaged is computed again.
    """

    def __init__(
        self, files: PackFiles, uses: LastUse, max_bytes: int, max_age: float | None, seal: Seal | None = None
    ) -> None:
        """With a `seal`, entries that were not written under it are as if they were not there."""
        self._files, self._uses, self._blobs, self._seal = files, uses, files.blobs, seal
        self.max_bytes, self.max_age = max_bytes, max_age
        self._seen = lru_cache(_SEEN)(self._read_about)

    def __iter__(self) -> Iterator[KeptEntry]:
        times = self._uses.times()
        for handle, found in sorted(self._listed().items()):
            if (about := self._about(handle, found)) is not None:
                last = max(times.get(_name(handle), 0), found.modified)
                yield replace(about, nbytes=found.size, last_use=last)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(found.size for found in self._listed().values())

    def has(self, key: EntryKey, namespaces: Collection[str]) -> bool:
        """Whether there is KV for `key` that a view of these `namespaces` may read."""
        if not key.namespaces <= set(namespaces):
            return False
        handle = self._files.handle(key.text, key.home)
        found = self._files.recent(_path(handle))
        return found is not None and not self._is_old(handle, found) and self._is_sealed(handle)

    def _is_sealed(self, handle: Handle) -> bool:
        if self._seal is None:
            return True
        with suppress(FileNotFoundError, PackError):
            header = self._files.header(handle, root=_ROOT)
            return self._seal.holds(header.pack, header.content.digests)
        return False

    def read(self, key: EntryKey, namespaces: Collection[str]) -> KVTensors | None:
        """The KV of the tokens of `key`, up to the last in common with the entry; on the CPU, for whom `has` says so.

        Per layer `(kv_heads, tokens, head_dim)`; `None` where there is none.
        """
        if not self.has(key, namespaces):
            return None
        handle = self._files.handle(key.text, key.home)
        try:
            pack = self._files.own(handle, read_pack(self._blobs.read(_path(handle))))
        except OSError:  # Absent, or out of reach: it is computed.
            return None
        except PackError as error:
            logger.warning("An entry kept behind %s is dropped: %s", ", ".join(key.packs), error)
            with suppress(OSError):  # Where nobody can write, it is passed over each time.
                self._blobs.delete(_path(handle))
            return None
        if self._seal is not None and not self._seal.holds(pack):  # Exchanged between two looks.
            return None
        self._uses.note(_name(handle))
        same = common_length(pack.token_ids, key.token_ids)
        return pack.kv.slice(0, same) if pack.kv and same else None

    def write(self, key: EntryKey, kv: KVTensors) -> bool:
        """Keep `kv` for `key`; `False` where the budget has no room, or one of its packs is not stored (any more)."""
        pack = KnowledgePack(key.text, key.home, key.token_ids, Prefix(), key.model, kv).compressed("lossless")
        pack = pack if self._seal is None else self._seal.sealed(pack)
        handle, encoded = self._files.handle(pack.text, pack.namespace), encode_pack(pack)
        if not self._are_stored(key.packs) or not self._make_room(handle, encoded.nbytes):
            return False
        self._blobs.write(_path(handle), encoded.chunks())
        self._uses.note(_name(handle))
        if not self._are_stored(key.packs):  # Removed in between, and so is what stood behind it.
            self._blobs.delete(_path(handle))
            return False
        return True

    def drop(self, *, pack: Handle | None = None, namespace: str | None = None) -> int:
        """Delete every entry that has `pack`, or anything of `namespace`, in it or before it; returns how many."""
        count = 0
        for handle, found in self._listed().items():
            about = self._about(handle, found)
            if about is None or str(pack) in about.packs or namespace in about.namespaces:
                count += self._blobs.delete(_path(handle))
        return count

    def _make_room(self, own: Handle, size: int) -> bool:
        """Drop what is too old, then the least recently used entries, until `size` bytes fit beside the others."""
        listed = self._listed()
        listed.pop(own, None)
        times = self._uses.times()
        used = size + sum(found.size for found in listed.values())
        for handle in sorted(listed, key=lambda each: max(times.get(_name(each), 0), listed[each].modified)):
            if used <= self.max_bytes and not self._is_old(handle, listed[handle]):
                break
            self._blobs.delete(_path(handle))
            used -= listed[handle].size
        return used <= self.max_bytes

    def _is_old(self, handle: Handle, found: BlobStat) -> bool:
        if self.max_age is None or time.time() - found.modified <= self.max_age:
            return False
        last = max(self._uses.times().get(_name(handle), 0), found.modified)
        return time.time() - last > self.max_age

    def _are_stored(self, packs: Collection[str]) -> bool:
        return all(self._blobs.stat(text_key(Handle.parse(each))) for each in packs)

    def _listed(self) -> dict[Handle, BlobStat]:
        found = ((handle_of("packs" + key.removeprefix(_ROOT)), stat) for key, stat in self._blobs.list(f"{_ROOT}/"))
        return {entry[0]: stat for entry, stat in found if entry and not entry[1]}

    def _about(self, handle: Handle, found: BlobStat) -> KeptEntry | None:
        """What an entry says of itself; `None` when it cannot be read."""
        with suppress(FileNotFoundError, PackCorruptError, ValueError, KeyError):
            return self._seen(handle, found.version)
        return None

    def _read_about(self, handle: Handle, _version: str) -> KeptEntry:
        pack = self._files.header(handle, root=_ROOT).pack
        about = json.loads(pack.text)
        packs = tuple(about["packs"])
        namespaces = {Handle.parse(each).namespace for each in packs} | {about["words"]} - {None}
        return KeptEntry(handle.id, frozenset(namespaces), packs, len(pack.token_ids), pack.fingerprint.id)


def _path(handle: Handle) -> str:
    return pack_key(handle, root=_ROOT)


def _name(handle: Handle) -> str:
    return f"{_ROOT}:{handle.namespace}/{handle.id}"
