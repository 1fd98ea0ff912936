"""KV of prompts in a store, found by token ids alone: packs where prompts have them, and kept parts of prompts."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor

from kp_core.errors import PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.codec import Compression
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.kept import KeptEntry
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.store import PackStore, entry_of
from kp_core.rope import Rope
from kp_serve.asked import blocks_of

__all__ = ["KeptPart", "PackPart", "Part", "Reader", "StoredKV", "StoredRun", "is_compiled", "part_of"]

_HEAD = "prefix of packs"  # `KeptPart.before` for the KV of a prefix of packs.
_FIRST = 4  # Number of first tokens that index the packs behind one prefix.


@dataclass(frozen=True)
class PackPart:
    """Tokens of a prompt from `start` on whose KV is that of a pack, compiled behind the tokens `prefix`."""

    start: int
    token_ids: tuple[int, ...]
    handle: str
    prefix: tuple[int, ...]
    model: ModelFingerprint | None = None
    """The model of the pack's entry, if it is not this server's own."""

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.token_ids)

    @property
    def by(self) -> int:
        """Distance in positions from where its KV was computed."""
        return self.start - len(self.prefix)


@dataclass(frozen=True)
class KeptPart:
    """Tokens of a prompt from `start` on whose KV was computed at position `at` and kept (see `KeptEntry`).

    They may end with a steered block. It is kept plain, and altered when it is read.
    """

    start: int
    token_ids: tuple[int, ...]
    at: int
    before: str
    packs: tuple[str, ...] = ()
    words: str | None = None
    block: str = ""
    """The steered block as JSON (`blocks_as_json`); empty for none."""

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.token_ids)

    @property
    def by(self) -> int:
        """Distance in positions from where its KV was computed."""
        return self.start - self.at

    def key(self, model: ModelFingerprint) -> KeptEntry:
        """Its key in the store."""
        return KeptEntry(model, self.at, self.before, self.token_ids, self.packs, self.words)


Part: TypeAlias = PackPart | KeptPart
Reader: TypeAlias = Callable[[int], tuple[Tensor, Tensor]]
"""Returns keys and values of one layer, `(kv_heads, tokens, head_dim)`, in any thread; may raise `PackCorruptError`."""


def part_of(data: Mapping[str, Any]) -> Part:
    """Build a part from `dataclasses.asdict` after a round trip through JSON."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return PackPart(**fields) if "handle" in fields else KeptPart(**fields)


@dataclass(frozen=True)
class StoredRun:
    """Consecutive parts of a prompt whose KV is stored, or will be, for readers of `namespaces`."""

    parts: tuple[Part, ...]
    namespaces: tuple[str, ...]

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.parts[0].start

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return self.parts[-1].stop

    def __str__(self) -> str:
        """Its name in logs."""
        packs = [part.handle for part in self.parts if isinstance(part, PackPart)]
        return packs[0] if len(packs) == 1 else f"{len(packs)} packs" if packs else "what was kept of a prompt"


