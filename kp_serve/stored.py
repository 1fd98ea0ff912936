"""KV of prompts in a store, found by token ids alone: the entries of packs where prompts have them, and others."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from kp_core import Handle, KnowledgePack, KVTensors, ModelFingerprint, PackStore
from kp_core.errors import PackCorruptError, PackError
from kp_core.packs.codec import Compression
from kp_core.packs.entry import Entry, EntryFile, digest_of
from kp_core.rope import Rope
from kp_serve.asked import blocks_of

_AT_ONCE = 8
_FIRST = 4  # Number of first tokens that index the packs behind one prefix.

Reader: TypeAlias = Callable[[int], tuple[Tensor, Tensor]]
"""Returns keys and values of one layer, `(kv_heads, tokens, head_dim)`, in any thread; may raise `PackCorruptError`."""


@dataclass(frozen=True)
class Part:
    """Tokens of a prompt from `start` on whose KV is that of `entry`, which may have been computed elsewhere.

    They may end with a steered block. Its KV is stored plain, and altered when it is read.
    """

    start: int
    entry: Entry
    block: str = ""
    """The steered block as JSON (`blocks_as_json`); empty for none."""

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.entry.token_ids)

    @property
    def by(self) -> int:
        """Distance in positions from where its KV was computed."""
        return self.start - self.entry.at

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Part:
        """Build a part from `dataclasses.asdict` after a round trip through JSON."""
        fields = dict(data["entry"])
        fields |= {"model": ModelFingerprint.from_dict(fields["model"]), "token_ids": tuple(fields["token_ids"])}
        return cls(data["start"], Entry(**fields | {"owners": frozenset(fields["owners"])}), data["block"])


def named(parts: Sequence[Part]) -> str:
    """The name of consecutive parts in logs."""
    owners = sorted({owner for part in parts for owner in part.entry.owners})
    return owners[0] if len(owners) == 1 else f"{len(parts)} parts of {', '.join(owners)}"


class StoredKV:
    """The entries of a store for vLLM: KV of prompts from their first token on, for one model in one dtype.

    A pack's KV begins behind its prefix. So the KV of the prefix is stored too, once for all packs of a namespace
    behind it. KV of other engines is read as well: for equal ids, weights and dtype it is equal up to rounding, as
    vLLM's own KV is from batch to batch. Overwritten KV is not read. Entries are written as `compress` says.
    """

    def __init__(
        self, store: PackStore, model: ModelFingerprint, compress: Compression = "lossless", rope: Rope | None = None
    ) -> None:
        """With `rope`, KV is also moved to other positions."""
        self.store, self.model, self._compress, self._rope = store, model, compress, rope
        self._indexes: dict[str, _Index] = {}
        self._lock = threading.Lock()

    def find(self, token_ids: Sequence[int], namespaces: Collection[str]) -> Iterator[tuple[Part, ...]]:
        """The packs of these namespaces that a prompt begins with, longest first, whether or not their KV is stored.

        Each with its prefix before it.
        """
        with self._lock:
            changes = self.store.changes
            for name in namespaces:
                index = self._indexes.setdefault(name, _Index(self.store, self.model))
                index.refresh(name, changes)
            runs = [parts for name in namespaces for parts in self._indexes[name].find(token_ids)]
            return iter(sorted(runs, key=lambda parts: parts[-1].stop, reverse=True))

    def has(self, parts: Sequence[Part], namespaces: Collection[str], start: int = 0) -> bool:
        """Whether KV is stored for the last part, and for the other parts that end behind token `start`."""
        *earlier_parts, last = parts
        needed = [*(part for part in earlier_parts if part.stop > start), last]
        return all(self.store.has(part.entry, namespaces) for part in needed)

    def open(
        self, parts: Sequence[Part], namespaces: Collection[str], start: int, stop: int, layers: int
    ) -> list[Reader]:
        """Consecutive readers of the KV of tokens `start:stop` of a prompt, for a model with `layers` layers.

        Raises `PackError` if KV is missing or may not be read, as far as this shows before it is read.
        """
        readers = []
        for part in parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                file = self.store.open(part.entry, namespaces)
                if file is None or file.entry.token_ids != part.entry.token_ids:
                    raise PackError(f"The KV of {named([part])} is not stored (any more), or may not be read.")
                if file.layers != layers:
                    raise PackError(f"The KV has {file.layers} layers; this model has {layers}.")
                readers.append(self._reader(part, slice(low - part.start, high - part.start), file))
        return readers

    def _reader(self, part: Part, own: slice, file: EntryFile) -> Reader:
        rope = self._rope
        if part.by and rope is None:
            raise PackError("The keys of this server's model cannot be moved.")
        altered = self._altered(part, file) if part.block else None

        def read(layer: int) -> tuple[Tensor, Tensor]:
            if altered is not None:
                key, value = altered.keys[layer], altered.values[layer]
            else:
                with self._deleting(part):
                    key, value = file.tensor(2 * layer), file.tensor(2 * layer + 1)
            key, value = key[:, own], value[:, own]
            return (rope.turned(key, part.by) if rope and part.by and rope.layers[layer] else key), value

        return read

    def _altered(self, part: Part, file: EntryFile) -> KVTensors:
        [block] = blocks_of(json.loads(part.block))
        start, stop = block.start - part.start, block.stop - part.start
        with self._deleting(part):
            kv = file.read()
        return KVTensors.concat([kv.slice(0, start), block.steered(kv.slice(start, stop))])

    @contextmanager
    def _deleting(self, part: Part) -> Iterator[None]:
        """If an entry is damaged, delete it, so that it is computed next time."""
        try:
            yield
        except PackCorruptError as error:
            self.store.discard(part.entry, error)
            raise

    def write(self, parts: Sequence[Part], kv: KVTensors) -> None:
        """Store computed KV of consecutive parts. Raises `PackError` for another number of tokens."""
        start, expected = parts[0].start, parts[-1].stop - parts[0].start
        if kv.tokens != expected:
            raise PackError(f"Got KV of {kv.tokens} tokens for {named(parts)}; expected {expected}.")
        for part in parts:
            if not self.store.has(part.entry, part.entry.namespaces):
                part_kv = kv.slice(part.start - start, part.stop - start)
                self.store.write(part.entry, part_kv.clone(), self._compress)


class _Index:
    """Index of one namespace's packs by prefix and first tokens. A refresh reads only what is new in the store."""

    def __init__(self, store: PackStore, model: ModelFingerprint) -> None:
        self._store, self._model, self._changes = store, model, ""
        self._known: dict[Handle, str] = {}
        self._found: dict[tuple[int, ...], dict[tuple[int, ...], dict[Handle, list[Part]]]] = {}

    def refresh(self, namespace: str, changes: str) -> None:
        if changes == self._changes and changes:
            return
        versions = self._store.versions(namespace)
        stale = {handle for handle, version in self._known.items() if versions.get(handle) != version}
        for found in (found for behind in self._found.values() for found in behind.values()):
            for handle in stale & found.keys():
                del found[handle]
        new = versions.keys() - (self._known.keys() - stale)
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # It starts its threads when it is first used.
            read = list((pool.map if self._store.blobs.is_far else map)(self._compiled, new))
        for handle, packs in zip(new, read, strict=True):
            for pack in packs:
                model = pack.fingerprint
                if pack.token_ids and model.same_model(self._model) and model.dtype == self._model.dtype:
                    parts = self._found.setdefault(pack.prefix, defaultdict(dict))[pack.token_ids[:_FIRST]]
                    parts.setdefault(handle, []).extend(
                        Part(len(pack.prefix), Entry.of_pack(handle, each, pack.prefix, pack.token_ids))
                        for each in dict.fromkeys((self._model, model))
                    )
        self._known, self._changes = versions, changes

    def _compiled(self, handle: Handle) -> tuple[KnowledgePack, ...]:
        with suppress(PackCorruptError):
            return self._store.compiled(handle)
        return ()

    def find(self, token_ids: Sequence[int]) -> Iterator[tuple[Part, ...]]:
        for prefix, packs in self._found.items():
            at = len(prefix)
            if tuple(token_ids[:at]) != prefix:
                continue
            for count in range(1, _FIRST + 1):
                for handle, parts in packs.get(tuple(token_ids[at : at + count]), {}).items():
                    head = Entry(self._model, 0, digest_of(()), prefix, frozenset({handle.namespace}))
                    for part in parts:
                        if tuple(token_ids[at : part.stop]) == part.entry.token_ids:
                            yield (Part(0, head), part) if prefix else (part,)
