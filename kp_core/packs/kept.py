"""KV computed behind other packs, kept on disk: the prefix tree of a store. `docs/format.md` specifies it."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

from kp_core.errors import BusyError
from kp_core.kv import KVTensors
from kp_core.packs.envelope import to_json
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace
from kp_core.packs.pack import KnowledgePack, Prefix

if TYPE_CHECKING:
    from kp_core.packs.view import Packs

__all__ = ["KeptEntry", "KeptKV"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptEntry:
    """The key of stored KV of `token_ids` at the position `at`, behind what the digest `before` covers.

    That is all earlier tokens and how they were changed or composed. `packs` are the handles of all packs in the entry
    and before it. `words` is the namespace of the conversation whose messages stand there, or `None` if there are only
    packs and the template. With `begins`, an entry is found by its first `begins` tokens, and a prompt that continues
    differently reads the common part.
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
    planned: float = field(default_factory=time.time, compare=False)
    """When a request planned to read or write it, in seconds since 1970."""

    @classmethod
    def wrapped(
        cls, model: ModelFingerprint, composer: str, prefix: Prefix, token_ids: tuple[int, ...], handle: str
    ) -> KeptEntry:
        """The entry of a pack that `composer` wrapped in tokens of its own; `token_ids` include those."""
        before = blake2b(f"{composer}\0{prefix}".encode(), digest_size=16).hexdigest()
        return cls(model, len(prefix), before, token_ids, (handle,))

    @classmethod
    def of(cls, pack: KnowledgePack) -> KeptEntry:
        """Read the entry from a pack that `write_kept` stored; raises `ValueError` or `KeyError` for others."""
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


@dataclass
class KeptKV:
    """Stored KV for the parts `start:stop` of one prompt, and the new KV that this prompt will store."""

    store: Packs
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
        return key is not None and self.store.has_kept(key, self.namespaces)

    def read(self, start: int, stop: int) -> KVTensors | None:
        """Return KV of a part on the CPU, up to `stop` or the last token in common with the stored entry, or `None`."""
        key = self.keys.get((start, stop)) or next((key for at, key in self.keys.items() if at[0] == start), None)
        kv = None if key is None else self.store.read_kept(key, self.namespaces)
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
                self.store.write_kept(entry, kv)
            except OSError as error:
                logger.warning("KV behind %s could not be kept: %s", ", ".join(entry.packs), error)
            yield