class StoredKV:
    """The packs of a store for vLLM: KV of prompts from their first token on, for one model in one dtype.

    A pack's KV begins behind its prefix. So the KV of the prefix is stored too, once for all packs of a namespace
    behind it. KV of other engines is read as well: for equal ids, weights and dtype it is equal up to rounding, as
    vLLM's own KV is from batch to batch. Overwritten KV is not read. Packs are written as `compress`
    says.
    """

    def __init__(
        self, store: PackStore, model: ModelFingerprint, compress: Compression = "lossless", rope: Rope | None = None
    ) -> None:
        """With `rope`, KV is also moved to other positions."""
        self.store, self.model, self._compress, self._rope = store, model, compress, rope
        self._indexes: dict[str, _Index] = {}
        self._lock = threading.Lock()

    def find(self, token_ids: Sequence[int], namespaces: Collection[str]) -> Iterator[StoredRun]:
        """The packs of these namespaces that a prompt begins with, longest first, whether or not their KV is stored."""
        with self._lock:
            changes = self.store.changes
            for name in namespaces:
                index = self._indexes.setdefault(name, _Index(self.store, self.model))
                index.refresh(name, changes)
            runs = [_whole(pack, name) for name in namespaces for pack in self._indexes[name].find(token_ids)]
            return iter(sorted(runs, key=lambda run: run.stop, reverse=True))

    def has(self, run: StoredRun, start: int = 0) -> bool:
        """Whether KV is stored for the last part, and for the other parts that end behind token `start`."""
        *earlier_parts, last = run.parts
        needed = [*(part for part in earlier_parts if part.stop > start), last]
        return all(self._has(part, run.namespaces) for part in needed)

    def _has(self, part: Part, namespaces: Collection[str]) -> bool:
        if isinstance(part, KeptPart):
            return self.store.has_kept(part.key(self.model), namespaces)
        with suppress(PackError):
            return is_compiled(self.store, *self._key(part))
        return False

    def open(self, run: StoredRun, start: int, stop: int, layers: int) -> list[Reader]:
        """Consecutive readers of the KV of tokens `start:stop` of a prompt, for a model with `layers` layers.

        Raises `PackError` if KV is missing or may not be read, as far as this shows before it is read.
        """
        readers = []
        for part in run.parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                if isinstance(part, KeptPart):
                    count, reader = self._kept(part, run.namespaces)
                else:
                    count, reader = self._pack(part, run.namespaces)
                if count != layers:
                    raise PackError(f"The KV has {count} layers; this model has {layers}.")
                readers.append(self._moved(part, slice(low - part.start, high - part.start), reader))
        return readers

    def _moved(self, part: Part, own: slice, read: Reader) -> Reader:
        rope = self._rope
        if part.by and rope is None:
            raise PackError("The keys of this server's model cannot be moved.")

        def moved(layer: int) -> tuple[Tensor, Tensor]:
            key, value = read(layer)
            key, value = key[:, own], value[:, own]
            return (rope.turned(key, part.by) if rope and part.by and rope.layers[layer] else key), value

        return moved

    def _kept(self, part: KeptPart, namespaces: Collection[str]) -> tuple[int, Reader]:
        kv = self.store.read_kept(part.key(self.model), namespaces)
        if kv is None or kv.tokens != len(part.token_ids):
            raise PackError("What was kept of this prompt is not stored (any more), or may not be read.")
        if part.block:
            [block] = blocks_of(json.loads(part.block))
            start, stop = block.start - part.start, block.stop - part.start
            kv = KVTensors.concat([kv.slice(0, start), block.steered(kv.slice(start, stop))])
        return kv.layers, lambda layer: (kv.keys[layer], kv.values[layer])

    def _pack(self, part: PackPart, namespaces: Collection[str]) -> tuple[int, Reader]:
        handle, key = self._key(part)
        if handle.namespace not in namespaces:
            raise PackError(f"{handle} may not be read.")
        with self._mending(part):
            entry = self.store.open(handle, key)
        pack = entry.pack
        if not entry.digests or not key.fits(pack) or pack.token_ids != part.token_ids:
            raise PackError(f"The KV of {handle} is not stored any more, or of other tokens.")

        def read(layer: int) -> tuple[Tensor, Tensor]:
            with self._mending(part):
                return entry.tensor(2 * layer), entry.tensor(2 * layer + 1)

        return len(entry.digests) // 2, read

    @contextmanager
    def _mending(self, part: PackPart) -> Iterator[None]:
        """If an entry is damaged, let the store set it aside, so that it is computed next time."""
        try:
            yield
        except PackCorruptError:
            with suppress(OSError, PackError):
                self.store.get(*self._key(part))
            raise

    def write(self, run: StoredRun, kv: KVTensors) -> None:
        """Store computed KV, except for parts that are already stored. `kv` is that of all tokens of the run.

        Raises `PackError` for another number of tokens.
        """
        if kv.tokens != (expected := run.stop - run.start):
            raise PackError(f"Got KV of {kv.tokens} tokens for {run}; expected {expected}.")
        for part in run.parts:
            if self._has(part, run.namespaces):
                continue
            part_kv = kv.slice(part.start - run.start, part.stop - run.start).clone()
            if isinstance(part, KeptPart):
                self.store.write_kept(part.key(self.model), part_kv)
            else:
                self._write_pack(part, part_kv)

    def _write_pack(self, part: PackPart, kv: KVTensors) -> None:
        handle, key = self._key(part)
        stored = self.store.peek(handle, key)
        if stored is None:
            return
        new_pack = replace(stored, token_ids=part.token_ids, prefix=part.prefix, fingerprint=self.model, kv=kv)
        self.store.put(self.store.sealed(new_pack).compressed(self._compress))
        if new_pack.key != key:  # A text that was stored for another engine has a second entry now.
            self.store.note_change()

    def _key(self, part: PackPart) -> tuple[Handle, PackKey]:
        return Handle.parse(part.handle), PackKey(part.model or self.model, part.prefix)


