"""What was computed behind other packs, kept at rest: the prefix tree of a store. Specified in `docs/format.md`."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b

from kp_core.errors import BusyError, PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.blobs import BlobStat
from kp_core.packs.envelope import to_json
from kp_core.packs.file import encode_pack, open_pack
from kp_core.packs.files import PackFiles, handle_of, pack_key, text_key
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace
from kp_core.packs.pack import KnowledgePack, Prefix, common_length
from kp_core.packs.room import LastUse
from kp_core.packs.seal import Seal

__all__ = ["KeptEntries", "KeptEntry", "KeptKV"]

logger = logging.getLogger(__name__)

_ROOT = "kept"
_SEEN = 1 << 16  # Entries whose packs are remembered, so that deleting a pack reads no file twice.


@dataclass(frozen=True)
class KeptEntry:
    """The KV of `token_ids`, by what it was computed from: a model, at position `at`, behind what `before` digests.

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
    nbytes: int = field(default=0, compare=False)
    """Of its file, where the store lists it."""
    last_use: float = field(default=0.0, compare=False)
    """In seconds since 1970, where the store lists it."""

    @classmethod
    def wrapped(
        cls, model: ModelFingerprint, composer: str, prefix: Prefix, token_ids: tuple[int, ...], handle: str
    ) -> KeptEntry:
        """Of a pack that `composer` wrapped in tokens of its own, by its key; `token_ids` are those of the whole."""
        before = blake2b(f"{composer}\0{prefix}".encode(), digest_size=16).hexdigest()
        return cls(model, len(prefix), before, token_ids, (handle,))

    @classmethod
    def of(cls, pack: KnowledgePack) -> KeptEntry:
        """The entry that `KeptEntries.write` stored as `pack`; raises `ValueError` or `KeyError` where it is none."""
        about = json.loads(pack.text)
        packs, first = tuple(about["packs"]), len(about["token_ids"])
        begins = None if first == len(pack.token_ids) else first
        return cls(pack.fingerprint, about["at"], about["before"], pack.token_ids, packs, about["words"], begins)

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
        self._owners = lru_cache(_SEEN)(self._read_owners)

    def __iter__(self) -> Iterator[KeptEntry]:
        times = self._uses.times()
        for handle, found in sorted(self._listed().items()):
            with suppress(FileNotFoundError, PackCorruptError, ValueError, KeyError):
                last = max(times.get(_name(handle), 0), found.modified)
                yield replace(self._read_entry(handle), nbytes=found.size, last_use=last)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(found.size for found in self._listed().values())

    def has(self, entry: KeptEntry, namespaces: Collection[str]) -> bool:
        """Whether there is KV for `entry` that a view of these `namespaces` may read."""
        if not entry.namespaces <= set(namespaces):
            return False
        handle = self._files.handle(entry.text, entry.home)
        found = self._blobs.stat(_path(handle), recent=True)
        return found is not None and not self._is_old(handle, found) and self._is_sealed(handle)

    def _is_sealed(self, handle: Handle) -> bool:
        if self._seal is None:
            return True
        with suppress(FileNotFoundError, PackError):
            return self._seal.holds(self._files.header(handle, root=_ROOT))
        return False

    def read(self, entry: KeptEntry, namespaces: Collection[str]) -> KVTensors | None:
        """The KV of the tokens of `entry`, up to the last in common with what is stored; `None` without any.

        On the CPU, per layer `(kv_heads, tokens, head_dim)`; only for views that may read it, as `has` says.
        """
        if not self.has(entry, namespaces):
            return None
        handle = self._files.handle(entry.text, entry.home)
        try:
            file = open_pack(self._blobs.read(_path(handle)))
            pack = self._files.own(handle, file.read())
        except OSError:  # Absent, or out of reach: it is computed.
            return None
        except PackError as error:
            logger.warning("An entry kept behind %s is dropped: %s", ", ".join(entry.packs), error)
            with suppress(OSError):  # Where nobody can write, it is passed over each time.
                self._blobs.delete(_path(handle))
            return None
        if self._seal is not None and not self._seal.holds(file):  # Exchanged between two looks.
            return None
        self._uses.note(_name(handle))
        same = common_length(pack.token_ids, entry.token_ids)
        return pack.kv.slice(0, same) if pack.kv and same else None

    def write(self, entry: KeptEntry, kv: KVTensors) -> bool:
        """Keep `kv` for `entry`; `False` where the budget has no room, or one of its packs is not stored (any more)."""
        pack = KnowledgePack(entry.text, entry.home, entry.token_ids, Prefix(), entry.model, kv).compressed("lossless")
        pack = pack if self._seal is None else self._seal.sealed(pack)
        handle, file = self._files.handle(pack.text, pack.namespace), encode_pack(pack)
        if file.nbytes > self.max_bytes or not self._are_stored(entry.packs):
            return False
        self._make_room(handle, file.nbytes)
        self._blobs.write(_path(handle), file.chunks())
        self._uses.note(_name(handle))
        if not self._are_stored(entry.packs):  # Removed in between, and so is what stood behind it.
            self._blobs.delete(_path(handle))
            return False
        return True

    def drop(self, owner: str) -> int:
        """Delete every entry that has the pack of this handle, or anything of this namespace, in it or before it.

        Returns how many; those that cannot be read go too.
        """
        count = 0
        for handle, found in self._listed().items():
            owners = frozenset({owner})
            with suppress(FileNotFoundError, PackCorruptError, ValueError, KeyError):
                owners = self._owners(handle, found.version)
            if owner in owners:
                count += self._blobs.delete(_path(handle))
        return count

    def _make_room(self, own: Handle, size: int) -> None:
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

    def _read_entry(self, handle: Handle) -> KeptEntry:
        return KeptEntry.of(self._files.header(handle, root=_ROOT).pack)

    def _read_owners(self, handle: Handle, _version: str) -> frozenset[str]:
        """The packs and namespaces of an entry."""
        entry = self._read_entry(handle)
        return entry.namespaces.union(entry.packs)


