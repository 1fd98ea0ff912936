"""KV computed behind other packs, kept on disk: the prefix tree of a store. `docs/format.md` specifies it."""

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
from kp_core.packs.file import Seal, encode_pack, open_pack
from kp_core.packs.files import PackFiles, handle_of, pack_key, text_key
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace
from kp_core.packs.pack import KnowledgePack, Prefix, common_length
from kp_core.packs.room import LastUse

__all__ = ["KeptEntries", "KeptEntry", "KeptKV"]

logger = logging.getLogger(__name__)

_ROOT = "kept"
_SEEN = 1 << 16  # Entries whose packs are cached, so that deleting packs reads no file twice.


@dataclass(frozen=True)
class KeptEntry:
    """The key of stored KV of `token_ids`: the model, the position `at`, and `before`, a digest of what stands before.

    `before` covers all earlier tokens and how they were changed or composed. `packs` are the handles of all packs in
    the entry and before it. `words` is the namespace of the conversation whose messages stand there, or `None` if there
    are only packs and the template. With `begins`, the store finds an entry by its first `begins` tokens, and a prompt
    that continues differently reads the common part. Without it, all tokens must match.
    """

    model: ModelFingerprint
    at: int
    before: str
    token_ids: tuple[int, ...]
    packs: tuple[str, ...]
    words: str | None = None
    begins: int | None = None
    nbytes: int = field(default=0, compare=False)
    """Size of its file, if the store listed it."""
    last_use: float = field(default=0.0, compare=False)
    """In seconds since 1970, if the store listed it."""

    @classmethod
    def wrapped(
        cls, model: ModelFingerprint, composer: str, prefix: Prefix, token_ids: tuple[int, ...], handle: str
    ) -> KeptEntry:
        """The entry of a pack that `composer` wrapped in tokens of its own; `token_ids` include those."""
        before = blake2b(f"{composer}\0{prefix}".encode(), digest_size=16).hexdigest()
        return cls(model, len(prefix), before, token_ids, (handle,))

    @classmethod
    def of(cls, pack: KnowledgePack) -> KeptEntry:
        """Read the entry from a pack that `KeptEntries.write` stored; raises `ValueError` or `KeyError` for others."""
        fields = json.loads(pack.text)
        packs, count = tuple(fields["packs"]), len(fields["token_ids"])
        begins = None if count == len(pack.token_ids) else count
        return cls(pack.fingerprint, fields["at"], fields["before"], pack.token_ids, packs, fields["words"], begins)

    @cached_property
    def namespaces(self) -> frozenset[str]:
        """All namespaces that a view must be allowed to read."""
        names = {Handle.parse(handle).namespace for handle in self.packs}
        return frozenset(names if self.words is None else {*names, self.words})

    @cached_property
    def home(self) -> str:
        """The namespace in which the entry is stored: that of the conversation, else that of its last pack."""
        return check_namespace(self.words or Handle.parse(self.packs[-1]).namespace)

    @cached_property
    def text(self) -> str:
        """The key as canonical JSON; its keyed digest is the id of the entry, like a handle of a text."""
        model, packs = self.model.id, sorted(set(self.packs))
        fields = {"at": self.at, "before": self.before, "model": model, "packs": packs, "words": self.words}
        return to_json({**fields, "token_ids": self.token_ids[: self.begins]}, sort_keys=True)


