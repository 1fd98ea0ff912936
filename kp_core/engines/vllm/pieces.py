"""Which stored KV a prompt begins with, told by token ids alone."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from kp_core.engines.local.altered import altered
from kp_core.engines.vllm.altered import Below
from kp_core.engines.vllm.spliced import KeptPart, Laid, MovedPack, Packet
from kp_core.errors import PackCorruptError, PackError
from kp_core.kv import KVTensors
from kp_core.packs.codec import Compression
from kp_core.packs.file import PackFile
from kp_core.packs.files import PackFiles, handle_of
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.kept import KeptEntry
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.packs.store import PackStore
from kp_core.rope import Rope

__all__ = ["Kept", "LayeredKV", "Loaded", "Piece", "StoredPieces", "saved_from"]

logger = logging.getLogger(__name__)

_HEAD = "prefix of packs"  # What `KeptEntry.before` says of the KV that stands before packs.
_FIRST = 4  # Tokens by which the packs behind one prefix are told apart at first.


@dataclass(frozen=True)
class Piece:
    """A pack where a prompt has it: its tokens are `start:stop` of the prompt, and exactly its prefix stands before."""

    handle: Handle
    key: PackKey
    token_ids: tuple[int, ...]

    @property
    def start(self) -> int:
        """Where it begins: behind its prefix."""
        return len(self.prefix)

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + len(self.token_ids)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The token ids that stand before it."""
        return self.key.prefix.token_ids if self.key.prefix else ()

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt begins with it, its prefix included."""
        return tuple(token_ids[: self.stop]) == self.prefix + self.token_ids


Loaded: TypeAlias = Piece | Below | Laid
"""What a prompt begins with."""
Kept: TypeAlias = Piece | Below | KeptPart
"""What is kept of KV that the server computed."""


def saved_from(piece: Kept) -> int:
    """The first token whose KV is stored: of packs their prefix, too."""
    return piece.start if isinstance(piece, KeptPart) else 0


@dataclass(frozen=True)
class LayeredKV:
    """KV of a prompt from one of its tokens on, that is read layer by layer.

    `read` gives keys and values of one layer, `(kv_heads, tokens, head_dim)`, in parts that follow one another. Layers
    may be read in several threads, and each may raise `PackCorruptError`.
    """

    layers: int
    read: Callable[[int], list[tuple[Tensor, Tensor]]]

    def whole(self) -> KVTensors:
        """All of it; raises as `read`."""
        parts = [self.read(layer) for layer in range(self.layers)]
        keys, values = (tuple(torch.cat([part[half] for part in each], 1) for each in parts) for half in (0, 1))
        return KVTensors(keys, values)


class StoredPieces:
    """The packs of a store as vLLM needs them: KV from the first token on, of one model in one dtype.

    A pack's KV begins behind its prefix, so that of the prefix is stored too, once for all packs of a namespace that
    stand behind it. KV from other engines serves as well: for equal ids, weights and dtype it is equal up to rounding,
    as what vLLM itself computes is from batch to batch. KV that was rounded for storage is not read. Packs are written
    as `compress` says.
    """

    def __init__(
        self, store: PackStore, model: ModelFingerprint, compress: Compression = "lossless", rope: Rope | None = None
    ) -> None:
        """With `rope`, packs are moved as well."""
        self.store, self.model, self._compress, self._rope = store, model, compress, rope
        self._files = store.files
        self._indexes: dict[str, _Index] = {}
        self._lock = threading.Lock()

    def find(self, token_ids: Sequence[int], namespaces: Collection[str]) -> Iterator[Piece]:
        """The packs of these namespaces that a prompt begins with, the longest first; stored KV or not."""
        with self._lock:
            changes = self.store.changes
            for name in namespaces:
                index = self._indexes.setdefault(name, _Index(self._files, self.model))
                index.refresh(name, changes)
            found = chain.from_iterable(self._indexes[name].find(token_ids) for name in namespaces)
            return iter(sorted(found, key=lambda piece: piece.stop, reverse=True))

    def has(self, piece: Piece) -> bool:
        """Whether the KV of a pack is stored."""
        with suppress(PackError):
            found = self.store.peek(piece.handle, piece.key)
            is_stored = found is not None and piece.key.fits(found) and found.stored_bytes > 0
            return is_stored and self.store.is_sealed(piece.handle, piece.key)
        return False

    def has_prefix(self, piece: Piece) -> bool:
        """Whether the KV of all that stands before a pack is stored."""
        return self.store.kept.has(self._head(piece), (piece.handle.namespace,))

    def read(self, piece: Loaded, start: int) -> KVTensors:
        """The KV of a prompt from token `start` to the end of a piece; raises `PackError` where it is lost."""
        return self.open(piece, start, piece.stop).whole()

    def open(self, piece: Loaded, start: int, stop: int) -> LayeredKV:
        """The KV of the tokens `start:stop` of a prompt that begins with a piece, which ends at `stop` or behind it.

        Raises `PackError` where it is lost, as far as that is seen before it is read.
        """
        if isinstance(piece, Below):
            return _layered(self._altered(piece).slice(start, stop))
        if isinstance(piece, Laid):
            return self._laid(piece, start, stop)
        pack = self._opened(piece)
        head = None
        if start < piece.start:
            head = self.store.kept.read(self._head(piece), (piece.handle.namespace,))
            if head is None or head.tokens != piece.start:
                raise PackError(f"The KV of what stands before {piece.handle} is not stored any more.")
            head = head.slice(start, min(stop, piece.start))
        own = slice(max(start - piece.start, 0), max(stop - piece.start, 0))

        def read(layer: int) -> list[tuple[Tensor, Tensor]]:
            key, value = self._tensors(piece, pack, layer)
            before = [] if head is None else [(head.keys[layer], head.values[layer])]
            return [*before, (key[:, own], value[:, own])]

        return LayeredKV(len(pack.digests) // 2, read)

    def _laid(self, laid: Laid, start: int, stop: int) -> LayeredKV:
        """Packs moved to where a prompt has them, and what was computed between them."""
        if self._rope is None:
            raise PackError("The keys of this server's model cannot be moved.")
        moved = [part for part in laid.parts if not isinstance(part, KeptPart)]
        if any(part.handle.namespace not in laid.namespaces for part in moved):
            raise PackError("The packs that are to be moved may not be read.")
        rope, layers = self._rope, len(self._rope.layers)
        readers = [
            self._kept_part(part, start, stop) if isinstance(part, KeptPart) else self._moved(part, start, stop, rope)
            for part in laid.parts
            if start < part.stop and part.start < stop
        ]
        return LayeredKV(layers, lambda layer: [each(layer) for each in readers])

    def _moved(self, part: MovedPack | Packet, start: int, stop: int, rope: Rope) -> _Reader:
        low, high = max(start, part.start), min(stop, part.stop)
        if isinstance(part, Packet):
            plain = self._kept_part(part.kept, low - part.by, high - part.by)
        else:
            pack, own = self._opened(part), slice(low - part.start, high - part.start)

            def plain(layer: int) -> tuple[Tensor, Tensor]:
                key, value = self._tensors(part, pack, layer)
                return key[:, own], value[:, own]

        def read(layer: int) -> tuple[Tensor, Tensor]:
            key, value = plain(layer)
            return (rope.turned(key, part.by) if rope.layers[layer] else key), value

        return read

    def _kept_part(self, part: KeptPart, start: int, stop: int) -> _Reader:
        kv = self.store.kept.read(part.key, part.namespaces)
        if kv is None or kv.tokens != part.stop - part.start:
            raise PackError("What moved packs need is not stored (any more), or may not be read.")
        kv = kv.slice(max(start - part.start, 0), min(stop, part.stop) - part.start)
        return lambda layer: (kv.keys[layer], kv.values[layer])

    def _opened(self, piece: Piece | MovedPack) -> PackFile:
        """The file of a pack, which holds its KV."""
        try:
            opened = self.store.open(piece.handle, piece.key)
        except PackCorruptError:
            self._mend(piece)
            raise
        pack = opened.pack
        if not opened.digests or not piece.key.fits(pack) or pack.token_ids != piece.token_ids:
            raise PackError(f"The KV of {piece.handle} is not stored any more, or of other tokens.")
        # Of the digests in the head, which each tensor is held to when it is read.
        if self.store.seal is not None and not self.store.seal.holds(opened):
            raise PackError(f"The KV of {piece.handle} does not carry the MAC of this server's key.")
        return opened

    def _tensors(self, piece: Piece | MovedPack, opened: PackFile, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        try:
            return opened.tensor(2 * layer), opened.tensor(2 * layer + 1)
        except PackCorruptError:
            self._mend(piece)
            raise

    def write(self, piece: Kept, kv: KVTensors) -> None:
        """Store what the server computed: `kv` is that of all tokens from `saved_from` to the end of the piece."""
        if kv.tokens != (expected := piece.stop - saved_from(piece)):
            raise PackError(f"Got KV of {kv.tokens} tokens for {piece.handle}; expected {expected}.")
        if not isinstance(piece, Piece):
            self.store.kept.write(piece.key, kv)
            return
        if not self.has_prefix(piece) and piece.start:
            self.store.kept.write(self._head(piece), kv.slice(0, piece.start).clone())
        stored = self.store.peek(piece.handle, piece.key)
        if stored is None or self.has(piece):
            return
        made = replace(
            stored,
            token_ids=piece.token_ids,
            prefix=piece.key.prefix or Prefix(),
            fingerprint=self.model,
            kv=kv.slice(piece.start, piece.stop).clone(),
        )
        made = made if self.store.seal is None else self.store.seal.sealed(made)
        self.store.put(made.compressed(self._compress))
        if made.key != piece.key:  # A text that was stored for another engine has an entry more.
            self.store.files.note_change()

    def _mend(self, piece: Piece | MovedPack) -> None:
        """Let the store set aside what is damaged, so that it is computed next time."""
        with suppress(OSError, PackError):
            self.store.get(piece.handle, piece.key)

    def _altered(self, below: Below) -> KVTensors:
        """What is kept below the last block of a prompt, with that altered."""
        kv = self.store.kept.read(below.key, below.namespaces)
        if kv is None or kv.tokens != below.stop:
            raise PackError("The KV that is to be altered is not stored (any more), or may not be read.")
        block = below.altered.block(len(below.altered.blocks) - 1)
        return KVTensors.concat([kv.slice(0, block.start), altered(kv.slice(block.start, block.stop), block)])

    def _head(self, piece: Piece) -> KeptEntry:
        return KeptEntry(self.model, 0, _HEAD, piece.prefix, (), piece.handle.namespace)


_Reader: TypeAlias = Callable[[int], tuple[Tensor, Tensor]]


def _layered(kv: KVTensors) -> LayeredKV:
    return LayeredKV(kv.layers, lambda layer: [(kv.keys[layer], kv.values[layer])])


class _Index:
    """The entries of one namespace by their prefix and first tokens; only what is new in the store is looked at."""

    def __init__(self, files: PackFiles, model: ModelFingerprint) -> None:
        self._files, self._model, self._changes = files, model, ""
        self._known: dict[tuple[Handle, str], str] = {}
        self._found: dict[tuple[int, ...], dict[tuple[int, ...], dict[tuple[Handle, str], Piece]]] = {}

    def refresh(self, namespace: str, changes: str) -> None:
        if changes == self._changes and changes:
            return
        listed = {
            entry: stat.version
            for key, stat in self._files.blobs.list(f"packs/{namespace}/")
            if key.endswith(".safetensors") and (entry := handle_of(key))
        }
        stale = {entry for entry, version in self._known.items() if listed.get(entry) != version}
        for pieces in chain.from_iterable(behind.values() for behind in self._found.values()):
            for entry in stale & pieces.keys():
                del pieces[entry]
        for entry in listed.keys() - (self._known.keys() - stale):
            pack = self._files.look(*entry)
            if pack is not None and self._serves(pack):
                piece = Piece(entry[0], pack.key, pack.token_ids)
                behind = self._found.setdefault(piece.prefix, defaultdict(dict))
                behind[piece.token_ids[:_FIRST]][entry] = piece
        self._known, self._changes = listed, changes

    def find(self, token_ids: Sequence[int]) -> Iterator[Piece]:
        for prefix, packs in self._found.items():
            at = len(prefix)
            if tuple(token_ids[:at]) != prefix:
                continue
            for count in range(1, _FIRST + 1):
                pieces = packs.get(tuple(token_ids[at : at + count]), {})
                yield from (piece for piece in pieces.values() if piece.begins(token_ids))

    def _serves(self, pack: KnowledgePack) -> bool:
        made = pack.fingerprint
        return bool(pack.token_ids) and made.same_model(self._model) and made.dtype == self._model.dtype