def is_compiled(store: PackStore, handle: Handle, key: PackKey) -> bool:
    """Whether the KV of a pack is stored and may be read."""
    pack = store.peek(handle, key)
    return pack is not None and key.fits(pack) and pack.stored_bytes > 0 and store.is_sealed(handle, key)


def _whole(pack: PackPart, namespace: str) -> StoredRun:
    """A pack at the position it was compiled for, with its prefix before it."""
    head = KeptPart(0, pack.prefix, 0, _HEAD, words=namespace)
    return StoredRun((head, pack) if pack.prefix else (pack,), (namespace,))


class _Index:
    """Index of one namespace's entries by prefix and first tokens. A refresh reads only what is new in the store."""

    def __init__(self, store: PackStore, model: ModelFingerprint) -> None:
        self._store, self._model, self._changes = store, model, ""
        self._known: dict[tuple[Handle, str], str] = {}
        self._found: dict[tuple[int, ...], dict[tuple[int, ...], dict[tuple[Handle, str], PackPart]]] = {}

    def refresh(self, namespace: str, changes: str) -> None:
        if changes == self._changes and changes:
            return
        versions = {
            entry: stat.version
            for key, stat in self._store.blobs.list(f"packs/{namespace}/")
            if key.endswith(".safetensors") and (entry := entry_of(key))
        }
        stale = {entry for entry, version in self._known.items() if versions.get(entry) != version}
        for packs in chain.from_iterable(behind.values() for behind in self._found.values()):
            for entry in stale & packs.keys():
                del packs[entry]
        for entry in versions.keys() - (self._known.keys() - stale):
            pack = self._store.look(*entry)
            if pack is not None and self._serves(pack):
                prefix, ids = pack.prefix, pack.token_ids
                packs_by_start = self._found.setdefault(prefix, defaultdict(dict))
                packs_by_start[ids[:_FIRST]][entry] = PackPart(
                    len(prefix), ids, str(entry[0]), prefix, pack.fingerprint
                )
        self._known, self._changes = versions, changes

    def find(self, token_ids: Sequence[int]) -> Iterator[PackPart]:
        for prefix, packs in self._found.items():
            at = len(prefix)
            if tuple(token_ids[:at]) != prefix:
                continue
            for count in range(1, _FIRST + 1):
                for part in packs.get(tuple(token_ids[at : at + count]), {}).values():
                    if tuple(token_ids[at : part.stop]) == part.token_ids:
                        yield part

    def _serves(self, pack: KnowledgePack) -> bool:
        fingerprint = pack.fingerprint
        return bool(pack.token_ids) and fingerprint.same_model(self._model) and fingerprint.dtype == self._model.dtype