@dataclass
class KeptKV:
    """What a store keeps for parts `start:stop` of one prompt, and what this prompt is to leave there."""

    entries: KeptEntries
    namespaces: frozenset[str]
    keys: dict[tuple[int, int], KeptEntry]
    """The entry of each part that may be kept."""
    is_urgent: bool = False
    """Whether it is written before the call returns."""
    wanted: frozenset[tuple[int, int]] = frozenset()
    """The parts whose KV is to be kept."""
    taken: list[tuple[KeptEntry, KVTensors]] = field(default_factory=list)

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """The parts of the prompt that may be kept, in order."""
        return sorted(self.keys)

    def has(self, start: int, stop: int) -> bool:
        """Whether KV of this part is kept, for those who may read it."""
        key = self.keys.get((start, stop))
        return key is not None and self.entries.has(key, self.namespaces)

    def read(self, start: int, stop: int) -> KVTensors | None:
        """KV of a part, up to `stop` or the last token in common with what is kept, on the CPU; `None` without any."""
        key = self.keys.get((start, stop)) or next((key for at, key in self.keys.items() if at[0] == start), None)
        kv = None if key is None else self.entries.read(key, self.namespaces)
        return kv if kv is None or kv.tokens <= stop - start else kv.slice(0, stop - start)

    def take(self, start: int, stop: int, kv: KVTensors) -> None:
        """Keep `kv` of a part when the answer is done."""
        self.taken.append((self.keys[start, stop], kv))

    def write(self, when_idle: Callable[[Callable[[], Iterator[None]]], object]) -> None:
        """Write what was taken: now, or `when_idle`."""
        if self.taken and self.is_urgent:
            deque(self._steps(), maxlen=0)
        elif self.taken:
            with suppress(BusyError):  # It will be met again.
                when_idle(self._steps)

    def _steps(self) -> Iterator[None]:
        """Write what was taken, an entry at each step; what the medium refuses is not kept."""
        while self.taken:
            entry, kv = self.taken.pop(0)
            try:
                self.entries.write(entry, kv)
            except OSError as error:
                logger.warning("KV behind %s could not be kept: %s", ", ".join(entry.packs), error)
            yield


def _path(handle: Handle) -> str:
    return pack_key(handle, root=_ROOT)


def _name(handle: Handle) -> str:
    return f"{_ROOT}:{handle.namespace}/{handle.id}"