class KeptEntries:
    """Entries within `max_bytes`: deletes the least recently used first, and those unused for `max_age` seconds.

    Lost or damaged entries do no harm: the model computes them again.
    """

    def __init__(
        self, files: PackFiles, uses: LastUse, max_bytes: int, max_age: float | None, seal: Seal | None = None
    ) -> None:
        """With a `seal`, ignore entries that were not written with its key."""
        self._files, self._uses, self._blobs, self._seal = files, uses, files.blobs, seal
        self.max_bytes, self.max_age = max_bytes, max_age
        self._owners = lru_cache(_SEEN)(self._read_owners)

    def __iter__(self) -> Iterator[KeptEntry]:
        times = self._uses.times()
        for handle, stat in sorted(self._listed().items()):
            with suppress(FileNotFoundError, PackCorruptError, ValueError, KeyError):
                last_use = max(times.get(_name(handle), 0), stat.modified)
                yield replace(self._read_entry(handle), nbytes=stat.size, last_use=last_use)

    @property
    def nbytes(self) -> int:
        """Size of all entries in bytes."""
        return sum(stat.size for stat in self._listed().values())

    def has(self, entry: KeptEntry, namespaces: Collection[str]) -> bool:
        """Whether there is KV for `entry` that a view of these `namespaces` may read."""
        if not entry.namespaces <= set(namespaces):
            return False
        handle = self._files.handle(entry.text, entry.home)
        stat = self._blobs.stat(_path(handle), recent=True)
        return stat is not None and not self._is_old(handle, stat) and self._is_sealed(handle)

    def _is_sealed(self, handle: Handle) -> bool:
        if self._seal is None:
            return True
        with suppress(FileNotFoundError, PackError):
            return self._seal.holds(self._files.header(handle, root=_ROOT))
        return False

    def read(self, entry: KeptEntry, namespaces: Collection[str]) -> KVTensors | None:
        """Return the KV of the tokens that `entry` and the stored entry have in common; `None` if there is none.

        The KV is on the CPU, `(kv_heads, tokens, head_dim)` per layer. Gives nothing to views that may not read it
        (`has`).
        """
        if not self.has(entry, namespaces):
            return None
        handle = self._files.handle(entry.text, entry.home)
        try:
            file = open_pack(self._blobs.read(_path(handle)))
            pack = self._files.own(handle, file.read())
        except OSError:  # Absent or unreachable: the model computes it.
            return None
        except PackError as error:
            logger.warning("An entry kept behind %s is dropped: %s", ", ".join(entry.packs), error)
            with suppress(OSError):  # In a read-only store, it is skipped each time.
                self._blobs.delete(_path(handle))
            return None
        if self._seal is not None and not self._seal.holds(file):  # Another writer replaced it after `has` checked it.
            return None
        self._uses.note(_name(handle))
        shared = common_length(pack.token_ids, entry.token_ids)
        return pack.kv.slice(0, shared) if pack.kv and shared else None

    def write(self, entry: KeptEntry, kv: KVTensors) -> bool:
        """Store `kv` for `entry`; `False` if the budget has no room, or if one of its packs is not stored."""
        pack = KnowledgePack(entry.text, entry.home, entry.token_ids, Prefix(), entry.model, kv).compressed("lossless")
        pack = pack if self._seal is None else self._seal.sealed(pack)
        handle, file = self._files.handle(pack.text, pack.namespace), encode_pack(pack)
        if file.nbytes > self.max_bytes or not self._are_stored(entry.packs):
            return False
        self._make_room(handle, file.nbytes)
        self._blobs.write(_path(handle), file.chunks())
        self._uses.note(_name(handle))
        if not self._are_stored(entry.packs):  # A pack was removed meanwhile; delete what was computed behind it.
            self._blobs.delete(_path(handle))
            return False
        return True

    def drop(self, owner: str) -> int:
        """Delete every entry that contains or follows the pack `owner` (a handle) or text of the namespace `owner`.

        Returns the number of deleted entries. Also deletes unreadable entries.
        """
        count = 0
        for handle, stat in self._listed().items():
            owners = frozenset({owner})
            with suppress(FileNotFoundError, PackCorruptError, ValueError, KeyError):
                owners = self._owners(handle, stat.version)
            if owner in owners:
                count += self._blobs.delete(_path(handle))
        return count

    def _make_room(self, own: Handle, size: int) -> None:
        """Delete entries that are too old, then the least recently used, until `size` more bytes fit."""
        listed = self._listed()
        listed.pop(own, None)
        times = self._uses.times()
        used = size + sum(stat.size for stat in listed.values())
        for handle in sorted(listed, key=lambda each: max(times.get(_name(each), 0), listed[each].modified)):
            if used <= self.max_bytes and not self._is_old(handle, listed[handle]):
                break
            self._blobs.delete(_path(handle))
            used -= listed[handle].size

    def _is_old(self, handle: Handle, found: BlobStat) -> bool:
        if self.max_age is None or time.time() - found.modified <= self.max_age:
            return False
        last_use = max(self._uses.times().get(_name(handle), 0), found.modified)
        return time.time() - last_use > self.max_age

    def _are_stored(self, packs: Collection[str]) -> bool:
        return all(self._blobs.stat(text_key(Handle.parse(pack))) for pack in packs)

    def _listed(self) -> dict[Handle, BlobStat]:
        entries = ((handle_of("packs" + key.removeprefix(_ROOT)), stat) for key, stat in self._blobs.list(f"{_ROOT}/"))
        return {entry[0]: stat for entry, stat in entries if entry and not entry[1]}

    def _read_entry(self, handle: Handle) -> KeptEntry:
        return KeptEntry.of(self._files.header(handle, root=_ROOT).pack)

    def _read_owners(self, handle: Handle, _version: str) -> frozenset[str]:
        """Return the packs and namespaces of an entry."""
        entry = self._read_entry(handle)
        return entry.namespaces.union(entry.packs)


@dataclass
class KeptKV:
    """Stored KV for the parts `start:stop` of one prompt, and the new KV that this prompt will store."""

    entries: KeptEntries
    namespaces: frozenset[str]
    keys: dict[tuple[int, int], KeptEntry]
    """The store entry of each part that may be kept."""
    is_urgent: bool = False
    """Whether `write` finishes before the call returns."""
    wanted: frozenset[tuple[int, int]] = frozenset()
    """The parts whose KV will be stored."""
    taken: list[tuple[KeptEntry, KVTensors]] = field(default_factory=list)

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """The parts of the prompt that may be kept, in order."""
        return sorted(self.keys)

    def has(self, start: int, stop: int) -> bool:
        """Whether the store has KV of this part that this view may read."""
        key = self.keys.get((start, stop))
        return key is not None and self.entries.has(key, self.namespaces)

    def read(self, start: int, stop: int) -> KVTensors | None:
        """Return KV of a part on the CPU, up to `stop` or the last token in common with the stored entry, or `None`."""
        key = self.keys.get((start, stop)) or next((key for at, key in self.keys.items() if at[0] == start), None)
        kv = None if key is None else self.entries.read(key, self.namespaces)
        return kv if kv is None or kv.tokens <= stop - start else kv.slice(0, stop - start)

    def take(self, start: int, stop: int, kv: KVTensors) -> None:
        """Collect `kv` of a part, to be stored after the answer."""
        self.taken.append((self.keys[start, stop], kv))

    def write(self, when_idle: Callable[[Callable[[], Iterator[None]]], object]) -> None:
        """Store the collected KV: now if `is_urgent`, otherwise when the engine is idle."""
        if self.taken and self.is_urgent:
            deque(self._steps(), maxlen=0)
        elif self.taken:
            with suppress(BusyError):  # A later request can store it.
                when_idle(self._steps)

    def _steps(self) -> Iterator[None]:
        """Store the collected KV, one entry per step; on an I/O error, skip the entry."""
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
